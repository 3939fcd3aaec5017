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


@triton.jit
def _as_float(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _reach(value, a, b):
    """How many of up to 2^15 values [up to 64, n] reach a and b, in bits: two counts in one sum, because each sum waits
    for all threads. A GPU compares floats at twice the speed of integers, and adds them beside.
    """
    from_a = tl.sum(tl.where(value >= _as_float(a), 1.0, 0.0), axis=0)
    from_b = tl.sum(tl.where(value >= _as_float(b), 1.0, 0.0), axis=0)
    # From 2^23 on, a float's last bits are its value as an integer.
    counts = tl.sum((from_a + (from_b * 65536.0 + 8388608.0)).to(tl.int32, bitcast=True) - 0x4B000000)
    return counts & 0xFFFF, counts >> 16


@triton.jit
def _cut_whole_rows(bits, width, keep, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Keep the `keep` largest positive values of a row and set the others to 0; ties go to the lowest position."""
    row = bits + tl.program_id(0).to(tl.int64) * width
    part, c = tl.arange(0, PARTS)[:, None], tl.arange(0, BLOCK)
    at = part * BLOCK + c[None, :]
    read = tl.load(row + at, mask=at < width, other=-1).to(tl.int32)
    value = _as_float(read)
    # The cut is at `low` or above and below `high`, which `above` values reach: thirds that do not hold it drop out.
    high = tl.maximum(tl.max(tl.max(read, axis=0)), 1) + 1
    low, above = tl.minimum(high, 1), 0
    a, b = tl.maximum(high - 512, 2), tl.maximum(high - 192, 2)  # factors of 16 and 2.8 below the largest
    while high - low > 1:
        from_a, from_b = _reach(value, a, b)
        above = tl.where(from_b >= keep, above, tl.where(from_a >= keep, from_b, from_a))
        high = tl.where(from_b >= keep, high, tl.where(from_a >= keep, b, a))
        low = tl.where(from_b >= keep, b, tl.where(from_a >= keep, a, low))
        third = (high - low + 1) // 3
        a = tl.where(low > 1, low + third, 2)  # there may be fewer positive values than wanted
        b = tl.maximum(high - third, a)
    # Ties are counted by part; in the part where the last of them is kept, one by one. That part is read again before
    # any thread writes to it, because the sum along it waits for all of them.
    cut, beyond = _as_float(low), _as_float(low + 1)
    ties = tl.sum((value == cut).to(tl.int32), axis=1)
    until = tl.cumsum(ties, 0)
    room = keep - above
    mixed = tl.sum((until < room).to(tl.int32))
    room -= tl.sum(tl.where(until < room, ties, 0))
    again = tl.load(row + mixed * BLOCK + c, mask=mixed * BLOCK + c < width, other=-1).to(tl.int32)
    floor = tl.where(tl.cumsum((again == low).to(tl.int32), 0) <= room, cut, beyond)
    floor = tl.where(part == mixed, floor[None, :], tl.where(part < mixed, cut, beyond))
    kept = tl.where(value >= floor, value.to(tl.int32, bitcast=True) >> 16, 0)
    tl.store(row + at, kept.to(tl.int16), mask=at < width)


def keep_largest_of_rows_(z: Tensor, keep: int) -> None:
    """Keep the `keep` largest positive values of each row of z [tokens, n] bfloat16, in place; the others become 0."""
    tokens, width = z.shape
    if width > WHOLE_ROWS:
        cut_rows(cut_into_blocks(z, keep), keep, dense=True)
        return
    size = max(16, triton.next_power_of_2(width))
    warps = max(1, min(16, size // PER_WARP))
    block = min(size, 256 * warps)  # eight values of each thread
    _cut_whole_rows[(tokens,)](z.view(torch.int16), width, keep, PARTS=size // block, BLOCK=block, num_warps=warps)


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
    tokens, width = f.shape
    parts = triton.cdiv(tokens, MASK_ROWS)
    sums = torch.empty(parts, width, device=f.device)
    _mask_columns[(triton.cdiv(width, MASK_BLOCK), parts)](
        f, f if g is None else g, sums, tokens, width, GRADIENT=g is not None,
        ROWS=MASK_ROWS, AT_ONCE=MASK_AT_ONCE, BLOCK=MASK_BLOCK, num_warps=1,
    )  # fmt: skip
    return sums


def mask_(g: Tensor, f: Tensor) -> Tensor:
    """Set g [tokens, n] to 0 where f [tokens, n] is not positive, in place.

    Returns parts of its column sums [parts, n] float32.
    """
    return _sums(f, g)


def counts(f: Tensor) -> Tensor:
    """f [tokens, n] -> number of positive values in each column [n] float32."""
    return _sums(f, None).sum(0)
