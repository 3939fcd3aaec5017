"""Settings of the comparison of SAEs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sampled_sae.checks import numbers, require, whole_numbers

Across = Literal["all", "reference", "none"]
Seeds = Literal["same", "different"]
Matched = Literal["all", "live", "none"]


@dataclass(frozen=True, slots=True)
class SimilarityConfig:
    """What is compared, and how exactly."""

    across: Across = "all"
    """Pairs of different configurations: all of them, those with the reference (as in the paper), or none."""
    seeds: Seeds = "same"
    """Of two configurations: the same seed of both, which share their start values and so stay alike, or different
    ones."""
    reference: str | None = None
    """Label of the reference configuration; by default batchtopk where there is one, else the first."""
    threshold: float = 0.7
    """Cosine from which on two latents count as the same feature; a latent with such a partner is not unique."""
    matching: Matched = "all"
    """One-to-one matching of all latents, of those that fire, or none."""
    exact_up_to: int = 8192
    """Latents a side up to which the matching reads all cosines at once; beyond, only each latent's best candidates."""
    candidates: int = 32
    """Best partners of each latent, of both SAEs, that a large matching begins with."""
    rounds: int = 3
    """How often a large matching may add candidates until it is as good as the exact one."""
    tolerance: float = 1e-4
    """Mean cosine a pair by which a large matching may stay below its upper bound."""
    unique: int = 10
    """Latents in each table: the most unique ones, and those explained best."""
    at_once: int = 2**26
    """Cosines held at one time (4 bytes each); results are the same whatever it is, up to rounding."""

    def __post_init__(self) -> None:
        sizes = ("exact_up_to", "candidates", "rounds", "unique", "at_once")
        whole_numbers(self, *sizes)
        numbers(self, "threshold", "tolerance")
        for name, kind in (("across", Across), ("seeds", Seeds), ("matching", Matched)):
            value = getattr(self, name)
            require(value in get_args(kind), name, value, f"must be one of {', '.join(get_args(kind))}")
        for name in sizes:
            least = 0 if name in ("exact_up_to", "unique") else 1
            require(getattr(self, name) >= least, name, getattr(self, name), f"must be at least {least}")
        require(-1 <= self.threshold <= 1, "threshold", self.threshold, "must be a cosine between -1 and 1")
        require(self.tolerance >= 0, "tolerance", self.tolerance, "must not be negative")
