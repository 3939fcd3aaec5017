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
def _put_rows(from_enc, from_dec, bias, W_dec, latents, first, to_enc, to_dec, slot, b_enc, energy, m, d, stride,
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
        on_bias = tl.load(bias + i)
        tl.store(b_enc + j, on_bias)
        square = tl.sum(on_enc * on_enc) + tl.sum(on_dec * on_dec) - along * along + on_bias * on_bias
    tl.store(energy + i, square)


def put_rows_(found: LatentRows, W_dec: Tensor, latents: Tensor, into: Rows, first: int) -> Tensor:
    """Put the gradients of the latents [n] (m: an empty slot) among others, which have none of these latents.

    Their rows come one after the other from row `first` on, or each is its latent's own row if `first` is negative.
    Returns their squared norm without the decoder's part along its unit rows W_dec [m, d].
    """
    m, d = W_dec.shape
    energy = torch.empty(len(latents), device=W_dec.device)
    block = triton.next_power_of_2(d)
    _put_rows[(len(latents),)](
        found.W_enc, found.W_dec, found.b_enc, W_dec, latents, first, into.W_enc, into.W_dec, into.slot, into.b_enc,
        energy, m, d, found.W_enc.shape[1], BLOCK=block, num_warps=4 if block <= 2048 else 8,
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
    found = latent_rows((codes.f, out @ dec.T), (out, copies.x), rows_of(copies.W_enc, latents), d)
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
    energy = put_rows_(found, weights.W_dec, latents, done.rows, first)
    rows = done.rows._replace(energy=done.rows.energy + energy)
    return done._replace(rows=rows, through_encoder=done.through_encoder + found.through_encoder)
