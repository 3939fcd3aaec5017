"""Backward passes over sparse codes and over small pools, with AuxK; codes as matrices and their masked columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sampled_sae.kernels.encoder import encode_some, padded, product, rows_of
from sampled_sae.kernels.select import Kept, cut_into_blocks, cut_rows
from sampled_sae.kernels.sparse import Groups, Rows, Segments, decode_error, gradient_rows, value_gradient
from sampled_sae.method.config import AuxKConfig
from sampled_sae.method.parameters import Parameters
from sampled_sae.method.selection import Outcome

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
    """Put gradient rows [n, stride] of the latents [n] (m: an empty slot) into matrices [*, d], their rows into `slot`.

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


class KeptCodes(NamedTuple):
    """Kept values as two lists, by token and by latent."""

    x16: Tensor
    """[B, stride]: the batch less b_dec, in 16 bits."""
    kept: Kept
    latent: Tensor
    """[n] int32: whose each value is, m where there is none."""
    segments: Segments
    groups: Groups


class PoolCodes(NamedTuple):
    """Kept values as a matrix: right for a pool so small that products over all of it are cheap."""

    x16: Tensor
    """[B, stride]: the batch less b_dec, in 16 bits."""
    f: Tensor
    """[B, padded P] 16-bit: kept values, zeros elsewhere."""
    columns: Tensor
    """[P] the pool's latents."""


class Copies(NamedTuple):
    """What the products read, in 16 bits."""

    x: Tensor
    """[B, stride]: the batch less b_dec."""
    W_enc: Tensor
    """[m, stride]."""
    W_dec: Tensor
    """[m, stride]."""


class RowGradients(NamedTuple):
    """Gradients of all four tensors; of the matrices only the rows that have one."""

    rows: Rows
    b_dec: Tensor

    def full(self) -> Parameters:
        """With all rows: for tests."""
        there = (self.rows.slot >= 0)[:, None]
        row = self.rows.slot.clamp_min(0).long()
        W_enc, W_dec = (torch.where(there, G[row], 0) for G in (self.rows.W_enc, self.rows.W_dec))
        return Parameters(W_enc, self.rows.b_enc, W_dec, self.b_dec)


class Pass(NamedTuple):
    """One pass backward."""

    rows: Rows
    out: Tensor
    """[B, stride] 16-bit: the error of the reconstruction times `scale`, its gradient (that of the last prefix)."""
    scale: float
    squared_error: Tensor
    mean_squared_error: Tensor
    """Its mean over the nested prefixes."""
    on_b_dec: Tensor
    """[d]."""


def loss_and_gradients(
    x: Tensor,
    weights: Parameters,
    copies: Copies,
    codes: KeptCodes | PoolCodes,
    dead: Tensor | None,
    auxk: AuxKConfig,
) -> Outcome:
    """x [B, d], its codes, dead latents [n] (m: an empty slot) -> loss and gradients, as `RowGradients`."""
    done = (
        _sparse_pass(x, weights, copies, codes)
        if isinstance(codes, KeptCodes)
        else _pool_pass(x, weights, copies, codes)
    )
    auxiliary = torch.zeros((), device=x.device)
    if dead is not None:
        done, auxiliary = _with_auxk(done, x, weights, copies, dead, auxk)
    loss = done.mean_squared_error / len(x) + auxk.alpha * auxiliary
    return Outcome(RowGradients(done.rows, done.on_b_dec), loss, done.squared_error, auxiliary)


def _sparse_pass(x: Tensor, weights: Parameters, copies: Copies, codes: KeptCodes) -> Pass:
    """x [B, d] and its codes -> gradients, without those of AuxK."""
    d = x.shape[1]
    segments, scale = codes.segments, -2 / (len(x) * codes.segments.number)
    errors = decode_error(x, weights.b_dec, copies.W_dec, codes.latent, codes.kept.value, segments, scale)
    out = errors.out
    on_value = value_gradient(out, copies.W_dec, codes.latent, segments.list, d)
    rows = gradient_rows(copies.x, out, codes.groups, on_value, d)
    through_encoder = product(rows.b_enc.to(out.dtype)[None], copies.W_enc)[0, :d]
    out = out.view(len(x), segments.number, -1)
    on_b_dec = out[:, 0].sum(0, dtype=torch.float32)[:d] - through_encoder
    return Pass(rows, out[:, -1], scale, errors.last, errors.mean, on_b_dec)


def _pool_pass(x: Tensor, weights: Parameters, copies: Copies, codes: PoolCodes) -> Pass:
    """The same for a small pool: products over all its B x P values, kept or not."""
    d, m = x.shape[1], len(weights.b_enc)
    latents = padded(codes.columns, m)
    error = x - weights.b_dec - product(codes.f, rows_of(copies.W_dec, latents))[:, :d]
    out, scale, energy = torch.zeros_like(copies.x), -2 / len(x), error.square().sum()
    out[:, :d] = error * scale
    G_enc, G_dec = torch.empty(len(latents), d, device=x.device), torch.empty(len(latents), d, device=x.device)
    slot = torch.full((m,), -1, dtype=torch.int32, device=x.device)
    rows = Rows(G_enc, G_dec, slot, torch.zeros(m, device=x.device), torch.zeros((), device=x.device))
    done = Pass(rows, out, scale, energy, energy, out.sum(0, dtype=torch.float32)[:d])
    return _with_rows(done, out, codes.f, weights, copies, latents, first=0)


def _with_auxk(
    done: Pass, x: Tensor, weights: Parameters, copies: Copies, dead: Tensor, auxk: AuxKConfig
) -> tuple[Pass, Tensor]:
    """Add AuxK's gradients; only the dead latents [n] are encoded (m: an empty slot). Returns its loss too.

    A dead latent did not fire on this batch, so it has no gradient yet: its rows are put, not added.
    """
    d, m = x.shape[1], len(weights.b_enc)
    k = auxk.latents(d)
    f = encode_some(copies.x, copies.W_enc, weights.b_enc.to(copies.x.dtype), dead)
    cut_rows(cut_into_blocks(f, k), k, dense=True)
    error = done.out[:, :d].float() / done.scale
    left = error - product(f, rows_of(copies.W_dec, dead))[:, :d]
    variance = (error - error.mean(0)).square().sum()
    share = torch.where(variance > 0, 1 / variance, 0)  # nothing to explain counts as 0
    out = torch.zeros_like(copies.x)
    out[:, :d] = left * (-2 * auxk.alpha * share)
    rows, first = done.rows, -1
    if len(rows.W_enc) < m:  # a small pool's rows: the dead come behind them
        first = len(rows.W_enc)
        more = torch.empty(len(dead), d, device=x.device)
        rows = rows._replace(W_enc=torch.cat([rows.W_enc, more]), W_dec=torch.cat([rows.W_dec, more]))
    done = _with_rows(done._replace(rows=rows), out, f, weights, copies, dead, first)
    return done, left.square().sum() * share


def _with_rows(
    done: Pass, out: Tensor, f: Tensor, weights: Parameters, copies: Copies, latents: Tensor, first: int
) -> Pass:
    """Put the gradients of the latents [n] into the rows from `first` on, or into their own if it is negative.

    f [B, n] are their codes, `out` [B, stride] is the gradient of what they reconstruct.
    """
    rows, d, m = done.rows, len(weights.b_dec), len(weights.b_enc)
    on_f = out @ rows_of(copies.W_dec, latents).T
    bias = mask_(on_f, f)
    own = (product(on_f.T, copies.x), product(f.T, out))
    energy = put_rows_(own, weights.W_dec, latents, (rows.W_enc, rows.W_dec), rows.slot, first)
    b_enc = rows.b_enc + bias.new_zeros(m + 1).index_add_(0, latents, bias)[:m]
    through_encoder = product(bias.to(out.dtype)[None], rows_of(copies.W_enc, latents))[0, :d]
    rows = rows._replace(b_enc=b_enc, energy=rows.energy + energy + bias.square().sum())
    return done._replace(rows=rows, on_b_dec=done.on_b_dec - through_encoder)
