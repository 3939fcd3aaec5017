"""Scores: the activations Z of a batch -> one number per latent. The pool takes the latents with the largest.

A score reduces the token axis, `dim=-2`, of `Z [..., tokens, d_sae]` (post-ReLU, so never negative) and returns
`[..., d_sae]`. Leading axes are independent groups of tokens. A new score is a file in this folder:

    @register_score("variance")
    def variance(Z):
        return Z.var(dim=-2)

    @register_score("l2", sums=("energy",))          # from per-latent sums over the tokens: fast on a GPU, too
    def l2(sums):
        return sums.energy.sqrt()

A score of `Z` may take an argument `generator`, the run's own generator to draw random numbers from, and an argument
`state`, a tensor [d_sae] of zeros at the start, which it may change in place and which checkpoints contain. Scores are
also found in users' files (`--load-scores`) and in other packages, through the entry point `sampled_sae.scores`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.registry import Registry

Function = Callable[..., Tensor]


class Sums(NamedTuple):
    """Sums over the tokens of each latent's activations z >= 0, each [..., d_sae]; those not asked for are none."""

    tokens: int
    total: Any = None
    """Sum of z."""
    energy: Any = None
    """Sum of z^2."""
    z_log_z: Any = None
    """Sum of z log z."""
    fired: Any = None
    """Number of tokens with z > 0."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Sums:
        """The function of each of the sums."""
        return Sums(self.tokens, *(None if value is None else function(value) for value in self[1:]))


def token_sums(Z: Tensor, names: tuple[str, ...]) -> Sums:
    """Z [..., tokens, d_sae] -> the named sums over the tokens."""
    return Sums(Z.shape[-2], **{name: Z.sum(dim=-2) if name == "total" else _sum(SUMMED[name], Z) for name in names})


def _sum(function: Function, Z: Tensor) -> Tensor:
    if Z.is_cuda:
        return function(Z).sum(dim=-2)
    # A few tokens at a time: intermediate results stay in the CPU's cache. Four times as fast.
    return torch.stack([function(part).sum(dim=-2) for part in Z.split(64, dim=-2)]).sum(dim=0)


SUMMED: dict[str, Function] = {
    "energy": torch.square,
    "z_log_z": lambda Z: Z.clamp_min(torch.finfo(Z.dtype).tiny).log_().mul_(Z),
    "fired": lambda Z: (Z > 0).to(Z.dtype),
}


class Score(NamedTuple):
    """A registered score: its function, and what it reads."""

    name: str
    function: Function
    reads: Literal["activations", "sums", "input", "nothing"]
    """What the function takes: Z, sums over its tokens, the input and the encoder, or nothing but the shape of Z."""
    sums: tuple[str, ...] = ()
    """The sums that it reads."""
    takes: frozenset[str] = frozenset()
    """Which of `generator` and `state` a function of Z or of nothing takes, too."""
    learn: Callable[[Tensor, Tensor, Tensor], None] | None = None
    """Changes the state after each step: (state [d_sae], gain [d_sae], pool [d_sae] bool)."""
    builtin: bool = False
    """Built-in scores are trusted; the output of a custom score is validated."""

    @property
    def reads_activations(self) -> bool:
        """Whether the step has to encode latents outside of the pool, too."""
        return self.reads in ("activations", "sums")

    def __call__(self, Z: Tensor, generator: torch.Generator, state: Tensor | None = None) -> Tensor:
        """Z [..., tokens, d_sae] and the score's own state [d_sae] (None: that of the start) -> q [..., d_sae]."""
        with torch.no_grad():
            if self.reads == "sums":
                return self.from_sums(token_sums(Z, self.sums))
            more = {"generator": generator, "state": Z.new_zeros(Z.shape[-1]) if state is None else state}
            q = self.function(Z, **{name: more[name] for name in self.takes})
        return self._checked(q, Z.shape)

    def from_sums(self, sums: Sums) -> Tensor:
        """For scores that read sums: each [..., d_sae] -> q [..., d_sae]."""
        *groups, d_sae = getattr(sums, self.sums[0]).shape
        return self._checked(self.function(sums), (*groups, sums.tokens, d_sae))

    def from_input(self, x: Tensor, W_enc: Tensor, b_enc: Tensor) -> Tensor:
        """For scores that read the input: x - b_dec [..., tokens, d_in], W_enc [d_sae, d_in], b_enc [d_sae]."""
        with torch.no_grad():
            q = self.function(x, W_enc, b_enc)
        return self._checked(q, (*x.shape[:-1], len(b_enc)))

    def _checked(self, q: Tensor, shape: tuple[int, ...]) -> Tensor:
        """q, validated against the shape of Z."""
        if self.builtin:
            return q
        if not isinstance(q, Tensor):
            raise UserError(f"score {self.name!r} returned a {type(q).__name__}: it must return a tensor")
        q = q.to(torch.float32) if not q.is_floating_point() else q
        expected = (*shape[:-2], shape[-1])
        if q.shape != expected:
            raise UserError(
                f"score {self.name!r} returned shape {tuple(q.shape)} for Z {tuple(shape)}: it must reduce "
                f"the token axis, dim=-2, and return {expected}"
            )
        if torch.isnan(q).any():
            raise UserError(f"score {self.name!r} returned NaN: it must return one number per latent")
        return q


HINT = "; --load-scores FILE.py adds those of a file, in Python register_score"
SCORES: Registry[Score] = Registry("score", __name__, "sampled_sae.scores", hint=HINT)
get_score, load_scores = SCORES.find, SCORES.load_file


def register_score(
    name: str,
    *,
    sums: tuple[str, ...] = (),
    needs_activations: bool = True,
    learn: Callable[[Tensor, Tensor, Tensor], None] | None = None,
) -> Callable[[Function], Function]:
    """Make a function available as a score by `name`, in configurations and on the command line.

    The function takes Z. With `sums`, names of fields of `Sums`, it takes these instead. With
    `needs_activations=False` it takes a Z of the right shape without content, and only the pool is encoded. `learn`
    changes the score's state after each step (see `Score.learn`, and `gate`); such SAEs take the plain step path.
    """
    for unknown in set(sums) - set(Sums._fields[1:]):
        raise UserError(f"score {name!r}, sums = {unknown!r}: must be among {', '.join(Sums._fields[1:])}")
    reads: Literal["activations", "sums", "nothing"] = "sums" if sums else "activations"
    return _registered(name, reads if needs_activations else "nothing", tuple(sums), learn)


def register_input_score(name: str) -> Callable[[Function], Function]:
    """The same for a function (x - b_dec [..., tokens, d_in], W_enc [d_sae, d_in], b_enc [d_sae]) -> [..., d_sae].

    Only the pool is encoded.
    """
    return _registered(name, "input")


def _registered(
    name: str,
    reads: Literal["activations", "sums", "input", "nothing"],
    sums: tuple[str, ...] = (),
    learn: Callable[[Tensor, Tensor, Tensor], None] | None = None,
) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        takes = frozenset({"generator", "state"} & set(inspect.signature(function).parameters))
        builtin = function.__module__.startswith(f"{__name__}.")
        SCORES.register(name, Score(name, function, reads, sums, takes, learn, builtin), function.__module__)
        return function

    return register
