"""Settings of the candidate pool: its size, whom it serves, how it changes during training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from sampled_sae.checks import numbers, require, whole_numbers

# ---- how large the candidate pool is -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Multiplier:
    """A pool of floor(K * l) latents, as in the paper."""

    l: float
    """The pool multiplier; l >= m/K is BatchTopK."""

    def __post_init__(self) -> None:
        numbers(self, "l")
        require(1 <= self.l < 1e18, "l", self.l, "must be a number of at least 1")

    def latents(self, k: int, m: int) -> int:
        # The tiny addend keeps 60 * 1.1 and the like from losing a latent to rounding.
        return min(m, math.floor(k * self.l + 1e-9))


@dataclass(frozen=True, slots=True)
class Size:
    """A pool of a given number of latents."""

    size: int
    """Latents in the pool, at least K."""

    def __post_init__(self) -> None:
        whole_numbers(self, "size")

    def latents(self, k: int, m: int) -> int:
        require(self.size >= k, "pool size", self.size, f"must be at least k = {k}")
        return min(m, self.size)


@dataclass(frozen=True, slots=True)
class Fraction:
    """A pool that is a share of all latents."""

    fraction: float
    """Share of the m latents, in (0, 1]."""

    def __post_init__(self) -> None:
        numbers(self, "fraction")
        require(0 < self.fraction <= 1, "pool fraction", self.fraction, "must be in (0, 1]")

    def latents(self, k: int, m: int) -> int:
        return max(k, math.floor(m * self.fraction + 1e-9))


@dataclass(frozen=True, slots=True)
class Everything:
    """No restriction: every latent is a candidate."""

    def latents(self, k: int, m: int) -> int:
        return m


PoolSize = Multiplier | Size | Fraction | Everything

# ---- how the pool changes during training ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Constant:
    """The same size all the time, as in the paper."""


@dataclass(frozen=True, slots=True)
class Released:
    """The pool until a share of the steps is done, then all latents."""

    at: float = 0.7
    """Share of the steps after which every latent is a candidate, in [0, 1]."""

    def __post_init__(self) -> None:
        numbers(self, "at")
        require(0 <= self.at <= 1, "released at", self.at, "must be a share of the steps in [0, 1]")


@dataclass(frozen=True, slots=True)
class Annealed:
    """The pool grows linearly until it holds all latents."""

    until: float = 1.0
    """Share of the steps after which every latent is a candidate, in (0, 1]."""

    def __post_init__(self) -> None:
        numbers(self, "until")
        require(0 < self.until <= 1, "annealed until", self.until, "must be a share of the steps in (0, 1]")


Schedule = Constant | Released | Annealed


@dataclass(frozen=True, slots=True)
class Scope:
    """How many tokens share one pool and one cut of their largest activations."""

    tokens: int | None = None
    """Tokens a group; none means the whole batch, 1 means TopK."""
    then: int | None = None
    """Tokens a group once `until` is over; none means the whole batch."""
    until: float = 1.0
    """Share of the steps for which `tokens` holds."""

    def __post_init__(self) -> None:
        whole_numbers(self, "tokens", "then")
        numbers(self, "until")
        for name, value in (("scope tokens", self.tokens), ("scope then", self.then)):
            require(value is None or value >= 1, name, value, "must be at least 1, or none for the whole batch")
        require(0 <= self.until <= 1, "scope until", self.until, "must be a share of the steps in [0, 1]")


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The candidate pool. TopK, BatchTopK and Sampled-SAE are points of this one family."""

    score: str = "l2"
    """Name of the score that ranks the latents (see `sampled_sae.scores`)."""
    size: PoolSize = field(default_factory=Everything)
    """How many latents are candidates."""
    pick: Literal["top", "sample"] = "top"
    """top: the highest scores; sample: at random in proportion to the score, without replacement."""
    scope: Scope = field(default_factory=Scope)
    """Which tokens share a pool."""
    schedule: Schedule = field(default_factory=Constant)
    """How the pool's size changes during training."""
    refresh: int = 1
    """Steps between two draws of the pool; the paper draws one every batch."""

    def __post_init__(self) -> None:
        require(isinstance(self.score, str), "score", self.score, "must be the name of a score")
        require(isinstance(self.size, PoolSize), "pool size", self.size, "must be a Multiplier, Size or Fraction")
        require(isinstance(self.scope, Scope), "scope", self.scope, "must be a Scope")
        require(
            isinstance(self.schedule, Schedule), "schedule", self.schedule, "must be Constant, Released or Annealed"
        )
        require(self.pick in ("top", "sample"), "pick", self.pick, "must be 'top' or 'sample'")
        whole_numbers(self, "refresh")
        require(self.refresh >= 1, "refresh", self.refresh, "must be at least 1 step")
        grouped = self.scope.tokens is not None or (self.scope.until < 1 and self.scope.then is not None)
        require(
            self.refresh == 1 or not grouped or isinstance(self.size, Everything),
            "refresh",
            self.refresh,
            "a pool can only be kept over several steps when the whole batch shares it",
        )
