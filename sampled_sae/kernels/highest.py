"""The pool: the latents with the highest scores, exactly, ties to the lowest index.

A float's bits, with those of negative numbers turned round, are an integer of the same order. Its upper half is
counted by value to find the upper half of the cut, then the lower half among those that share it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HALF = tl.constexpr(2**16)


@triton.jit
def _key(q, i, m):
    """Scores as integers of the same order."""
    bits = tl.load(q + i, mask=i < m, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _count_half(q, state, bins, m, UPPER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = _key(q, i, m)
    upper = (key >> 16) + HALF // 2
    if UPPER:
        tl.atomic_add(bins + upper, 1, mask=i < m, sem="relaxed")
    else:
        tl.atomic_add(bins + (key & 0xFFFF), 1, mask=(i < m) & (upper == tl.load(state)), sem="relaxed")


@triton.jit
def _find_half(bins, state, UPPER: tl.constexpr, BLOCK: tl.constexpr):
    """state = upper half of the cut, lower half of the cut, how many are still to be found below what is counted."""
    wanted = tl.load(state + 2)
    above, cut, after = 0, 0, 0
    for step in range(HALF // BLOCK):  # from the largest values down
        value = HALF - (step + 1) * BLOCK + tl.arange(0, BLOCK)
        n = tl.load(bins + value)
        total = tl.sum(n)
        reach = above + total - (tl.cumsum(n, 0) - n)
        if (above < wanted) & (above + total >= wanted):
            cut = tl.max(tl.where(reach >= wanted, value, 0))
            after = above + tl.sum(tl.where(value > cut, n, 0))
        above += total
    if UPPER:
        tl.store(state, cut)
    else:
        tl.store(state + 1, cut)
    tl.store(state + 2, wanted - after)


@triton.jit
def _choose(q, state, pool, members, m, BLOCK: tl.constexpr):
    cut = ((tl.load(state) - HALF // 2) << 16) | tl.load(state + 1)
    room = tl.load(state + 2)
    above, ties = 0, 0
    for first in range(0, m, BLOCK):
        i = first + tl.arange(0, BLOCK)
        key = _key(q, i, m)
        is_above = (key > cut) & (i < m)
        is_tie = (key == cut) & (i < m)
        # Both counts in one running sum: those above in the low half, ties in the high half.
        both = tl.cumsum(is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16), 0)
        ties_here = ties + (both >> 16)
        taken = is_above | (is_tie & (ties_here <= room))
        to = above + (both & 0xFFFF) + tl.minimum(ties_here, room) - 1
        tl.store(pool + i, taken, mask=i < m)
        tl.store(members + to, i.to(tl.int64), mask=taken)
        above += tl.sum(is_above.to(tl.int32))
        ties += tl.sum(is_tie.to(tl.int32))


def highest(q: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Scores q [m] float32 -> the `size` highest: mask [m] bool, and their numbers [size] ascending."""
    m, device = len(q), q.device
    bins = torch.zeros(2, 2**16, dtype=torch.int32, device=device)
    state = torch.zeros(3, dtype=torch.int32, device=device)
    state[2].fill_(size)
    for half, upper in enumerate((True, False)):
        _count_half[(triton.cdiv(m, 1024),)](q, state, bins[half], m, UPPER=upper, BLOCK=1024)
        _find_half[(1,)](bins[half], state, UPPER=upper, BLOCK=2**13, num_warps=16)
    pool = torch.empty(m, dtype=torch.bool, device=device)
    members = torch.empty(size, dtype=torch.long, device=device)
    _choose[(1,)](q, state, pool, members, m, BLOCK=2**13, num_warps=16)
    return pool, members
