"""TopK's cut over Z in bfloat16: the `keep` largest positive values of each row, exactly; ties to the lowest index.

The keep-th largest of a row's block maxima is a floor that at least `keep` values reach; the exact cut is looked
for by bisection among the blocks that reach it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sampled_sae.kernels.blocks import Blocks, list_blocks, positions
from sampled_sae.kernels.cut import BINS, Cut, empty_kept


@triton.jit
def _cut_rows(bits, maxima, chosen, lowest, start, stop, token, column, value_out, width, blocks, keep, nothing,
              DENSE: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    row = bits + t * width
    maxima += t * blocks
    chosen += t * blocks
    every = tl.arange(0, BLOCKS)
    top = tl.load(maxima + every, mask=every < blocks, other=-1).to(tl.int32)
    beyond = tl.maximum(tl.max(top), 1) + 1
    # The largest floor that `keep` blocks reach; 1, the smallest positive value, if there are not so many.
    floor = 1
    high = beyond
    while high - floor > 1:
        middle = (floor + high) // 2
        if tl.sum((top >= middle).to(tl.int32)) >= keep:
            floor = middle
        else:
            high = middle
    n = list_blocks(maxima, chosen, floor, blocks, BLOCKS)
    cut = floor
    while beyond - cut > 1:
        middle = (cut + beyond) // 2
        count = 0
        for first in range(0, n, TILE):
            at = positions(chosen, first, n, blocks, SIZE, TILE)
            value = tl.load(row + at, mask=at < width, other=-1).to(tl.int32)
            count += tl.sum((value >= middle).to(tl.int32))
        if count >= keep:
            cut = middle
        else:
            beyond = middle
    above = 0
    for first in range(0, n, TILE):
        at = positions(chosen, first, n, blocks, SIZE, TILE)
        value = tl.load(row + at, mask=at < width, other=-1).to(tl.int32)
        above += tl.sum((value > cut).to(tl.int32))
    room = keep - above
    if DENSE:  # blocks below the floor hold nothing that is kept
        for first in range(0, blocks, TILE):
            some = first + tl.arange(0, TILE)
            peak = tl.load(maxima + some, mask=some < blocks, other=0).to(tl.int32)
            at = some[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
            tl.store(row + at, tl.zeros([TILE, SIZE], tl.int16), mask=(at < width) & (peak < floor)[:, None])
    base = t * keep
    done, ties = 0, 0
    smallest = nothing
    for first in range(0, n, TILE):
        at = positions(chosen, first, n, blocks, SIZE, TILE)
        value = tl.load(row + at, mask=at < width, other=-1).to(tl.int32)
        is_tie = (value == cut).to(tl.int32)
        kept = (value > cut) | ((is_tie > 0) & (ties + tl.cumsum(is_tie, 0) <= room))
        if DENSE:
            tl.store(row + at, tl.where(kept, value, 0).to(tl.int16), mask=at < width)
        else:
            to = base + done + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(token + to, t.to(tl.int32), mask=kept)
            tl.store(column + to, at, mask=kept)
            tl.store(value_out + to, (value << 16).to(tl.float32, bitcast=True), mask=kept)
        smallest = tl.minimum(smallest, tl.min(tl.where(kept, value, nothing)))
        done += tl.sum(kept.to(tl.int32))
        ties += tl.sum(is_tie)
    tl.store(lowest + t, smallest)
    if not DENSE:
        tl.store(start + t, base.to(tl.int32))
        tl.store(stop + t, (base + done).to(tl.int32))


def cut_rows(blocks: Blocks, keep: int, dense: bool) -> Cut:
    """Keep the `keep` largest positive values of each row; if `dense`, in Z itself, with zeros elsewhere."""
    tokens, width = blocks.bits.shape
    device = blocks.bits.device
    kept = empty_kept(1 if dense else tokens, 1 if dense else tokens * keep, width, device)
    lowest = torch.empty(tokens, dtype=torch.int32, device=device)
    _cut_rows[(tokens,)](
        blocks.bits, blocks.maxima, blocks.chosen, lowest, *kept, width, blocks.number, keep, BINS,
        DENSE=dense, **(blocks.shape(2048) if dense else blocks.shape(512)), num_warps=4 if dense else 2,
    )  # fmt: skip
    return Cut(None if dense else kept, lowest)
