"""The largest values of Z in bfloat16, found by looking at few of them twice.

A positive bfloat16 read as a 16-bit integer keeps its order, so these kernels know integers only: `bits`. One
pass over Z notes the maximum of every block of neighbors in a row. All values of interest afterwards lie in
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
    """Blocks per row."""

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
    """z [tokens, width] bfloat16, contiguous -> its blocks, sized for about `keep` kept values per row."""
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


BINS = 2**15
BINS_END = tl.constexpr(BINS - 1)
PART = 2**14
"""Values of a part."""
MARGINS = (12, 128)
"""How far below the last cut the first two floors lie, in steps of bfloat16 (128 are a factor of 2)."""


class Kept(NamedTuple):
    """The kept values in order of token and latent. Slots that nothing fills hold `column` = width."""

    start: Tensor
    """[tokens] int32: where a token's entries begin ..."""
    stop: Tensor
    """[tokens] int32: ... and end."""
    token: Tensor
    """[n] int32."""
    column: Tensor
    """[n] int32: column of Z."""
    value: Tensor
    """[n] float32."""


def empty_kept(tokens: int, n: int, width: int, device: torch.device) -> Kept:
    """Room for n entries, none of them filled."""
    ends = torch.empty(2, tokens, dtype=torch.int32, device=device)
    places = torch.empty(2, n, dtype=torch.int32, device=device)
    places[0].zero_()
    places[1].fill_(width)
    return Kept(ends[0], ends[1], places[0], places[1], torch.zeros(n, device=device))


@triton.jit
def _part(parts, blocks, BLOCKS: tl.constexpr):
    """Which token and which blocks this program has: token, first block, number of blocks."""
    t = (tl.program_id(0) // parts).to(tl.int64)
    first = (tl.program_id(0) % parts) * BLOCKS
    return t, first, tl.minimum(blocks - first, BLOCKS)


@triton.jit
def _count_values(bits, maxima, chosen, cuts, bins, width, blocks, parts, group, keep, margin, above_margin,
                  COPIES: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
                  BINS: tl.constexpr):  # fmt: skip
    """Count the values between two floors, unless those above are enough already."""
    t, begin, own_blocks = _part(parts, blocks, BLOCKS)
    at_blocks = t * blocks + begin
    cut = cuts + (t // group) * 5
    last = tl.load(cut + 3)  # the floors hang on the last step's cut
    if (above_margin < 0) | (tl.load(cut + 2) < keep):
        floor = tl.maximum(last - margin, 1)
        ceiling = BINS + 0 * last
        if above_margin >= 0:
            ceiling = tl.maximum(last - above_margin, 1)
        own = bins + ((t // group) * COPIES + t % COPIES) * BINS
        n = list_blocks(maxima + at_blocks, chosen + at_blocks, floor, own_blocks, BLOCKS)
        for first in range(0, n, TILE):
            at = begin * SIZE + positions(chosen + at_blocks, first, n, blocks, SIZE, TILE)
            value = tl.load(bits + t * width + at, mask=at < width, other=-1).to(tl.int32)
            within = (value >= floor) & (value < ceiling)
            tl.atomic_add(own + value, 1, mask=within, sem="relaxed")


@triton.jit
def _find_cut(bins, cuts, keep, FIRST: tl.constexpr, COPIES: tl.constexpr, BINS: tl.constexpr):
    """cuts[group] = cut, room for values equal to it, number of counted values, last cut (as it was), lowest kept."""
    g = tl.program_id(0).to(tl.int64)
    cuts += g * 5
    counted = 0
    if not FIRST:
        counted = tl.load(cuts + 2)
    if counted < keep:
        value = tl.arange(0, BINS)
        n = tl.zeros([BINS], tl.int32)
        for copy in range(COPIES):
            n += tl.load(bins + (g * COPIES + copy) * BINS + value)
        total = tl.sum(n)
        reach = total - (tl.cumsum(n, 0) - n)
        cut = tl.max(tl.where(reach >= keep, value, 0))
        tl.store(cuts, cut)
        tl.store(cuts + 1, keep - tl.sum(tl.where(value > cut, n, 0)))
        tl.store(cuts + 2, total)
        tl.store(cuts + 4, tl.min(tl.where((n > 0) & (value >= tl.maximum(cut, 1)), value, BINS)))


@triton.jit
def _count_kept(bits, maxima, chosen, cuts, counts, width, blocks, parts, group,
                SIZE: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """counts[0, p], counts[1, p] = values of part p above the cut, and equal to it."""
    t, begin, own_blocks = _part(parts, blocks, BLOCKS)
    at_blocks = t * blocks + begin
    cut = tl.load(cuts + (t // group) * 5)
    n = list_blocks(maxima + at_blocks, chosen + at_blocks, tl.maximum(cut, 1), own_blocks, BLOCKS)
    above, ties = 0, 0
    for first in range(0, n, TILE):
        at = begin * SIZE + positions(chosen + at_blocks, first, n, blocks, SIZE, TILE)
        value = tl.load(bits + t * width + at, mask=at < width, other=-1).to(tl.int32)
        above += tl.sum((value > cut).to(tl.int32))
        ties += tl.sum(((value == cut) & (value > 0)).to(tl.int32))
    tl.store(counts + tl.program_id(0), above)
    tl.store(counts + tl.num_programs(0) + tl.program_id(0), ties)


@triton.jit
def _write_kept(bits, maxima, chosen, cuts, counts, sums, start, stop, token, column, value_out,
                width, blocks, parts, group, keep,
                DENSE: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Write each part's kept values to their place in the list, or (DENSE) set all others of Z to 0."""
    p, all_parts = tl.program_id(0), tl.num_programs(0)
    t, begin, own_blocks = _part(parts, blocks, BLOCKS)
    at_blocks = t * blocks + begin
    cut = tl.load(cuts + (t // group) * 5)
    room = tl.load(cuts + (t // group) * 5 + 1)
    above_after, ties_after = tl.load(sums + p), tl.load(sums + all_parts + p)
    above = above_after - tl.load(counts + p)  # of the group's parts before this one
    ties = ties_after - tl.load(counts + all_parts + p)
    base = (t // group) * keep
    if not DENSE:
        if begin == 0:
            tl.store(start + t, (base + above + tl.minimum(ties, room)).to(tl.int32))
        if begin + BLOCKS >= blocks:
            tl.store(stop + t, (base + above_after + tl.minimum(ties_after, room)).to(tl.int32))
    n = list_blocks(maxima + at_blocks, chosen + at_blocks, tl.maximum(cut, 1), own_blocks, BLOCKS)
    if DENSE:
        for first in range(0, own_blocks, TILE):
            some = first + tl.arange(0, TILE)
            peak = tl.load(maxima + at_blocks + some, mask=some < own_blocks, other=BINS_END).to(tl.int32)
            at = (begin + some)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
            nothing = tl.zeros([TILE, SIZE], tl.int16)
            tl.store(bits + t * width + at, nothing, mask=(at < width) & (peak < tl.maximum(cut, 1))[:, None])
    for first in range(0, n, TILE):
        at = begin * SIZE + positions(chosen + at_blocks, first, n, blocks, SIZE, TILE)
        value = tl.load(bits + t * width + at, mask=at < width, other=-1).to(tl.int32)
        is_above = value > cut
        is_tie = (value == cut) & (value > 0)  # a cut of 0 keeps all that is positive
        # Both counts in one running sum: those above in the low half, ties in the high half.
        both = tl.cumsum(is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16), 0)
        ties_here = ties + (both >> 16)
        kept = is_above | (is_tie & (ties_here <= room))
        if DENSE:
            tl.store(bits + t * width + at, tl.where(kept, value, 0).to(tl.int16), mask=at < width)
        else:
            to = base + above + (both & 0xFFFF) + tl.minimum(ties_here, room) - 1
            tl.store(token + to, t.to(tl.int32), mask=kept)
            tl.store(column + to, at, mask=kept)
            tl.store(value_out + to, (value << 16).to(tl.float32, bitcast=True), mask=kept)
        above += tl.sum(is_above.to(tl.int32))
        ties += tl.sum(is_tie.to(tl.int32))


class Cut(NamedTuple):
    """What a cut kept, and where it lay, in bits."""

    kept: Kept | None
    """None if the kept values were left in Z, with zeros elsewhere."""
    lowest: Tensor
    """[groups] int32: the smallest kept value of each group, BINS if there is none."""

    def smallest(self) -> Tensor:
        """Smallest kept value of each group, averaged over the groups that have one; 0 if none has."""
        there = self.lowest < BINS
        values = torch.where(there, (self.lowest << 16).view(torch.float32), 0)
        return values[0] if len(values) == 1 else values.sum() / there.sum().clamp_min(1)


def cut_batch(blocks: Blocks, keep: int, group: int, last: Tensor | None, dense: bool) -> Cut:
    """Keep the `keep` largest positive values of each group of tokens; ties go to the lowest position.

    `last` [groups] int32 is the last step's `lowest`, if there is one: it saves work, the result is the same.
    """
    bits, maxima, chosen = blocks.bits, blocks.maxima, blocks.chosen
    tokens, width = bits.shape
    groups = tokens // group
    shape = blocks.shape(1024, PART // blocks.size)
    parts = triton.cdiv(blocks.number, shape["BLOCKS"])
    copies = 8 if groups == 1 else 1  # many programs add to few numbers: less waiting when there are several of each
    bins = torch.zeros(groups, copies, BINS, dtype=torch.int32, device=bits.device)
    cuts = torch.zeros(groups, 5, dtype=torch.int32, device=bits.device)
    bands = [BINS]
    if last is not None and len(last) == groups:
        cuts[:, 3] = last
        bands = [*MARGINS, BINS]
    for number, margin in enumerate(bands):
        above = bands[number - 1] if number else -1
        _count_values[(tokens * parts,)](
            bits, maxima, chosen, cuts, bins, width, blocks.number, parts, group, keep, margin, above,
            COPIES=copies, **shape, BINS=BINS, num_warps=2,
        )  # fmt: skip
        _find_cut[(groups,)](bins, cuts, keep, FIRST=number == 0, COPIES=copies, BINS=BINS, num_warps=16)
    counts = torch.empty(2, groups, group * parts, dtype=torch.int32, device=bits.device)
    _count_kept[(tokens * parts,)](
        bits, maxima, chosen, cuts, counts, width, blocks.number, parts, group, **shape, num_warps=2
    )
    sums = counts.cumsum(-1, dtype=torch.int32)
    kept = empty_kept(1 if dense else tokens, 1 if dense else groups * keep, width, bits.device)
    _write_kept[(tokens * parts,)](
        bits, maxima, chosen, cuts, counts, sums, *kept, width, blocks.number, parts, group, keep,
        DENSE=dense, **shape, num_warps=2,
    )  # fmt: skip
    return Cut(None if dense else kept, cuts[:, 4])


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
