"""Encoding on a GPU: 16-bit copies of the batch and of the weights, activations in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sampled_sae.kernels.products import padded_copy
from sampled_sae.kernels.statistics import Statistics, statistics
from sampled_sae.scores import RIDGE, Score
from sampled_sae.step import Parameters


class FastEncoder:
    """x [B, d] and the weights; `W_enc` [m, stride] is the encoder's 16-bit copy.

    Activations below 0 are left as they are: whoever looks for the largest ones never sees them.
    """

    def __init__(self, x: Tensor, weights: Parameters, W_enc: Tensor):
        self.x16 = padded_copy(x - weights.b_dec, W_enc.dtype)
        self.weights, self.W_enc = weights, W_enc
        self.b_enc = weights.b_enc.to(W_enc.dtype)
        self.tokens = len(x)

    def encode(self, latents: Tensor | None) -> Tensor:
        if latents is None:
            return torch.addmm(self.b_enc, self.x16, self.W_enc.T)
        return encode_some(self.x16, self.W_enc, self.b_enc, padded(latents), len(latents))

    def scores(self, score: Score, group: int, generator: torch.Generator) -> Tensor:
        shape = (self.tokens // group, group, len(self.W_enc))
        if score.reads == "nothing":
            return score(self.weights.b_enc.new_empty(()).expand(shape), generator)
        if score.reads == "input":
            d = len(self.weights.b_dec)
            x = self.x16.float()[:, :d].view(-1, group, d)
            return score.from_input(x, self.weights.W_enc, self.weights.b_enc)
        if group == self.tokens and score.ours and score.name in FROM_STATISTICS:
            return FROM_STATISTICS[score.name](statistics(self.encode(None)))[None]
        # Whatever a user's score looks at, it gets: all activations at once, as the plain path has them.
        return score(self.encode(None).float().relu_().view(shape), generator)


def padded(latents: Tensor) -> Tensor:
    """latents [n] -> [n or a little more]: products are several times faster on a multiple of 16."""
    return torch.nn.functional.pad(latents, (0, -len(latents) % 16))


def encode_some(x: Tensor, W_enc: Tensor, b_enc: Tensor, latents: Tensor, n: int) -> Tensor:
    """x [B, stride] -> activations [B, padded n] of `padded` latents; those behind the n-th are -inf."""
    bias = b_enc[latents]
    bias[n:] = -torch.inf
    return torch.addmm(bias, x, W_enc[latents].T)


def _entropy(s: Statistics) -> Tensor:
    safe = s.total.clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(s.total > 0, (safe.log() - s.z_log_z / safe).clamp_min(0), 0)


def _low_entropy(s: Statistics) -> Tensor:
    spread = torch.tensor(float(s.tokens), device=s.total.device).log()
    return torch.where(s.total > 0, (spread - _entropy(s)).clamp_min(0), -torch.inf)


FROM_STATISTICS: dict[str, Callable[[Statistics], Tensor]] = {
    "l2": lambda s: s.energy.sqrt(),
    "squared_l2": lambda s: s.energy.double() + RIDGE,
    "l1": lambda s: s.total,
    "frequency": lambda s: s.fired / s.tokens,
    "participation": lambda s: torch.where(s.energy > 0, s.total.square() / s.energy, 0),
    "entropy": _entropy,
    "low_entropy": _low_entropy,
}
"""Scores that follow from each latent's statistics; tests prove them equal to those of `sampled_sae.scores`."""
