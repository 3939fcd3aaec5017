"""What the scores need to know of Z [tokens, latents], in one pass over it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK = 64, 512


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
def _column_sums(z, sums, tokens, width, parts, TOTAL: tl.constexpr, ENERGY: tl.constexpr, LOGS: tl.constexpr,
                 FIRED: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    z += (part * ROWS).to(tl.int64) * width
    total = tl.zeros([BLOCK], tl.float32)
    energy = tl.zeros([BLOCK], tl.float32)
    logs = tl.zeros([BLOCK], tl.float32)
    fired = tl.zeros([BLOCK], tl.float32)
    left = tl.minimum(tokens - part * ROWS, ROWS)
    for first in range(0, left, AT_ONCE):
        for row in tl.static_range(AT_ONCE):  # several loads under way at once
            until = tl.where(first + row < left, width, 0)
            value = tl.maximum(tl.load(z + row * width + j, mask=j < until, other=0.0).to(tl.float32), 0.0)
            if TOTAL:
                total += value
            if ENERGY:
                energy += value * value
            if LOGS:
                logs += value * tl.log2(tl.maximum(value, 1e-30))
            if FIRED:
                fired += tl.where(value > 0, 1.0, 0.0)
        z += AT_ONCE * width
    at = sums + part * width + j
    tl.store(at, total, mask=j < width)
    tl.store(at + parts * width, energy, mask=j < width)
    tl.store(at + 2 * parts * width, logs * 0.6931471805599453, mask=j < width)
    tl.store(at + 3 * parts * width, fired, mask=j < width)


def statistics(z: Tensor, needs: Collection[str] = Statistics._fields) -> Statistics:
    """z [tokens, m], negative values count as 0 -> each latent's statistics; those that nobody needs are 0."""
    tokens, width = z.shape
    parts = triton.cdiv(tokens, ROWS)
    sums = torch.empty(4, parts, width, device=z.device)
    wanted = [name in needs for name in Statistics._fields[:4]]
    flags = dict(zip(("TOTAL", "ENERGY", "LOGS", "FIRED"), wanted, strict=True))
    _column_sums[(triton.cdiv(width, BLOCK), parts)](
        z, sums, tokens, width, parts, **flags, ROWS=ROWS, AT_ONCE=4, BLOCK=BLOCK, num_warps=4
    )
    total, energy, z_log_z, fired = sums.sum(1)
    return Statistics(total, energy, z_log_z, fired, tokens)
