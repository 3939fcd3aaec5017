"""What the scores need to know of Z [tokens, latents], in one pass over it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Statistics(NamedTuple):
    """Sums over the tokens of each latent's activations z >= 0, each [m] float32."""

    total: Tensor
    """Sum of z."""
    energy: Tensor
    """Sum of z^2."""
    z_log_z: Tensor
    """Sum of z log z."""
    fired: Tensor
    """Number of tokens with z > 0."""
    tokens: int


@triton.jit
def _column_sums(z, sums, tokens, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * ROWS
    total = tl.zeros([BLOCK], tl.float32)
    energy = tl.zeros([BLOCK], tl.float32)
    logs = tl.zeros([BLOCK], tl.float32)
    fired = tl.zeros([BLOCK], tl.float32)
    z += first.to(tl.int64) * width
    for _ in range(first, tl.minimum(first + ROWS, tokens)):
        value = tl.maximum(tl.load(z + j, mask=j < width, other=0.0).to(tl.float32), 0.0)
        z += width
        total += value
        energy += value * value
        logs += value * tl.log(tl.maximum(value, 1e-30))
        fired += tl.where(value > 0, 1.0, 0.0)
    at = sums + tl.program_id(1) * 4 * width + j
    tl.store(at, total, mask=j < width)
    tl.store(at + width, energy, mask=j < width)
    tl.store(at + 2 * width, logs, mask=j < width)
    tl.store(at + 3 * width, fired, mask=j < width)


def statistics(z: Tensor, rows: int = 128, block: int = 1024) -> Statistics:
    """z [tokens, m], negative values count as 0 -> each latent's statistics."""
    tokens, width = z.shape
    parts = triton.cdiv(tokens, rows)
    sums = torch.empty(parts, 4, width, device=z.device)
    _column_sums[(triton.cdiv(width, block), parts)](z, sums, tokens, width, ROWS=rows, BLOCK=block)
    total, energy, z_log_z, fired = sums.sum(0)
    return Statistics(total, energy, z_log_z, fired, tokens)
