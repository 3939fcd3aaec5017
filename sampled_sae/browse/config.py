"""What the browser keeps of each latent."""

from __future__ import annotations

from dataclasses import dataclass

from sampled_sae.checks import numbers, require, whole_numbers


@dataclass(frozen=True, slots=True)
class BrowseConfig:
    """How much is shown of each latent, and which tokens count."""

    top: int = 10
    """Contexts of the largest activations."""
    bands: int = 5
    """Equal parts of the range from 0 to the largest activation, from each of which contexts are drawn."""
    each: int = 3
    """Contexts drawn from each of those parts."""
    tokens_kept: int = 8
    """Tokens that hold most of a latent's activation; these are searched."""
    bins: int = 32
    """Bins of the histogram of activations."""
    promoted: int = 10
    """Output tokens that it promotes most, and as many that it suppresses."""
    near: int = 5
    """Nearest latents by decoder cosine, in this SAE and in the other one."""
    norm_factor: float = 10.0
    """Tokens whose norm is above this many times the median are not read; inf reads all."""
    contexts_at_once: int = 16
    """Contexts in one pass through the model; what is shown is the same whatever it is."""
    tokens_at_once: int = 2048
    """Tokens that an SAE encodes at once."""
    seed: int = 0
    """Seed of the draws of contexts."""

    def __post_init__(self) -> None:
        positive = ("top", "bands", "tokens_kept", "bins", "contexts_at_once", "tokens_at_once")
        others = ("each", "promoted", "near")
        whole_numbers(self, *positive, *others, "seed")
        numbers(self, "norm_factor")
        for name in positive:
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in others:
            require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        require(self.bands <= 100, "bands", self.bands, "must be at most 100")
        require(self.norm_factor >= 1, "norm_factor", self.norm_factor, "must be at least 1 (inf for no high norms)")
        require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "must fit into 64 bits")
