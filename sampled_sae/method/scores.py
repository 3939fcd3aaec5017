"""Scores: activations Z of a batch -> one number a latent. The pool takes the latents with the largest.

A score is a function of `Z [..., tokens, m]` (post-ReLU, so never negative) that reduces the tokens'
axis, `dim=-2`, and returns `[..., m]`. Leading axes are independent groups of tokens. To add one:

    @register_score("variance")
    def variance(Z):
        return Z.var(dim=-2)

A score may take a second argument `generator` to draw random numbers from the run's own generator.
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sampled_sae.utils.errors import UserError

RIDGE = 0.01
"""The paper's lambda."""


class Score(NamedTuple):
    """A registered score: `function`, and what it looks at."""

    name: str
    function: Callable[..., Tensor]
    reads: Literal["activations", "input", "nothing"]
    """Only scores that read activations make the step encode latents outside of the pool."""
    takes_generator: bool
    ours: bool
    """Ours are tested; what others return is looked at."""

    def __call__(self, Z: Tensor, generator: torch.Generator) -> Tensor:
        """Z [..., tokens, m] -> q [..., m]."""
        with torch.no_grad():
            q = self.function(Z, generator=generator) if self.takes_generator else self.function(Z)
        return self._checked(q, Z)

    def from_input(self, x: Tensor, W_enc: Tensor, b_enc: Tensor) -> Tensor:
        """For scores that read the input: centred x [..., tokens, d], W_enc [m, d], b_enc [m] -> q [..., m]."""
        with torch.no_grad():
            q = self.function(x, W_enc, b_enc)
        return self._checked(q, x.new_empty(()).expand(*x.shape[:-1], len(b_enc)))

    def _checked(self, q: Tensor, Z: Tensor) -> Tensor:
        if self.ours:
            return q
        if not isinstance(q, Tensor):
            raise UserError(f"score {self.name!r} returned a {type(q).__name__}: it must return a tensor")
        q = q.to(torch.float32) if not q.is_floating_point() else q
        expected = (*Z.shape[:-2], Z.shape[-1])
        if q.shape != expected:
            raise UserError(
                f"score {self.name!r} returned shape {tuple(q.shape)} for Z {tuple(Z.shape)}: it must reduce "
                f"the tokens' axis, dim=-2, and return {expected}"
            )
        if torch.isnan(q).any():
            raise UserError(f"score {self.name!r} returned NaN: it must give one number for each latent")
        return q


SCORES: dict[str, Score] = {}


def register_score(
    name: str, *, needs_activations: bool = True
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Make a function available as a score by `name`, in configurations and on the command line.

    With `needs_activations=False` it is handed a Z of the right shape without content, and only the
    pool that it draws is encoded.
    """

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        takes_generator = "generator" in inspect.signature(function).parameters
        reads: Literal["activations", "nothing"] = "activations" if needs_activations else "nothing"
        return _keep(Score(name, function, reads, takes_generator, function.__module__ == __name__))

    return register


def register_input_score(name: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """The same for a function of the input and the encoder: (x [..., tokens, d], W_enc [m, d], b_enc [m]) -> [..., m].

    x is centred (b_dec is taken off). Only the pool is encoded.
    """

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return _keep(Score(name, function, "input", False, function.__module__ == __name__))

    return register


def _keep(score: Score) -> Callable[..., Tensor]:
    """Make it known; a user's score may be registered anew under its name, one of ours stays what it is."""
    known = SCORES.get(score.name)
    if known is not None and known.ours and known.function is not score.function:
        raise UserError(f"score = {score.name!r}: is the name of a built-in score; register yours under another name")
    SCORES[score.name] = score
    return score.function


def get_score(name: str) -> Score:
    """The score of that name."""
    if name not in SCORES:
        raise UserError(f"score = {name!r}: unknown; the scores are {', '.join(SCORES)}")
    return SCORES[name]


def load_scores(script: Path) -> None:
    """Run a user's Python file so that the scores in it become known by name."""
    if not script.is_file():
        raise UserError(f"scores from {str(script)!r}: no such Python file")
    try:
        runpy.run_path(str(script))
    except UserError as error:
        raise UserError(f"scores from {str(script)!r}: {error}") from None
    except Exception as error:
        raise UserError(f"scores from {str(script)!r}: {type(error).__name__}: {error}") from error


def over_tokens(function: Callable[[Tensor], Tensor], Z: Tensor) -> Tensor:
    """Z [..., tokens, m] -> the sum of function(Z) over the tokens [..., m]."""
    if Z.is_cuda:
        return function(Z).sum(dim=-2)
    # A few tokens at a time: what the function makes of them stays in a CPU's cache. Four times as fast.
    return torch.stack([function(part).sum(dim=-2) for part in Z.split(64, dim=-2)]).sum(dim=0)


@register_score("l2")
def l2(Z: Tensor) -> Tensor:
    """Column norm. Energy counts, so 100 on 5% of the tokens beats 10 on half of them."""
    return over_tokens(torch.square, Z).sqrt()


@register_score("squared_l2")
def squared_l2(Z: Tensor) -> Tensor:
    """Squared column norm plus the ridge: the order of `l2`, so the same top pool; another when sampled."""
    # In double precision, or the ridge would swallow the order of weak latents.
    return l2(Z).double().square() + RIDGE


@register_score("entropy")
def entropy(Z: Tensor) -> Tensor:
    """Entropy of a latent's activation over the tokens, by the paper's formula: most spread first."""
    total = Z.sum(dim=-2)
    safe = total.clamp_min(torch.finfo(Z.dtype).tiny)
    # -sum (z/S) log (z/S) = log S - sum (z log z) / S; a silent latent gets 0.
    value = safe.log() - over_tokens(_z_log_z, Z) / safe
    return torch.where(total > 0, value.clamp_min(0), 0)


def _z_log_z(Z: Tensor) -> Tensor:
    return Z.clamp_min(torch.finfo(Z.dtype).tiny).log_().mul_(Z)


@register_score("low_entropy")
def low_entropy(Z: Tensor) -> Tensor:
    """What the paper's prose asks for: most selective first; latents that did not fire come last of all."""
    spread = torch.tensor(float(Z.shape[-2]), dtype=Z.dtype, device=Z.device).log()
    return torch.where(Z.sum(dim=-2) > 0, (spread - entropy(Z)).clamp_min(0), -torch.inf)


@register_score("uniform", needs_activations=False)
def uniform(Z: Tensor, generator: torch.Generator) -> Tensor:
    """A fresh random number for each latent: the pool is a random subset."""
    return torch.rand((*Z.shape[:-2], Z.shape[-1]), generator=generator, device=Z.device)


@register_score("prefix", needs_activations=False)
def prefix(Z: Tensor) -> Tensor:
    """A constant: ties go to the lowest index, so the pool is always the first P latents (the paper's Uniform)."""
    return torch.ones((*Z.shape[:-2], Z.shape[-1]), device=Z.device)


@register_score("l1")
def l1(Z: Tensor) -> Tensor:
    """Sum of the activations: consistent firing counts as much as strength."""
    return Z.sum(dim=-2)


@register_score("frequency")
def frequency(Z: Tensor) -> Tensor:
    """Share of the tokens on which a latent is positive."""
    return over_tokens(lambda z: (z > 0).to(z.dtype), Z) / Z.shape[-2]


@register_score("participation")
def participation(Z: Tensor) -> Tensor:
    """Participation ratio (sum z)^2 / sum z^2: the effective number of tokens, whatever the strength."""
    energy = over_tokens(torch.square, Z)
    return torch.where(energy > 0, Z.sum(dim=-2).square() / energy, 0)


@register_input_score("preactivation_l2")
def preactivation_l2(x: Tensor, W_enc: Tensor, b_enc: Tensor) -> Tensor:
    """Norm over the tokens before the ReLU, from the batch's Gram matrix: m d^2 operations instead of B m d.

    Strong negative pre-activations count as much as positive ones, so this is not the order of `l2`.
    """
    gram = x.mT @ x
    along = (W_enc @ gram * W_enc).sum(dim=-1)
    mean = (x.sum(dim=-2, keepdim=True) @ W_enc.T).squeeze(-2)
    return (along + 2 * b_enc * mean + x.shape[-2] * b_enc.square()).clamp_min(0).sqrt()


@register_score("leverage")
def leverage(Z: Tensor) -> Tensor:
    """Ridge leverage z_j' (Z Z' + lambda I)^-1 z_j, lambda = .01 of the mean eigenvalue of Z Z'.

    Costs B^2 m operations and a Cholesky factor of B x B: for small batches, groups or GPUs.
    """
    tokens = Z.shape[-2]
    gram = Z @ Z.transpose(-1, -2)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = (RIDGE * diagonal.mean(dim=-1)).clamp_min(torch.finfo(Z.dtype).tiny ** 0.5)
    gram = gram + ridge[..., None, None] * torch.eye(tokens, dtype=Z.dtype, device=Z.device)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), Z, upper=False)
    return half.square().sum(dim=-2)
