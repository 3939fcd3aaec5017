"""Settings of the candidate pool: its size, whom it serves, how it changes during training."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from sampled_sae.config import KINDS, numbers, require, whole_numbers
from sampled_sae.utils.errors import UserError


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
    """Name of the score that ranks the latents (see `sampled_sae.method.scores`)."""
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


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Adam, its learning rate over time, and clipping."""

    lr: float = 3e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Adam's decay of the mean."""
    beta2: float = 0.999
    """Adam's decay of the square."""
    eps: float = 1e-8
    """Adam's guard against division by zero."""
    clip: float = 1.0
    """Largest norm of the whole gradient."""
    warmup_steps: int = 1000
    """Linear warm-up from 0; in a short run never more than a fifth of the steps."""
    decay: float = 0.2
    """Share of the steps at the end over which the rate falls linearly to 0."""

    def __post_init__(self) -> None:
        numbers(self, "lr", "beta1", "beta2", "eps", "clip", "decay")
        whole_numbers(self, "warmup_steps")
        require(self.lr > 0 and math.isfinite(self.lr), "lr", self.lr, "must be a positive number")
        require(0 <= self.beta1 < 1, "beta1", self.beta1, "must be in [0, 1)")
        require(0 <= self.beta2 < 1, "beta2", self.beta2, "must be in [0, 1)")
        require(self.eps > 0, "eps", self.eps, "must be positive")
        require(self.clip > 0, "clip", self.clip, "must be positive (inf for no clipping)")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "must not be negative")
        require(0 <= self.decay <= 1, "decay", self.decay, "must be a share of the steps in [0, 1]")


@dataclass(frozen=True, slots=True)
class AuxKConfig:
    """The auxiliary loss that brings dead latents back: they predict what the living ones missed."""

    alpha: float = 1 / 32
    """Weight of the auxiliary loss; 0 turns it off."""
    dead_after: int = 10_000_000
    """Tokens without firing after which a latent counts as dead."""
    k: int | None = None
    """Dead latents used for each token; none means half the input width."""

    def __post_init__(self) -> None:
        numbers(self, "alpha")
        whole_numbers(self, "dead_after", "k")
        require(self.alpha >= 0, "auxk alpha", self.alpha, "must not be negative")
        require(self.dead_after >= 1, "dead_after", self.dead_after, "must be at least 1 token")
        require(self.k is None or self.k >= 1, "auxk k", self.k, "must be at least 1")

    def latents(self, d_in: int) -> int:
        """Dead latents used for each token."""
        return self.k or max(1, d_in // 2)


@dataclass(frozen=True, slots=True)
class ThresholdConfig:
    """The moving average of the smallest kept activation, used for inference."""

    start_step: int = 1000
    """Averaging begins after this step; in a short run after half of the steps at the latest."""
    beta: float = 0.999
    """Weight of the old average."""

    def __post_init__(self) -> None:
        numbers(self, "beta")
        whole_numbers(self, "start_step")
        require(self.start_step >= 0, "threshold start_step", self.start_step, "must not be negative")
        require(0 <= self.beta < 1, "threshold beta", self.beta, "must be in [0, 1)")


def usable_as_folder(name: str) -> bool:
    """Whether an SAE can be saved under that name."""
    return isinstance(name, str) and 0 < len(name) <= 200 and name[0] != "." and not set(name) & set("/\\\0")


@dataclass(frozen=True, slots=True)
class SAEConfig:
    """Everything that sets one SAE apart from the others on the same stream."""

    d_sae: int
    """Number of latents m."""
    k: int
    """Mean number of active latents a token, K."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """The candidate pool."""
    cut: Literal["batch", "token"] = "batch"
    """batch: the K*B largest values in the pool; token: the K largest of each token."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Adam and the learning rate."""
    auxk: AuxKConfig = field(default_factory=AuxKConfig)
    """Revival of dead latents."""
    threshold: ThresholdConfig = field(default_factory=ThresholdConfig)
    """The threshold's moving average."""
    seed: int | None = None
    """Seed of the start values and of random pools; none means the run's seed."""
    name: str | None = None
    """Name in logs and folders; none makes one from the settings."""

    def __post_init__(self) -> None:
        whole_numbers(self, "d_sae", "k", "seed")
        for part, kind in _PARTS.items():
            if part != "scope":
                value = getattr(self, part)
                require(isinstance(value, kind), part, value, f"must be a {kind.__name__}")
        require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", self.seed, "must fit into 64 bits")
        require(self.d_sae >= 1, "d_sae", self.d_sae, "must be at least 1")
        require(self.k >= 1, "k", self.k, "must be at least 1")
        require(self.k <= self.d_sae, "k", self.k, f"must be at most d_sae = {self.d_sae}")
        require(self.cut in ("batch", "token"), "cut", self.cut, "must be 'batch' or 'token'")
        require(
            self.name is None or usable_as_folder(self.name),
            "name",
            self.name,
            "must be usable as a folder's name, of 200 letters at most",
        )
        self.pool.size.latents(self.k, self.d_sae)


KINDS |= {cls.__name__.lower(): cls for cls in (Multiplier, Size, Fraction, Everything, Constant, Released, Annealed)}
_PARTS = {
    "pool": PoolConfig,
    "scope": Scope,
    "optimizer": OptimizerConfig,
    "auxk": AuxKConfig,
    "threshold": ThresholdConfig,
}


def sae_config_from_dict(plain: dict[str, Any]) -> SAEConfig:
    """The inverse of `to_dict` for an `SAEConfig`."""
    config: SAEConfig = _build(SAEConfig, upgraded(plain))
    return config


def upgraded(plain: Any) -> Any:
    """An `SAEConfig` as plain JSON, with the field names of today: `d_sae` was called `latents` before."""
    if isinstance(plain, dict) and "latents" in plain and "d_sae" not in plain:
        return {"d_sae" if name == "latents" else name: value for name, value in plain.items()}
    return plain


def _build(cls: Any, plain: dict[str, Any]) -> Any:
    require(isinstance(plain, dict), cls.__name__, plain, "must be an object with named fields")
    known = {item.name for item in dataclasses.fields(cls)}
    values = {}
    for name, value in plain.items():
        require(
            name in known,
            f"{cls.__name__} field",
            name,
            f"unknown; the fields are {', '.join(sorted(known))}",
        )
        if isinstance(value, dict):
            if "kind" in value:
                require(
                    value["kind"] in KINDS,
                    f"{name} kind",
                    value["kind"],
                    f"must be one of {', '.join(KINDS)}",
                )
                value = _build(KINDS[value["kind"]], {k: v for k, v in value.items() if k != "kind"})
            elif name in _PARTS:
                value = _build(_PARTS[name], value)
        values[name] = math.inf if value == "inf" and name != "name" else value
    needed = {item.name for item in dataclasses.fields(cls) if item.default is item.default_factory is MISSING}
    for name in sorted(needed - values.keys()):
        raise UserError(f"{cls.__name__} field = {name!r}: is missing")
    return cls(**values)
