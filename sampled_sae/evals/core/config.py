"""Settings of the core evaluation."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sampled_sae.checks import numbers, require, whole_numbers
from sampled_sae.errors import UserError

PutIn = Literal["saebench", "measured", "normal", "everywhere"]


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What is measured where, and how much at once.

    The first `skip_first` positions of each context and the tokens named in `left_out` are left out: no measure counts
    them, neither reconstruction nor firing nor the loss of what is predicted at them. All other positions are the
    measured ones. What the model gets to see at left-out positions is up to `put_in`:

    - saebench (the default): they keep the residual stream when the reconstruction is put in, while the ablations
      replace every position. This is what SAEBench does with special tokens left out;
    - measured: they keep the residual stream in the ablations too, so that like is compared with like;
    - normal: so do the high-norm tokens, for SAEs that were trained without them;
    - everywhere: every position is replaced, left out or not.

    With nothing left out, saebench, measured and everywhere are the same.
    """

    skip_first: int = 0
    """Positions at the start of each context that are left out."""
    left_out: tuple[int, ...] = ()
    """Ids of tokens that are left out; `special_tokens` gives those that SAEBench leaves out."""
    norm_factor: float = 10.0
    """Tokens whose norm is above so many times the median of the measured ones are high-norm tokens."""
    norm_limit: float | None = None
    """The same as a norm, such as the one that training left tokens out by; it counts instead of `norm_factor`."""
    put_in: PutIn = "saebench"
    """Positions at which the reconstruction and the ablations replace the residual stream."""
    loss: bool = True
    """Whether to measure cross-entropy and KL divergence, which take a pass through the whole model for each SAE."""
    trained_on_high_norm: bool = False
    """Whether training's own cut sees the high-norm tokens; they may take a large part of its budget."""
    cut_batch: int = 4096
    """Tokens that share one pool and one cut when training's own cut is measured."""
    legacy_batch: int = 16
    """Contexts whose mean the legacy explained variance subtracts; its value depends on it."""
    contexts_at_once: int = 4
    """Contexts in one pass through the model; results are the same whatever it is."""
    tokens_at_once: int = 2048
    """Tokens that an SAE encodes at once; results are the same whatever it is."""
    resamples: int = 1000
    """Resamples of the bootstrap; 0 for no intervals."""
    level: float = 0.95
    """Share of the resamples inside an interval."""
    seed: int = 0
    """Seed of the bootstrap, and of mixing and sampled pools in training's own cut."""

    def __post_init__(self) -> None:
        sizes = ("cut_batch", "legacy_batch", "contexts_at_once", "tokens_at_once")
        whole_numbers(self, "skip_first", "resamples", "seed", *sizes)
        numbers(self, "norm_factor", "level")
        for name in sizes:
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in ("skip_first", "resamples"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        for name in ("loss", "trained_on_high_norm"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "must be True or False")
        require(self.norm_factor >= 1, "norm_factor", self.norm_factor, "must be at least 1 (inf for no high norms)")
        limit = self.norm_limit
        require(limit is None or limit > 0, "norm_limit", limit, "must be positive, or none")
        require(self.put_in in get_args(PutIn), "put_in", self.put_in, f"must be one of {', '.join(get_args(PutIn))}")
        require(0 < self.level < 1, "level", self.level, "must be a share between 0 and 1")
        require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "must fit into 64 bits")
        try:
            object.__setattr__(self, "left_out", tuple(operator.index(token) for token in self.left_out))
        except TypeError:
            raise UserError(f"left_out = {self.left_out!r}: must be token ids, whole numbers") from None


def special_tokens(tokenizer: Any) -> tuple[int, ...]:
    """The ids of a tokenizer's BOS, EOS and PAD, those of them that it has: what SAEBench leaves out."""
    ids = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    return tuple(sorted({token for token in ids if token is not None}))
