"""Codes as a matrix of which most values are 0: the cut that sets them to 0, and what follows from it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sampled_sae.kernels.select import cut_into_blocks, cut_rows

WHOLE_ROWS = 2**14
"""Latents of which a program holds a token's row in its registers."""
PER_WARP = 2**10
"""Values of such a row for each warp."""


HALVES = tl.constexpr(0x10001)
"""The lowest bit of each half of a pair ..."""
TOPS = tl.constexpr(0x80008000 - 2**32)
"""... and the highest."""


@triton.jit
def _cut_whole_rows(pairs, width, keep, BLOCK: tl.constexpr):
    """Keep the `keep` largest positive values of a row and set the others to 0; ties go to the lowest position.

    Two neighbors, 15 bits each once those below 0 are gone, are compared in one subtraction: with its highest bit set
    before, a half keeps that bit if it reaches what is subtracted, and takes none from the other half.
    """
    row = pairs + tl.program_id(0).to(tl.int64) * width
    c = tl.arange(0, BLOCK)
    two = tl.load(row + c, mask=c < width, other=0)
    two = two & ~(((two >> 15) & HALVES) * 0xFFFF)
    marked = two | TOPS
    # The cut is at `low` or above and below `high`, which `above` values reach.
    low, above = 1, 0
    high = tl.maximum(tl.max(tl.maximum(two >> 16, two & 0xFFFF)), 1) + 1
    test = tl.maximum(high - 256, 2)  # a factor of 4 below the largest
    while high - low > 1:
        both = tl.sum(((marked - test * HALVES) >> 15) & HALVES)
        reach = (both & 0xFFFF) + (both >> 16)
        above = tl.where(reach >= keep, above, reach)
        high = tl.where(reach >= keep, high, test)
        low = tl.where(reach >= keep, test, low)
        test = (low + high) // 2
    room = keep - above
    larger = ((marked - (low + 1) * HALVES) >> 15) & HALVES
    tie = (((marked - low * HALVES) >> 15) & HALVES) - larger
    first = tie & 1
    ties = first + (tie >> 16)
    until = tl.cumsum(ties, 0)
    kept = larger | (tie & ((until - ties + first <= room).to(tl.int32) + ((until <= room).to(tl.int32) << 16)))
    tl.store(row + c, marked & (kept * 0x7FFF), mask=c < width)


def keep_largest_of_rows_(z: Tensor, keep: int) -> None:
    """Keep the `keep` largest positive values of each row of z [tokens, n] bfloat16, in place; the others become 0."""
    tokens, width = z.shape
    if width > WHOLE_ROWS or width % 2:
        cut_rows(cut_into_blocks(z, keep), keep, dense=True)
        return
    block = max(16, triton.next_power_of_2(width // 2))
    warps = max(1, min(16, 2 * block // PER_WARP))
    _cut_whole_rows[(tokens,)](z.view(torch.int32), width // 2, keep, BLOCK=block, num_warps=warps)


MASK_ROWS, MASK_AT_ONCE, MASK_BLOCK = 32, 4, 256


@triton.jit
def _mask_columns(f, g, sums, tokens, width, GRADIENT: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Set g to 0 where f is, and sum its columns; without a gradient, count where f is not 0."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    begin = (part * ROWS).to(tl.int64) * width
    f += begin
    if GRADIENT:
        g += begin
    total = tl.zeros([BLOCK], tl.float32)
    left = tl.minimum(tokens - part * ROWS, ROWS)
    for first in range(0, left, AT_ONCE):
        for row in tl.static_range(AT_ONCE):
            mask = j < tl.where(first + row < left, width, 0)
            value = tl.load(f + row * width + j, mask=mask, other=0.0)
            if GRADIENT:
                slope = tl.load(g + row * width + j, mask=mask, other=0.0)
                slope = tl.where(value > 0, slope, 0.0)
                tl.store(g + row * width + j, slope, mask=mask)
                total += slope.to(tl.float32)
            else:
                total += tl.where(value > 0, 1.0, 0.0)
        f += AT_ONCE * width
        if GRADIENT:
            g += AT_ONCE * width
    tl.store(sums + part * width + j, total, mask=j < width)


def _sums(f: Tensor, g: Tensor | None) -> Tensor:
    """Sums of the columns over parts of the tokens [parts, n]."""
    tokens, width = f.shape
    parts = triton.cdiv(tokens, MASK_ROWS)
    sums = torch.empty(parts, width, device=f.device)
    _mask_columns[(triton.cdiv(width, MASK_BLOCK), parts)](
        f, f if g is None else g, sums, tokens, width, GRADIENT=g is not None,
        ROWS=MASK_ROWS, AT_ONCE=MASK_AT_ONCE, BLOCK=MASK_BLOCK, num_warps=1,
    )  # fmt: skip
    return sums


def mask_(g: Tensor, f: Tensor) -> Tensor:
    """Set g [tokens, n] to 0 where f [tokens, n] is not positive, in place; returns parts [*, n] of its column
    sums in float32."""
    return _sums(f, g)


def counts(f: Tensor) -> Tensor:
    """f [tokens, n] -> number of positive values in each column [n] float32."""
    return _sums(f, None).sum(0)
