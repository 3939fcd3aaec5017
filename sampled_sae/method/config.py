"""Settings of one SAE: its size, its candidate pool, Adam, AuxK and the threshold.

A new pool schedule is a class here with `size`, `label` and `steady`, a member of `Schedule`, and a preset in
`presets.py`. A new pool size is a class with `latents` and `label`, a member of `PoolSize`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from sampled_sae.config import (
    Bound,
    Config,
    Count,
    NonNegative,
    NotEmpty,
    Positive,
    PositiveNumber,
    PositiveShare,
    Seed,
    Share,
    ShareBelowOne,
    require,
)

AtLeastOne = Annotated[float, Bound("must be a number of at least 1", lambda l: 1 <= l < 1e18)]


@dataclass(frozen=True, slots=True)
class Multiplier(Config):
    """A pool of floor(K * l) latents, as in the paper."""

    l: AtLeastOne
    """The pool multiplier; l >= d_sae/K is BatchTopK."""

    def latents(self, k: int, d_sae: int) -> int:
        # The tiny addend keeps 60 * 1.1 and the like from losing a latent to rounding.
        return min(d_sae, math.floor(k * self.l + 1e-9))

    @property
    def label(self) -> str:
        return f"l{self.l:g}"


@dataclass(frozen=True, slots=True)
class Size(Config):
    """A pool of a given number of latents."""

    size: int
    """Latents in the pool, at least K."""

    def latents(self, k: int, d_sae: int) -> int:
        require(self.size >= k, "pool.size.size", self.size, f"must be at least k = {k}")
        return min(d_sae, self.size)

    @property
    def label(self) -> str:
        return f"size{self.size}"


@dataclass(frozen=True, slots=True)
class Fraction(Config):
    """A pool that is a share of all latents."""

    fraction: PositiveShare
    """Share of the d_sae latents, in (0, 1]."""

    def latents(self, k: int, d_sae: int) -> int:
        return max(k, math.floor(d_sae * self.fraction + 1e-9))

    @property
    def label(self) -> str:
        return f"{100 * self.fraction:g}pct"


@dataclass(frozen=True, slots=True)
class Everything(Config):
    """No restriction: every latent is a candidate."""

    label: ClassVar[str] = ""

    def latents(self, k: int, d_sae: int) -> int:
        return d_sae


PoolSize = Multiplier | Size | Fraction | Everything


@dataclass(frozen=True, slots=True)
class Constant(Config):
    """The same size all the time, as in the paper."""

    steady: ClassVar[bool] = True
    """Whether the size stays the same over many steps, so that a GPU can record a step and repeat it."""
    label: ClassVar[str] = ""

    def size(self, start: int, d_sae: int, done: float) -> int:
        """Latents in a pool that begins with `start`, once a share `done` of the steps is over."""
        return start


@dataclass(frozen=True, slots=True)
class Released(Config):
    """The pool until a share of the steps is done, then all latents."""

    at: Share = 0.7
    """Share of the steps after which every latent is a candidate, in [0, 1]."""
    steady: ClassVar[bool] = True

    def size(self, start: int, d_sae: int, done: float) -> int:
        return start if done < self.at else d_sae

    @property
    def label(self) -> str:
        return f"released{100 * self.at:g}"


@dataclass(frozen=True, slots=True)
class Annealed(Config):
    """The pool grows linearly until it holds all latents."""

    until: PositiveShare = 1.0
    """Share of the steps after which every latent is a candidate, in (0, 1]."""
    steady: ClassVar[bool] = False

    def size(self, start: int, d_sae: int, done: float) -> int:
        return min(d_sae, start + math.floor((d_sae - start) * min(1.0, done / self.until)))

    @property
    def label(self) -> str:
        return f"annealed{100 * self.until:g}"


Schedule = Constant | Released | Annealed


@dataclass(frozen=True, slots=True)
class Scope(Config):
    """How many tokens share one pool and one cut of their largest activations."""

    tokens: Positive | None = None
    """Tokens per group; 1 is TopK. Default: the whole batch."""
    then: Positive | None = None
    """Tokens per group once `until` is over. Default: the whole batch."""
    until: Share = 1.0
    """Share of the steps for which `tokens` holds."""

    def group_at(self, batch_size: int, step: int, steps: int) -> int:
        """Number of tokens that share one pool and one cut at `step` (from 0) of `steps`; later as at the last one."""
        name = "tokens" if min(step, steps - 1) / steps < self.until else "then"
        group: int = min(getattr(self, name) or batch_size, batch_size)
        require(batch_size % group == 0, f"scope.{name}", group, f"must divide batch_size = {batch_size}")
        return group


@dataclass(frozen=True, slots=True)
class PoolConfig(Config):
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
    """How the size of the pool changes during training."""
    refresh: Positive = 1
    """Steps between two draws of the pool; the paper draws one for every batch."""
    memory: ShareBelowOne | None = None
    """Decay of a moving average of the score over batches, which then ranks the latents. Default: no memory."""
    inference_size: AtLeastOne | None = None
    """Latents that can fire at inference, as a multiple of the pool's size: those that were in the pool most often in
    the last tenth of the steps. Default: all latents."""

    def check(self) -> None:
        grouped = self.scope.tokens is not None or (self.scope.until < 1 and self.scope.then is not None)
        right = "a pool can only be kept over several steps when the whole batch shares it"
        require(self.refresh == 1 or not grouped or not self.restricts, "refresh", self.refresh, right)

    @property
    def restricts(self) -> bool:
        """Whether a size is set, rather than all latents from the start."""
        return not isinstance(self.size, Everything)


@dataclass(frozen=True, slots=True)
class Rates(Config):
    """Factors of the learning rate, one for each tensor."""

    W_enc: PositiveNumber = 0.67
    """Encoder."""
    b_enc: PositiveNumber = 10.0
    """Encoder bias."""
    W_dec: PositiveNumber = 2.0
    """Decoder; values from 2 to 3 work equally well."""
    b_dec: PositiveNumber = 0.1
    """Decoder bias."""


Clip = Annotated[float, Bound("must be positive (inf for no clipping)", lambda clip: clip > 0)]


@dataclass(frozen=True, slots=True)
class OptimizerConfig(Config):
    """Adam, its learning rate over time, and the scale of the gradient. docs/recipe.md has the measurements."""

    lr: PositiveNumber | None = None
    """Peak learning rate. Default: a rule of d_in, d_sae, K, batch size and steps (`method.rate`)."""
    gradient: Literal["normalize", "clip"] = "normalize"
    """normalize: scale the gradient of all n parameters to norm sqrt(n) at every step; clip: see `clip`."""
    clip: Clip | None = None
    """Largest norm of the gradient of all parameters, with gradient = clip."""
    cautious: bool = True
    """For matrices, skip elements whose momentum and current gradient differ in sign."""
    beta1: ShareBelowOne = 0.9
    """Adam's decay of the mean."""
    beta2: ShareBelowOne = 0.99
    """Adam's decay of the square."""
    eps: Annotated[float, Bound("must be positive", lambda eps: eps > 0)] = 1e-8
    """Adam's epsilon."""
    rates: Rates = field(default_factory=Rates)
    """Factors of the learning rate, one for each tensor."""
    warmup_steps: Count = 200
    """Linear warm-up from 0; in a short run never more than a fifth of the steps."""
    decay: Share = 0.8
    """Fraction of the steps, at the end, over which the learning rate decays linearly to 0."""

    def check(self) -> None:
        right = "gradient = 'clip' needs a norm, such as 1, and gradient = 'normalize' takes none"
        require((self.gradient == "clip") == (self.clip is not None), "clip", self.clip, right)


@dataclass(frozen=True, slots=True)
class InitConfig(Config):
    """Initial weights. b_enc starts at 0, b_dec at the geometric median of the first batch."""

    decoder: Literal["random", "covariance"] = "random"
    """Unit decoder rows. random: directions without regard to the data; covariance: drawn from N(0, C^(1/2)), with C
    the covariance of the first batch."""
    encoder_scale: PositiveNumber | None = None
    """W_enc = encoder_scale * W_dec. Default: 0.5 (60 / K)^0.3, at least 0.4 and at most 0.7."""


@dataclass(frozen=True, slots=True)
class AuxKConfig(Config):
    """The auxiliary loss that revives dead latents: they predict the reconstruction error of the live latents."""

    alpha: NonNegative = 1 / 32
    """Weight of the auxiliary loss; 0 turns it off."""
    dead_after: Positive = 10_000_000
    """Tokens without firing after which a latent counts as dead."""
    k: Positive | None = None
    """Dead latents used per token. Default: d_in / 2."""

    def latents(self, d_in: int) -> int:
        """Dead latents used per token."""
        return self.k or max(1, d_in // 2)


@dataclass(frozen=True, slots=True)
class ThresholdConfig(Config):
    """The moving average of the smallest kept activation (`threshold_ema`)."""

    start_step: Count = 1000
    """Averaging begins after this step; in a short run after half of the steps at the latest."""
    beta: ShareBelowOne = 0.999
    """Weight of the old average."""


@dataclass(frozen=True, slots=True)
class JumpReLUConfig(Config):
    """JumpReLU: a learned threshold for each latent, and a penalty that moves the mean L0 to K."""

    bandwidth: PositiveNumber = 1.0
    """Width of the window around a threshold in which activations give it a gradient, relative to the threshold."""
    penalty: NonNegative = 3.0
    """Weight of (L0/K - 1)^2 in the loss, relative to the variance of the batch."""
    warmup_steps: Count = 1000
    """Linear warm-up of the penalty from 0; in a short run never more than a fifth of the steps."""
    variant: Literal["relative", "dictionary_learning"] = "relative"
    """relative: independent of the scale of the inputs; the thresholds' logarithms are trained, and begin where the
    first batch has a mean L0 of K. dictionary_learning: the definitions of that library, see docs/method.md."""


def usable_as_folder(name: str) -> bool:
    """Whether an SAE can be saved under that name."""
    return name.isprintable() and 0 < len(name.encode()) <= 200 and name[0] != "." and not set(name) & set("/\\")


NAME = "must be usable as a folder's name: at most 200 bytes of printable text without slashes"


def check_prefixes(prefixes: tuple[int, ...] | None, d_sae: int) -> None:
    """Raise a one-line error unless the widths of nested prefixes, if there are any, ascend and end with d_sae."""
    if prefixes:
        rising = all(a < b for a, b in pairwise(prefixes)) and prefixes[-1:] == (d_sae,)
        require(rising, "prefixes", prefixes, f"must be ascending widths that end with d_sae = {d_sae}")


@dataclass(frozen=True, slots=True)
class SAEConfig(Config):
    """Everything that sets one SAE apart from the others on the same stream."""

    d_sae: Positive
    """Number of latents m."""
    k: Positive
    """Mean number of active latents per token, K."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """The candidate pool."""
    cut: Literal["batch", "token"] = "batch"
    """batch: the K*B largest values in the pool; token: the K largest of each token."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Adam and the learning rate."""
    init: InitConfig = field(default_factory=InitConfig)
    """Initial weights."""
    auxk: AuxKConfig = field(default_factory=AuxKConfig)
    """Revival of dead latents."""
    threshold: ThresholdConfig = field(default_factory=ThresholdConfig)
    """The threshold's moving average."""
    seed: Seed | None = None
    """Seed of the initial values and of random pools. Default: the run's seed."""
    name: Annotated[str, Bound(NAME, usable_as_folder)] | None = None
    """Name in logs and folders. Default: made from the settings."""
    prefixes: Annotated[tuple[Positive, ...], NotEmpty] | None = None
    """Matryoshka: widths of the nested prefixes of latents, ascending, the last one d_sae. The loss is the mean over
    the prefixes of the error that each leaves. None: all latents alone."""
    jumprelu: JumpReLUConfig | None = None
    """A learned threshold for each latent instead of the cut; it takes no pool. None: the cut."""

    def check(self) -> None:
        require(self.k <= self.d_sae, "k", self.k, f"must be at most d_sae = {self.d_sae}")
        self.pool.size.latents(self.k, self.d_sae)
        check_prefixes(self.prefixes, self.d_sae)
        unused = (self.pool, self.cut) == (PoolConfig(), "batch")
        require(
            self.jumprelu is None or unused, "jumprelu", self.jumprelu, "takes neither a pool nor a cut; leave them"
        )

    def pool_size_at(self, step: int, steps: int) -> int:
        """Number of candidate latents at `step` (from 0) of `steps`; later as at the last one."""
        return self._pool_size(min(step, steps - 1) / steps)

    def _pool_size(self, done: float) -> int:
        start = self.pool.size.latents(self.k, self.d_sae)
        return self.pool.schedule.size(start, self.d_sae, done)

    def open_at_inference(self) -> int:
        """Number of latents that can fire at inference."""
        share = self.pool.inference_size
        return self.d_sae if share is None else min(self.d_sae, math.floor(share * self._pool_size(1.0) + 1e-9))

    @property
    def note(self) -> str:
        """What about its pool has no effect, in words; empty if all has."""
        pool = self.pool
        if not pool.restricts:
            names = ("score", "pick", "schedule", "refresh", "memory", "inference_size")
            unused = [f"pool.{name}" for name in names if getattr(pool, name) != getattr(PoolConfig(), name)]
            return f"without pool.size, {' and '.join(unused)} cannot have an effect" if unused else ""
        full = pool.size.latents(self.k, self.d_sae) == self.d_sae and (pool.scope, self.cut) == (Scope(), "batch")
        return "its pool holds all latents, so it is BatchTopK" if full else ""
