"""What the scores need to know of Z [tokens, latents], in one pass over it."""

from __future__ import annotations

from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor

from sampled_sae.method.scores import Sums

ROWS, BLOCK = 128, 512


NAMES = Sums._fields[1:]


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


def statistics(z: Tensor, needs: Collection[str] = NAMES) -> Sums:
    """z [tokens, m], negative values count as 0 -> the needed sums over the tokens, each [m] float32."""
    tokens, width = z.shape
    parts = triton.cdiv(tokens, ROWS)
    wanted = [name for name in NAMES if name in needs]
    sums = torch.empty(len(wanted), parts, width, device=z.device)
    flags = dict(zip(("TOTAL", "ENERGY", "LOGS", "FIRED"), (name in needs for name in NAMES), strict=True))
    _column_sums[(triton.cdiv(width, BLOCK), parts)](
        z, sums, tokens, width, parts, **flags, HARDWARE=z.is_cuda, ROWS=ROWS, AT_ONCE=4, BLOCK=BLOCK, num_warps=4
    )
    return Sums(tokens=tokens, **dict(zip(wanted, sums.sum(1), strict=True)))


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
