"""Long lists in pieces: a few tokens and latents have a thousand times more entries than the others.

A program sums the first PIECE entries of its token or latent. What is longer has further pieces, and these are
summed before by programs of their own into `partial` rows, which the first then adds, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 128


class Pieces(NamedTuple):
    """The pieces after the first, of all lists."""

    owner: Tensor
    """[bound] int32: whose piece it is; the number of lists where there is no such piece."""
    before: Tensor
    """[lists + 1] int32: pieces of the lists before."""


def further_pieces(start: Tensor, stop: Tensor, entries: int) -> Pieces:
    """Lists [start, stop) that hold `entries` entries at most -> their pieces after the first."""
    more = ((stop - start - 1) // PIECE).clamp_min_(0)
    before = torch.zeros(len(start) + 1, dtype=torch.int32, device=start.device)
    torch.cumsum(more, 0, dtype=torch.int32, out=before[1:])
    numbers = torch.arange(max(1, entries // PIECE), dtype=torch.int32, device=start.device)
    return Pieces(torch.searchsorted(before[1:], numbers, right=True, out_int32=True), before)


@triton.jit
def weighted_sum(table, index, weight, first, last, c, inside, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum over the entries first .. last of weight * table[index, c] -> [BLOCK]."""
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(first, last, ROWS):
        at = i + tl.arange(0, ROWS)
        row = tl.load(index + at, mask=at < last, other=0).to(tl.int64)
        w = tl.load(weight + at, mask=at < last, other=0.0)
        mask = (at < last)[:, None] & inside[None, :]
        total += tl.sum(tl.load(table + row[:, None] * stride + c[None, :], mask=mask, other=0.0) * w[:, None], axis=0)
    return total


@triton.jit
def _sum_pieces(table, index, weight, start, stop, owner, before, partial, lists, d, stride,
                PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0)
    r = tl.load(owner + i)
    if r < lists:
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        first = tl.load(start + r) + (i - tl.load(before + r) + 1) * PIECE
        last = tl.minimum(first + PIECE, tl.load(stop + r))
        total = weighted_sum(table, index, weight, first, last, c, c < d, stride, ROWS, BLOCK)
        tl.store(partial + i.to(tl.int64) * d + c, total, mask=c < d)


@triton.jit
def whole_sum(table, index, weight, start, stop, before, partial, r, c, d, stride,
              PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The sum over list r, its first piece and the partial rows of the further ones -> [BLOCK]."""
    first = tl.load(start + r)
    last = tl.minimum(first + PIECE, tl.load(stop + r))
    total = weighted_sum(table, index, weight, first, last, c, c < d, stride, ROWS, BLOCK)
    for i in range(tl.load(before + r), tl.load(before + r + 1)):
        total += tl.load(partial + i * d + c, mask=c < d, other=0.0)
    return total


ROWS, BLOCK, WARPS = 8, 256, 1
"""Rows read at a time, columns of a program: eight values of 16 bits, the widest load, for each thread."""


def sum_pieces(table: Tensor, index: Tensor, weight: Tensor, start: Tensor, stop: Tensor, pieces: Pieces, d: int):
    """table [*, stride], index and weight [n] -> partial sums [bound, d] of the further pieces (others undefined)."""
    bound = len(pieces.owner)
    partial = torch.empty(bound, d, device=table.device)
    _sum_pieces[(bound, triton.cdiv(d, BLOCK))](
        table, index, weight, start, stop, *pieces, partial, len(start), d, table.stride(0),
        PIECE=PIECE, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return partial
