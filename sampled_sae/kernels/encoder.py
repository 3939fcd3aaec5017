"""Matrix products of 16-bit matrices, summed in 32 bits, and the padded 16-bit copies that they take."""

from __future__ import annotations

import torch
from torch import Tensor

from sampled_sae.kernels.pool import highest, statistics
from sampled_sae.method.latents import WHOLE, Shard
from sampled_sae.method.parameters import Parameters
from sampled_sae.method.pools import draw_members
from sampled_sae.method.scores import Score, token_sums


def padded_width(d: int) -> int:
    """The width of 16-bit copies: a multiple of 16, so that every row starts where wide loads can."""
    return -(-d // 16) * 16


def padded_copy(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """rows [n, d] -> [n, padded width] in `dtype`, zeros behind."""
    n, d = rows.shape
    copy = torch.zeros(n, padded_width(d), dtype=dtype, device=rows.device)
    copy[:, :d] = rows
    return copy


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] @ b [k, m] -> [n, m] in float32, whatever the type of a and b."""
    if a.is_cuda and a.dtype != torch.float32 and OUT_DTYPE:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


OUT_DTYPE = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 8)
"""Whether torch can leave a 16-bit product in 32 bits."""


class FastEncoder:
    """x [B, d] and the weights; `W_enc` [m, stride] is the encoder's 16-bit copy.

    Activations below 0 are left as they are: a search for the largest ones never reaches them.
    """

    def __init__(self, x: Tensor, weights: Parameters, W_enc: Tensor, shard: Shard = WHOLE):
        self.x16 = padded_copy(x - weights.b_dec, W_enc.dtype)
        self.weights, self.W_enc = weights, W_enc
        self.b_enc = weights.b_enc.to(W_enc.dtype)
        self.tokens, self.shard = len(x), shard

    def encode(self, latents: Tensor | None) -> Tensor:
        if latents is None:
            return torch.addmm(self.b_enc, self.x16, self.W_enc.T)
        return encode_some(self.x16, self.W_enc, self.b_enc, padded(latents, len(self.W_enc)))

    def scores(self, score: Score, group: int, generator: torch.Generator, state: Tensor) -> Tensor:
        if score.reads == "nothing":
            shape = (self.tokens // group, group, len(self.W_enc) * self.shard.number)
            return score(self.weights.b_enc.new_empty(()).expand(shape), generator, state)
        whole = group == self.tokens
        if whole and score.name == "preactivation_l2":
            return self.shard.gather(self._preactivation_l2()[None])
        if score.reads == "input":
            d = len(self.weights.b_dec)
            x = self.x16.float()[:, :d].view(-1, group, d)
            return self.shard.gather(score.from_input(x, self.weights.W_enc, self.weights.b_enc))
        if whole and score.reads == "sums":
            return score.from_sums(statistics(self.encode(None), score.sums).map(self.shard.gather))[None]
        # Any other score gets all activations at once, as on the plain path.
        Z = self.encode(None).float().relu_().view(self.tokens // group, group, -1)
        if self.shard.number > 1:
            return score.from_sums(token_sums(Z, score.sums).map(self.shard.gather))
        return score(Z, generator, state)

    def draw(self, q: Tensor, size: int, pick: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if pick == "top" and q.dtype == torch.float32:
            return highest(q[0], size)
        return draw_members(q, size, pick, generator)

    def _preactivation_l2(self) -> Tensor:
        """`scores.preactivation_l2` with products of 16-bit matrices."""
        gram = product(self.x16.T, self.x16).to(self.W_enc.dtype)
        along = ((self.W_enc @ gram) * self.W_enc).sum(1, dtype=torch.float32)
        mean = product(self.x16.sum(0, dtype=torch.float32).to(self.W_enc.dtype)[None], self.W_enc.T)[0]
        b_enc = self.weights.b_enc
        return (along + 2 * b_enc * mean + self.tokens * b_enc.square()).clamp_min(0).sqrt()


def padded(latents: Tensor, m: int) -> Tensor:
    """latents [n] -> [n or a little more], padded with m: products are several times faster on multiples of 16."""
    return torch.nn.functional.pad(latents, (0, -len(latents) % 16 if len(latents) else 16), value=m)


def rows_of(W: Tensor, latents: Tensor) -> Tensor:
    """The rows of W [m, stride] of the latents [n]; any row where a latent is m."""
    return W[latents.clamp_max(len(W) - 1)]


def encode_some(x: Tensor, W_enc: Tensor, b_enc: Tensor, latents: Tensor) -> Tensor:
    """x [B, stride] -> activations [B, n] of the latents [n]; -inf where a latent is m."""
    bias = torch.where(latents < len(b_enc), b_enc[latents.clamp_max(len(b_enc) - 1)], -torch.inf)
    return torch.addmm(bias, x, rows_of(W_enc, latents).T)
