"""Products with sparse codes: decoding, the gradient of each kept value, the gradient rows of each latent."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sampled_sae.kernels.cut import Kept
from sampled_sae.kernels.pieces import BLOCK, PIECE, ROWS, WARPS, further_pieces, sum_pieces, whole_sum


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
    value: Tensor
    """[n] float32."""


def group_by_latent(kept: Kept, latent: Tensor, m: int) -> Groups:
    """`latent` [n] int32 says whose the entries are; m where there is none."""
    ordered, order = latent.sort(stable=True)
    edge = torch.searchsorted(ordered, torch.arange(m + 1, dtype=torch.int32, device=latent.device), out_int32=True)
    return Groups(edge[:-1], edge[1:], order, kept.token[order], kept.value[order])


@triton.jit
def _decode(x, b_dec, W, latent, value, start, stop, before, partial, out, energy, d, stride, scale,
            PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    decoded = whole_sum(W, latent, value, start, stop, before, partial, t, c, d, stride, PIECE, ROWS, BLOCK)
    goal = tl.load(x + t * d + c, mask=c < d, other=0.0) - tl.load(b_dec + c, mask=c < d, other=0.0)
    error = goal - decoded
    tl.store(out + t * stride + c, (error * scale).to(out.dtype.element_ty), mask=c < stride)
    tl.store(energy + t * tl.num_programs(1) + tl.program_id(1), tl.sum(error * error))


def decode_error(
    x: Tensor, b_dec: Tensor, W: Tensor, latent: Tensor, kept: Kept, scale: float
) -> tuple[Tensor, Tensor]:
    """x [B, d], W [m, stride] and the codes -> (scale * error [B, stride] in W's type, sum of squared errors)."""
    tokens, d = x.shape
    pieces = further_pieces(kept.start, kept.stop, len(latent))
    partial = sum_pieces(W, latent, kept.value, kept.start, kept.stop, pieces, d)
    out = torch.empty(tokens, W.shape[1], dtype=W.dtype, device=x.device)
    parts = triton.cdiv(W.shape[1], BLOCK)
    energy = torch.empty(tokens, parts, device=x.device)
    _decode[(tokens, parts)](
        x, b_dec, W, latent, kept.value, kept.start, kept.stop, pieces.before, partial, out, energy,
        d, W.shape[1], scale, PIECE=PIECE, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out, energy.sum()


@triton.jit
def _value_gradient(out, W, token, latent, on_value, entries, latents, d, stride,
                    ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.load(latent + at, mask=at < entries, other=latents).to(tl.int64)
    there = j < latents
    t = tl.load(token + at, mask=there, other=0).to(tl.int64)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, d, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = there[:, None] & (c < d)[None, :]
        a = tl.load(out + t[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(W + j[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(a * b, axis=1)
    tl.store(on_value + at, total, mask=at < entries)


def value_gradient(out: Tensor, W: Tensor, latent: Tensor, kept: Kept, d: int) -> Tensor:
    """out [B, stride], W [m, stride] -> out[token] . W[latent] for each kept value [n]."""
    on_value = torch.empty(len(latent), device=out.device)
    _value_gradient[(triton.cdiv(len(latent), ROWS),)](
        out, W, kept.token, latent, on_value, len(latent), len(W), d, W.shape[1],
        ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return on_value


class Rows(NamedTuple):
    """Gradients of the two matrices, only the rows that have one."""

    W_enc: Tensor
    """[rows, d]."""
    W_dec: Tensor
    """[rows, d]."""
    slot: Tensor
    """[m] int32: a latent's row, -1 if its gradient is zero."""
    b_enc: Tensor
    """[m]."""
    energy: Tensor
    """Squared norm of all of it, after the part of W_dec along each unit row is taken out."""


@triton.jit
def _gradient_rows(x, out, token, value, on_value, start, stop, before, part_enc, part_dec,
                   G_enc, G_dec, slot, g_bias, energy, d, stride,
                   PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    j = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    c = part * BLOCK + tl.arange(0, BLOCK)
    first, last = tl.load(start + j), tl.load(stop + j)
    square = 0.0
    if first < last:
        on_enc = whole_sum(x, token, on_value, start, stop, before, part_enc, j, c, d, stride, PIECE, ROWS, BLOCK)
        on_dec = whole_sum(out, token, value, start, stop, before, part_dec, j, c, d, stride, PIECE, ROWS, BLOCK)
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


def gradient_rows(x: Tensor, out: Tensor, groups: Groups, on_value: Tensor, d: int) -> Rows:
    """x and out [B, stride], on_value [n] in the codes' own order -> the gradients of all latents that fired."""
    m, device = len(groups.start), x.device
    on_value = on_value[groups.order]
    pieces = further_pieces(groups.start, groups.stop, len(on_value))
    ends = (groups.start, groups.stop)
    part_enc = sum_pieces(x, groups.token, on_value, *ends, pieces, d)
    part_dec = sum_pieces(out, groups.token, groups.value, *ends, pieces, d)
    G_enc, G_dec = torch.empty(m, d, device=device), torch.empty(m, d, device=device)
    slot, bias = torch.empty(m, dtype=torch.int32, device=device), torch.empty(m, device=device)
    parts = triton.cdiv(d, BLOCK)
    energy = torch.empty(m, parts, device=device)
    _gradient_rows[(m, parts)](
        x, out, groups.token, groups.value, on_value, *ends, pieces.before, part_enc, part_dec,
        G_enc, G_dec, slot, bias, energy, d, x.shape[1], PIECE=PIECE, ROWS=4, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return Rows(G_enc, G_dec, slot, bias, energy.sum())
