"""What the scores need to know of Z [tokens, latents], in one pass over it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK = 128, 512


class Statistics(NamedTuple):
    """Sums over the tokens of each latent's activations z >= 0, each [m] float32."""

    tokens: int
    total: Any = None
    """Sum of z."""
    energy: Any = None
    """Sum of z^2."""
    z_log_z: Any = None
    """Sum of z log z."""
    fired: Any = None
    """Number of tokens with z > 0."""


NAMES = ("total", "energy", "z_log_z", "fired")


@triton.jit
def _log2(value, HARDWARE: tl.constexpr):
    """The logarithm of positive values; the hardware's own instruction is right to 2^-22."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(value)


@triton.jit
def _column_sums(z, sums, tokens, width, parts, TOTAL: tl.constexpr, ENERGY: tl.constexpr, LOGS: tl.constexpr,
                 FIRED: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
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
                logs += value * _log2(tl.maximum(value, 1e-30), HARDWARE)
            if FIRED:
                fired += tl.where(value > 0, 1.0, 0.0)
        z += AT_ONCE * width
    at = sums + part * width + j
    if TOTAL:
        tl.store(at, total, mask=j < width)
        at += parts * width
    if ENERGY:
        tl.store(at, energy, mask=j < width)
        at += parts * width
    if LOGS:
        tl.store(at, logs * 0.6931471805599453, mask=j < width)
        at += parts * width
    if FIRED:
        tl.store(at, fired, mask=j < width)


def statistics(z: Tensor, needs: Collection[str] = NAMES) -> Statistics:
    """z [tokens, m], negative values count as 0 -> each latent's statistics; those that nobody needs are None."""
    tokens, width = z.shape
    parts = triton.cdiv(tokens, ROWS)
    wanted = [name for name in NAMES if name in needs]
    sums = torch.empty(len(wanted), parts, width, device=z.device)
    flags = dict(zip(("TOTAL", "ENERGY", "LOGS", "FIRED"), (name in needs for name in NAMES), strict=True))
    _column_sums[(triton.cdiv(width, BLOCK), parts)](
        z, sums, tokens, width, parts, **flags, HARDWARE=z.is_cuda, ROWS=ROWS, AT_ONCE=4, BLOCK=BLOCK, num_warps=4
    )
    return Statistics(tokens=tokens, **dict(zip(wanted, sums.sum(1), strict=True)))
