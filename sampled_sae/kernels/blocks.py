"""The largest values of Z in bfloat16, found by looking at few of them twice.

A positive bfloat16 read as a 16-bit integer keeps its order, so these kernels know integers only: `bits`. One
pass over Z notes the maximum of every block of neighbours in a row. Whatever is looked for afterwards lies in
the blocks whose maximum reaches some floor, and those are a few percent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Blocks(NamedTuple):
    """Z cut into blocks."""

    bits: Tensor
    """[tokens, width] int16: Z."""
    maxima: Tensor
    """[tokens, count] int16: each block's largest value."""
    chosen: Tensor
    """[tokens, count] int32: room for a list of blocks."""
    size: int
    """Values in a block, a power of two."""
    number: int
    """Blocks in a row."""

    def shape(self, values: int, blocks: int | None = None) -> dict[str, int]:
        """What a kernel must know when it is compiled: it lists so many blocks (by default those of a whole row) and
        goes back to so many values at a time.
        """
        listed = triton.next_power_of_2(self.number if blocks is None else min(blocks, self.number))
        return {"SIZE": self.size, "BLOCKS": listed, "TILE": max(1, values // self.size)}


@triton.jit
def _maxima(bits, maxima, width, blocks, SIZE: tl.constexpr, ROWS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(bits + t * width + at, mask=at < width, other=-1)
    tl.store(maxima + t * blocks + block, tl.max(values, axis=1), mask=block < blocks)


@triton.jit
def list_blocks(maxima, chosen, floor, blocks, BLOCKS: tl.constexpr):
    """Write the numbers of the blocks that reach the floor to `chosen`, ascending; returns how many they are."""
    every = tl.arange(0, BLOCKS)
    top = tl.load(maxima + every, mask=every < blocks, other=-1).to(tl.int32)
    reach = (top >= floor).to(tl.int32)
    tl.debug_barrier()  # an earlier list may still be read
    tl.store(chosen + tl.cumsum(reach, 0) - 1, every, mask=reach > 0)
    tl.debug_barrier()
    return tl.sum(reach)


@triton.jit
def positions(chosen, first, n, blocks, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Where the values of the listed blocks first .. first + TILE lie in their row, ascending [TILE * SIZE]."""
    some = first + tl.arange(0, TILE)
    block = tl.load(chosen + some, mask=some < n, other=blocks)
    return tl.reshape(block[:, None] * SIZE + tl.arange(0, SIZE)[None, :], [TILE * SIZE])


def cut_into_blocks(z: Tensor, keep: int) -> Blocks:
    """z [tokens, width] bfloat16, contiguous -> its blocks, sized for about `keep` wanted values a row."""
    tokens, width = z.shape
    size = 8
    while size < 64 and width // size >= 16 * keep:
        size *= 2
    while width // size > 8192:
        size *= 2
    count = triton.cdiv(width, size)
    maxima = torch.empty(tokens, count, dtype=torch.int16, device=z.device)
    chosen = torch.empty(tokens, count, dtype=torch.int32, device=z.device)
    rows = max(1, min(triton.next_power_of_2(count), 2**14 // size))
    bits = z.view(torch.int16)
    _maxima[(tokens, triton.cdiv(count, rows))](bits, maxima, width, count, SIZE=size, ROWS=rows, num_warps=8)
    return Blocks(bits, maxima, chosen, size, count)
