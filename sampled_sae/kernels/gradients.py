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
from sampled_sae.method.parameters import Parameters, Weights
from sampled_sae.method.selection import Outcome


@triton.jit
def _note_rows(from_enc, from_dec, bias, W_dec, latents, slot, b_enc, energy, first, n, parts, every, m, d, stride,
               PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    j = tl.load(latents + i)
    if j < m:
        c = tl.arange(0, BLOCK)
        on_enc = tl.load(from_enc + i * stride + c, mask=c < d, other=0.0)
        on_dec = tl.load(from_dec + i * stride + c, mask=c < d, other=0.0)
        along = tl.sum(on_dec * tl.load(W_dec + j * d + c, mask=c < d, other=0.0))
        part = tl.arange(0, PARTS)
        on_bias = tl.sum(tl.load(bias + part * n + i, mask=part < parts, other=0.0))
        tl.store(slot + j, (first + i).to(tl.int32))
        tl.store(b_enc + j, on_bias)
        tl.store(energy + j * every, tl.sum(on_enc * on_enc + on_dec * on_dec) - along * along + on_bias * on_bias)


def note_rows_(found: LatentRows, W_dec: Tensor, latents: Tensor, into: Rows, first: int) -> None:
    """Note in `into` where the rows of the latents [n] (m: an empty slot) are: one after the other from row `first` on.

    Their biases and squared norms are put there too; nothing else has any of these latents. W_dec [m, d] has unit rows.
    """
    (m, d), (parts, n) = W_dec.shape, found.b_enc.shape
    block = triton.next_power_of_2(d)
    _note_rows[(n,)](
        found.W_enc, found.W_dec, found.b_enc, W_dec, latents, into.slot, into.b_enc, into.energy, first, n, parts,
        into.energy.shape[1], m, d, found.W_enc.shape[1], PARTS=triton.next_power_of_2(parts), BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip


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
        d, more = len(self.b_dec), self.rows.more or (self.rows.W_enc[:0], self.rows.W_dec[:0])
        both = zip((self.rows.W_enc, self.rows.W_dec), more, strict=True)
        W_enc, W_dec = (torch.where(there, torch.cat([G[:, :d], rest[:, :d]])[row], 0) for G, rest in both)
        return Parameters(W_enc, self.rows.b_enc, W_dec, self.b_dec)


class Pass(NamedTuple):
    """One pass backward."""

    rows: Rows
    squared_error: Tensor
    mean_squared_error: Tensor
    """Its mean over the nested prefixes."""
    on_b_dec: Tensor
    """[d], without what comes through the encoder ..."""
    through_encoder: Tensor | None
    """[d]: ... which is to be subtracted. None if it is to be computed from all latents."""


def loss_and_gradients(
    x: Tensor,
    weights: Weights,
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
    done, through_encoder, loss, auxiliary = finished(done, weights, copies, dead, beside, len(x), auxk)
    gradients = RowGradients(done.rows, done.on_b_dec - through_encoder)
    return Outcome(gradients, loss, done.squared_error, auxiliary)


def finished(
    done: Pass,
    weights: Weights,
    copies: Copies,
    dead: Tensor | None,
    beside: DeadPass | None,
    tokens: int,
    auxk: AuxKConfig,
) -> tuple[Pass, Tensor, Tensor, Tensor]:
    """The pass with AuxK's gradients, b_dec's part through the encoder, the loss, and AuxK's."""
    rows, through = done.rows, done.through_encoder
    if beside is not None and dead is not None:
        # A dead latent did not fire on this batch, so it has no gradient yet: nothing is added to another's.
        found, auxiliary = beside.join()
        note_rows_(found, weights.W_dec, dead, rows, len(rows.W_enc))
        rows = rows._replace(more=(found.W_enc, found.W_dec))
        if through is not None:
            through = through + _through_encoder(found.b_enc.sum(0), beside.enc, len(through))
    else:
        auxiliary = torch.zeros((), device=weights.b_dec.device)
    if through is None:
        through = _through_encoder(rows.b_enc, copies.W_enc, len(weights.b_dec))
    done = done._replace(rows=rows._replace(energy=rows.energy.sum()))
    return done, through, torch.add(done.mean_squared_error / tokens, auxiliary, alpha=auxk.alpha), auxiliary


def _through_encoder(b_enc: Tensor, W_enc: Tensor, d: int) -> Tensor:
    """Gradients of biases [n], encoder rows [n, stride] -> what b_dec [d] gets through these, to be subtracted."""
    return product(b_enc.to(W_enc.dtype)[None], W_enc)[0, :d]


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
    return Pass(rows, errors.last, errors.mean, total[:d], None)


def _pool_pass(x: Tensor, weights: Weights, copies: Copies, codes: PoolCodes, beside: DeadPass | None) -> Pass:
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
    found = latent_rows((codes.f, out @ dec.T), (out, copies.x))
    slot = torch.full((m,), -1, dtype=torch.int32, device=x.device)
    rows = Rows(found.W_enc, found.W_dec, slot, torch.zeros(m, device=x.device), torch.zeros(m, 1, device=x.device))
    note_rows_(found, weights.W_dec, latents, rows, first=0)
    through_encoder = _through_encoder(found.b_enc.sum(0), rows_of(copies.W_enc, latents), d)
    return Pass(rows, energy, energy, total[:d], through_encoder)
