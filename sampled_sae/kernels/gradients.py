"""Backward passes over sparse codes and over small pools, with AuxK."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sampled_sae.kernels.auxk import Copies, DeadPass, LatentRows, latent_rows
from sampled_sae.kernels.encoder import padded, product, rows_of
from sampled_sae.kernels.select import Kept
from sampled_sae.kernels.sparse import Errors, Groups, Rows, Segments, decode_error, gradient_rows, value_gradient
from sampled_sae.method.config import AuxKConfig
from sampled_sae.method.parameters import Parameters
from sampled_sae.method.selection import Outcome


@triton.jit
def _put_rows(from_enc, from_dec, bias, encoders, W_dec, latents, first, to_enc, to_dec, slot, b_enc, sums,
              n, parts, m, d, stride, width,
              PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c, part = tl.arange(0, BLOCK), tl.arange(0, PARTS)
    j = tl.load(latents + i, mask=i < n, other=m)
    there = j < m
    inside = there[:, None] & (c < d)[None, :]
    at = i[:, None] * stride + c[None, :]
    on_enc = tl.load(from_enc + at, mask=inside, other=0.0)
    on_dec = tl.load(from_dec + at, mask=inside, other=0.0)
    along = tl.sum(on_dec * tl.load(W_dec + j[:, None] * d + c[None, :], mask=inside, other=0.0), axis=1)
    of_parts = (part < parts)[:, None] & there[None, :]
    on_bias = tl.sum(tl.load(bias + part[:, None] * n + i[None, :], mask=of_parts, other=0.0), axis=0)
    through = tl.sum(on_bias[:, None] * tl.load(encoders + at, mask=inside, other=0.0).to(tl.float32), axis=0)
    to = tl.where(first < 0, j, first + i)
    tl.store(to_enc + to[:, None] * d + c[None, :], on_enc, mask=inside)
    tl.store(to_dec + to[:, None] * d + c[None, :], on_dec, mask=inside)
    tl.store(slot + j, to.to(tl.int32), mask=there)
    tl.store(b_enc + j, on_bias, mask=there)
    sums += tl.program_id(0) * width
    tl.store(sums + c, through, mask=c < stride)
    square = tl.sum(tl.sum(on_enc * on_enc + on_dec * on_dec, axis=1) - along * along + on_bias * on_bias)
    tl.store(sums + stride, square)


def put_rows_(found: LatentRows, W_dec: Tensor, latents: Tensor, into: Rows, first: int) -> tuple[Tensor, Tensor]:
    """Put the gradients of the latents [n] (m: an empty slot) among others, which have none of these latents.

    Their rows come one after the other from row `first` on, or each is its latent's own row if `first` is negative.
    Returns the part of b_dec's gradient that comes through their encoders [d], to be subtracted, and their squared norm
    without the decoder's part along its unit rows W_dec [m, d].
    """
    (m, d), (n, stride), parts = W_dec.shape, found.encoders.shape, len(found.b_enc)
    block = triton.next_power_of_2(d)
    rows = max(1, 2**12 // block)
    sums = torch.empty(triton.cdiv(n, rows), stride + 16, device=W_dec.device)
    _put_rows[(len(sums),)](
        found.W_enc, found.W_dec, found.b_enc, found.encoders, W_dec, latents, first,
        into.W_enc, into.W_dec, into.slot, into.b_enc, sums, n, parts, m, d, stride, sums.shape[1],
        PARTS=triton.next_power_of_2(parts), ROWS=rows, BLOCK=block, num_warps=8,
    )  # fmt: skip
    total = sums.sum(0)
    return total[:d], total[stride]


class KeptCodes(NamedTuple):
    """Kept values as two lists, by token and by latent."""

    x16: Tensor
    """[B, stride]: the batch less b_dec, in 16 bits."""
    kept: Kept
    latent: Tensor
    """[n] int32: whose each value is, m where there is none."""
    segments: Segments
    groups: Groups

    @property
    def scale(self) -> float:
        """Factor of an error in the gradient of the loss."""
        return -2 / len(self.segments.start)


class PoolCodes(NamedTuple):
    """Kept values as a matrix: right for a pool so small that products over all of it are cheap."""

    x16: Tensor
    """[B, stride]: the batch less b_dec, in 16 bits."""
    f: Tensor
    """[B, padded P] 16-bit: kept values, zeros elsewhere."""
    columns: Tensor
    """[P] the pool's latents."""


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
    squared_error: Tensor
    mean_squared_error: Tensor
    """Its mean over the nested prefixes."""
    on_b_dec: Tensor
    """[d], without what comes through the encoder ..."""
    through_encoder: Tensor
    """[d]: ... which is to be subtracted."""


def loss_and_gradients(
    x: Tensor,
    weights: Parameters,
    copies: Copies,
    codes: KeptCodes | PoolCodes,
    dead: Tensor | None,
    auxk: AuxKConfig,
) -> Outcome:
    """x [B, d], its codes, dead latents [n] (m: an empty slot) -> loss and gradients, as `RowGradients`."""
    beside = None if dead is None else DeadPass(copies, weights, dead, auxk)
    if isinstance(codes, KeptCodes):
        errors = decode_error(
            x, weights.b_dec, copies.W_dec, codes.latent, codes.kept.value, codes.segments, codes.scale
        )
        done = sparse_pass(copies, codes, errors, beside, x.shape[1])
    else:
        done = _pool_pass(x, weights, copies, codes, beside)
    done, loss, auxiliary = finished(done, weights, dead, beside, len(x), auxk)
    gradients = RowGradients(done.rows, done.on_b_dec - done.through_encoder)
    return Outcome(gradients, loss, done.squared_error, auxiliary)


def finished(
    done: Pass, weights: Parameters, dead: Tensor | None, beside: DeadPass | None, tokens: int, auxk: AuxKConfig
) -> tuple[Pass, Tensor, Tensor]:
    """The pass with AuxK's gradients, the loss, and AuxK's."""
    auxiliary = torch.zeros((), device=weights.b_dec.device)
    if beside is not None and dead is not None:
        found, auxiliary = beside.join()
        done = _with_dead(done, found, weights, dead)
    return done, torch.add(done.mean_squared_error / tokens, auxiliary, alpha=auxk.alpha), auxiliary


def sparse_pass(
    copies: Copies,
    codes: KeptCodes,
    errors: Errors,
    beside: DeadPass | None,
    d: int,
    into: tuple[Tensor, Tensor] | None = None,
) -> Pass:
    """Codes and the errors that they leave -> gradients, without those of AuxK, which goes on `beside` it."""
    segments, out = codes.segments, errors.out
    by_prefix = out.view(-1, segments.number, out.shape[1])
    total = by_prefix[:, 0].sum(0, dtype=torch.float32)
    if beside is not None:  # for the error of all latents
        last = total if segments.number == 1 else by_prefix[:, -1].sum(0, dtype=torch.float32)
        beside.follow(by_prefix[:, -1], last, codes.scale)
    on_value = value_gradient(out, copies.W_dec, codes.latent, segments.list, d)
    rows = gradient_rows(copies.x, out, codes.groups, on_value, d, into)
    through_encoder = product(rows.b_enc.to(out.dtype)[None], copies.W_enc)[0, :d]
    return Pass(rows, errors.last, errors.mean, total[:d], through_encoder)


def _pool_pass(x: Tensor, weights: Parameters, copies: Copies, codes: PoolCodes, beside: DeadPass | None) -> Pass:
    """The same for a small pool: products over all its B x P values, kept or not."""
    d, m = x.shape[1], len(weights.b_enc)
    latents = padded(codes.columns, m)
    dec = rows_of(copies.W_dec, latents)
    error = x - weights.b_dec - product(codes.f, dec)[:, :d]
    out, scale, energy = torch.zeros_like(copies.x), -2 / len(x), error.square().sum()
    out[:, :d] = error * scale
    total = out.sum(0, dtype=torch.float32)
    if beside is not None:
        beside.follow(out, total, scale)
    found = latent_rows((codes.f, out @ dec.T), (out, copies.x), rows_of(copies.W_enc, latents))
    G_enc, G_dec = torch.empty(len(latents), d, device=x.device), torch.empty(len(latents), d, device=x.device)
    slot = torch.full((m,), -1, dtype=torch.int32, device=x.device)
    rows = Rows(G_enc, G_dec, slot, torch.zeros(m, device=x.device), torch.zeros((), device=x.device))
    done = Pass(rows, energy, energy, total[:d], torch.zeros_like(total[:d]))
    return _with_rows(done, found, weights, latents, first=0)


def _with_dead(done: Pass, found: LatentRows, weights: Parameters, dead: Tensor) -> Pass:
    """Add AuxK's gradients of the dead latents [n] (m: an empty slot).

    A dead latent did not fire on this batch, so it has no gradient yet: its rows are put, not added.
    """
    rows, first = done.rows, -1
    if len(rows.W_enc) < len(rows.slot):  # a small pool's rows: the dead come behind them
        first = len(rows.W_enc)
        more = rows.W_enc.new_empty(len(dead), rows.W_enc.shape[1])
        rows = rows._replace(W_enc=torch.cat([rows.W_enc, more]), W_dec=torch.cat([rows.W_dec, more]))
    return _with_rows(done._replace(rows=rows), found, weights, dead, first)


def _with_rows(done: Pass, found: LatentRows, weights: Parameters, latents: Tensor, first: int) -> Pass:
    """Put the gradients of the latents [n] into the rows from `first` on, or into their own if it is negative."""
    through, energy = put_rows_(found, weights.W_dec, latents, done.rows, first)
    rows = done.rows._replace(energy=done.rows.energy + energy)
    return done._replace(rows=rows, through_encoder=done.through_encoder + through)
