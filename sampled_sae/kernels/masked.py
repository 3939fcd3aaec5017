"""Codes as matrices, for small pools and AuxK: who fired, gradients only where a value was kept, and their rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, AT_ONCE, BLOCK, WARPS = 32, 4, 256, 1


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
    parts = triton.cdiv(tokens, ROWS)
    sums = torch.empty(parts, width, device=f.device)
    _mask_columns[(triton.cdiv(width, BLOCK), parts)](
        f, f if g is None else g, sums, tokens, width, GRADIENT=g is not None,
        ROWS=ROWS, AT_ONCE=AT_ONCE, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return sums.sum(0)


def mask_(g: Tensor, f: Tensor) -> Tensor:
    """Set g [tokens, n] to 0 where f [tokens, n] is not positive, in place; returns its column sums [n] float32."""
    return _sums(f, g)


def counts(f: Tensor) -> Tensor:
    """f [tokens, n] -> number of positive values in each column [n] float32."""
    return _sums(f, None)


@triton.jit
def _put_rows(from_enc, from_dec, W_dec, latents, first, to_enc, to_dec, slot, energy, m, d, stride,
              BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    j = tl.load(latents + i)
    square = 0.0
    if j < m:
        to = tl.where(first < 0, j, first + i)
        c = tl.arange(0, BLOCK)
        inside = c < d
        on_enc = tl.load(from_enc + i * stride + c, mask=inside, other=0.0)
        on_dec = tl.load(from_dec + i * stride + c, mask=inside, other=0.0)
        along = tl.sum(on_dec * tl.load(W_dec + j * d + c, mask=inside, other=0.0))
        tl.store(to_enc + to * d + c, on_enc, mask=inside)
        tl.store(to_dec + to * d + c, on_dec, mask=inside)
        tl.store(slot + j, to.to(tl.int32))
        square = tl.sum(on_enc * on_enc) + tl.sum(on_dec * on_dec) - along * along
    tl.store(energy + i, square)


def put_rows_(
    rows: tuple[Tensor, Tensor], W_dec: Tensor, latents: Tensor, into: tuple[Tensor, Tensor], slot: Tensor, first: int
) -> Tensor:
    """Put gradient rows [n, stride] of the latents [n] (m: nobody) into matrices [*, d], their places into `slot` [m].

    They come one after the other from row `first` on, or each into its latent's own row if `first` is negative.
    Returns their squared norm without the decoder's part along its unit rows W_dec [m, d].
    """
    m, d = W_dec.shape
    energy = torch.empty(len(latents), device=slot.device)
    block = triton.next_power_of_2(d)
    _put_rows[(len(latents),)](
        *rows, W_dec, latents, first, *into, slot, energy, m, d, rows[0].shape[1],
        BLOCK=block, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return energy.sum()
