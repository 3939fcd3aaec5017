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

from sampled_sae.kernels.select import Kept

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
        total += tl.load(partial + tl.cast(i, tl.int64) * d + c, mask=c < d, other=0.0)
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


class Segments(NamedTuple):
    """The kept values of each token, cut at the widths of n nested prefixes: list t * n + p is segment p of token t."""

    start: Tensor
    """[tokens * n] int32: where a list's entries begin ..."""
    stop: Tensor
    """[tokens * n] int32: ... and end."""
    list: Tensor
    """[entries] int32: which list each entry is in."""
    number: int
    """n; 1 without prefixes, when the lists are the tokens."""


@triton.jit
def _cut_segments(latent, start, stop, edges, list_start, list_stop, list_of, PREFIXES: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    t = tl.program_id(0)
    first, last = tl.load(start + t), tl.load(stop + t)
    begin = first
    for p in range(PREFIXES):
        edge = tl.load(edges + p)
        below = 0
        for i in range(first, last, BLOCK):
            at = i + tl.arange(0, BLOCK)
            below += tl.sum((tl.load(latent + at, mask=at < last, other=edge) < edge).to(tl.int32))
        end = first + below
        for i in range(begin, end, BLOCK):
            at = i + tl.arange(0, BLOCK)
            tl.store(list_of + at, tl.zeros([BLOCK], tl.int32) + t * PREFIXES + p, mask=at < end)
        tl.store(list_start + t * PREFIXES + p, begin)
        tl.store(list_stop + t * PREFIXES + p, end)
        begin = end


def cut_segments(kept: Kept, latent: Tensor, edges: Tensor | None) -> Segments:
    """Cut at the widths `edges` [n] int32; `latent` [entries] int32 ascends within each token."""
    if edges is None:
        return Segments(kept.start, kept.stop, kept.token, 1)
    tokens, n = len(kept.start), len(edges)
    start, stop = torch.empty(2, tokens * n, dtype=torch.int32, device=latent.device)
    list_of = torch.zeros_like(latent)
    _cut_segments[(tokens,)](
        latent, kept.start, kept.stop, edges, start, stop, list_of, PREFIXES=n, BLOCK=PIECE, num_warps=1
    )
    return Segments(start, stop, list_of, n)


class Groups(NamedTuple):
    """Kept values in order of latent and token."""

    start: Tensor
    """[m] int32: where a latent's entries begin ..."""
    stop: Tensor
    """[m] int32: ... and end."""
    order: Tensor
    """[n] long: which entry of `Kept` each is."""
    token: Tensor
    """[n] int32."""
    list: Tensor
    """[n] int32: which list of `Segments` each is in."""
    value: Tensor
    """[n] float32."""


def group_by_latent(kept: Kept, latent: Tensor, segments: Segments, m: int) -> Groups:
    """`latent` [n] int32: the latent of each entry; m where there is none."""
    ordered, order = latent.sort(stable=True)
    edge = torch.searchsorted(ordered, torch.arange(m + 1, dtype=torch.int32, device=latent.device), out_int32=True)
    token = kept.token[order]
    list_of = token if segments.list is kept.token else segments.list[order]
    return Groups(edge[:-1], edge[1:], order, token, list_of, kept.value[order])


@triton.jit
def _goal(x, b_dec, t, c, d):
    """What the latents of token t have to reconstruct."""
    return tl.load(x + t * d + c, mask=c < d, other=0.0) - tl.load(b_dec + c, mask=c < d, other=0.0)


@triton.jit
def _decode(x, b_dec, W, latent, value, start, stop, before, partial, out, energy, d, stride, scale,
            PREFIXES: tl.constexpr, SEGMENTS: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PREFIXES == 1:
        decoded = whole_sum(W, latent, value, start, stop, before, partial, t, c, d, stride, PIECE, ROWS, BLOCK)
        error = _goal(x, b_dec, t, c, d) - decoded
        tl.store(out + t * stride + c, (error * scale).to(out.dtype.element_ty), mask=c < stride)
        last = tl.sum(error * error)
        every = last
    else:
        # The error of prefix p is the one before less segment p; segment s is part of all prefixes p >= s.
        s = tl.arange(0, SEGMENTS)
        error = _goal(x, b_dec, t, c, d)
        errors = tl.zeros([SEGMENTS, BLOCK], tl.float32)
        last, every = 0.0, 0.0
        for p in range(PREFIXES):
            r = t * PREFIXES + p
            error -= whole_sum(W, latent, value, start, stop, before, partial, r, c, d, stride, PIECE, ROWS, BLOCK)
            errors += tl.where(s[:, None] <= p, error[None, :], 0.0)
            last = tl.sum(error * error)
            every += last
        at = (t * PREFIXES + s[:, None]) * stride + c[None, :]
        mask = (s[:, None] < PREFIXES) & (c[None, :] < stride)
        tl.store(out + at, (errors * scale).to(out.dtype.element_ty), mask=mask)
    parts = tl.num_programs(1)
    at = energy + t * parts + tl.program_id(1)
    tl.store(at, last)
    tl.store(at + tl.num_programs(0) * parts, every / PREFIXES)


@triton.jit
def _partial(W, latent, value, start, stop, before, partial, decoded, d, stride,
             PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = whole_sum(W, latent, value, start, stop, before, partial, r, c, d, stride, PIECE, ROWS, BLOCK)
    tl.store(decoded + r * d + c, total, mask=c < d)


def decode_lists(W: Tensor, latent: Tensor, value: Tensor, segments: Segments, d: int) -> Tensor:
    """W [m, stride] and the codes [entries] -> the sum of each list of segments [B * n, d] float32."""
    lists = (segments.start, segments.stop)
    pieces = further_pieces(*lists, len(latent))
    partial = sum_pieces(W, latent, value, *lists, pieces, d)
    decoded = torch.empty(len(segments.start), d, device=W.device)
    _partial[(len(segments.start), triton.cdiv(d, BLOCK))](
        W, latent, value, *lists, pieces.before, partial, decoded, d, W.shape[1],
        PIECE=PIECE, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return decoded


class Errors(NamedTuple):
    """What the prefixes leave of the input."""

    out: Tensor
    """[B * n, stride] 16-bit: for each segment, `scale` times the sum of the errors of all prefixes that contain it."""
    last: Tensor
    """Sum of the squared errors of the last prefix, which is all latents."""
    mean: Tensor
    """The same, averaged over the prefixes."""


def decode_error(
    x: Tensor, b_dec: Tensor, W: Tensor, latent: Tensor, value: Tensor, segments: Segments, scale: float
) -> Errors:
    """x [B, d], W [m, stride] and the codes [entries] -> errors of the reconstruction by each prefix."""
    tokens, d = x.shape
    lists, n = (segments.start, segments.stop), segments.number
    pieces = further_pieces(*lists, len(latent))
    partial = sum_pieces(W, latent, value, *lists, pieces, d)
    out = torch.empty(tokens * n, W.shape[1], dtype=W.dtype, device=x.device)
    parts = triton.cdiv(W.shape[1], BLOCK)
    energy = torch.empty(2, tokens * parts, device=x.device)
    _decode[(tokens, parts)](
        x, b_dec, W, latent, value, *lists, pieces.before, partial, out, energy, d, W.shape[1], scale,
        PREFIXES=n, SEGMENTS=triton.next_power_of_2(n), PIECE=PIECE, ROWS=ROWS if n == 1 else 4, BLOCK=BLOCK,
        num_warps=WARPS,
    )  # fmt: skip
    return Errors(out, *energy.sum(1))


@triton.jit
def _value_gradient(out, W, row, latent, on_value, entries, latents, d, stride,
                    ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.load(latent + at, mask=at < entries, other=latents).to(tl.int64)
    there = j < latents
    t = tl.load(row + at, mask=there, other=0).to(tl.int64)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, d, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = there[:, None] & (c < d)[None, :]
        a = tl.load(out + t[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(W + j[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(a * b, axis=1)
    tl.store(on_value + at, total, mask=at < entries)


def value_gradient(out: Tensor, W: Tensor, latent: Tensor, row: Tensor, d: int) -> Tensor:
    """out [*, stride], W [m, stride] -> out[row] . W[latent] for each kept value [n]."""
    on_value = torch.empty(len(latent), device=out.device)
    _value_gradient[(triton.cdiv(len(latent), ROWS),)](
        out, W, row, latent, on_value, len(latent), len(W), d, W.shape[1],
        ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return on_value


class Rows(NamedTuple):
    """Gradients of the two matrices, only the rows that have one."""

    W_enc: Tensor
    """[rows, d or more]."""
    W_dec: Tensor
    """[rows, d or more]."""
    slot: Tensor
    """[m] int32: a latent's row, -1 if its gradient is zero."""
    b_enc: Tensor
    """[m]."""
    energy: Tensor
    """Squared norm of all of it, after the part of W_dec along each unit row is taken out; in parts, [m, parts]."""
    more: tuple[Tensor, Tensor] | None = None
    """Further rows of both, [n, stride] each."""


@triton.jit
def _gradient_rows(x, out, token, row, value, on_value, start, stop, before, part_enc, part_dec,
                   G_enc, G_dec, slot, g_bias, energy, d, stride,
                   PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    j = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    c = part * BLOCK + tl.arange(0, BLOCK)
    first, last = tl.load(start + j), tl.load(stop + j)
    square = 0.0
    if first < last:
        on_enc = whole_sum(x, token, on_value, start, stop, before, part_enc, j, c, d, stride, PIECE, ROWS, BLOCK)
        on_dec = whole_sum(out, row, value, start, stop, before, part_dec, j, c, d, stride, PIECE, ROWS, BLOCK)
        tl.store(G_enc + j * d + c, on_enc, mask=c < d)
        tl.store(G_dec + j * d + c, on_dec, mask=c < d)
        square = tl.sum(on_enc * on_enc) + tl.sum(on_dec * on_dec)
    if part == 0:
        total, along = 0.0, 0.0
        for i in range(first, last, PIECE):
            at = i + tl.arange(0, PIECE)
            g = tl.load(on_value + at, mask=at < last, other=0.0)
            total += tl.sum(g)
            along += tl.sum(g * tl.load(value + at, mask=at < last, other=0.0))
        tl.store(g_bias + j, total)
        tl.store(slot + j, tl.where(first < last, j, -1).to(tl.int32))
        # The decoder row is a unit vector, and its gradient along it is the sum of value times value's gradient.
        square += total * total - along * along
    tl.store(energy + j * tl.num_programs(1) + part, square)


def gradient_rows(
    x: Tensor, out: Tensor, groups: Groups, on_value: Tensor, d: int, into: tuple[Tensor, Tensor] | None = None
) -> Rows:
    """x [B, stride], out [lists, stride], on_value [n] in the codes' own order -> gradients of latents that fired.

    `into` are two matrices [m, d] for those of the encoder and of the decoder.
    """
    m, device = len(groups.start), x.device
    on_value = on_value[groups.order]
    pieces = further_pieces(groups.start, groups.stop, len(on_value))
    ends = (groups.start, groups.stop)
    part_enc = sum_pieces(x, groups.token, on_value, *ends, pieces, d)
    part_dec = sum_pieces(out, groups.list, groups.value, *ends, pieces, d)
    G_enc, G_dec = into or (torch.empty(m, d, device=device), torch.empty(m, d, device=device))
    slot, bias = torch.empty(m, dtype=torch.int32, device=device), torch.empty(m, device=device)
    parts = triton.cdiv(d, BLOCK)
    energy = torch.empty(m, parts, device=device)
    _gradient_rows[(m, parts)](
        x, out, groups.token, groups.list, groups.value, on_value, *ends, pieces.before, part_enc, part_dec,
        G_enc, G_dec, slot, bias, energy, d, x.shape[1], PIECE=PIECE, ROWS=4, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return Rows(G_enc, G_dec, slot, bias, energy)
