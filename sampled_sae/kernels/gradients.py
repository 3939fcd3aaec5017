"""Loss and gradients on a GPU, for sparse codes and for codes of a small pool, with AuxK."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.kernels.blocks import cut_into_blocks
from sampled_sae.kernels.cut import Kept
from sampled_sae.kernels.encoder import encode_some, padded
from sampled_sae.kernels.masked import mask_
from sampled_sae.kernels.products import product
from sampled_sae.kernels.rows import cut_rows
from sampled_sae.kernels.sparse import Groups, Rows, decode_error, gradient_rows, value_gradient
from sampled_sae.step import Parameters


class SparseCodes(NamedTuple):
    """Kept values as two lists, by token and by latent."""

    x16: Tensor
    """[B, stride]: the batch less b_dec, in 16 bits."""
    kept: Kept
    latent: Tensor
    """[n] int32: whose each value is, m where there is none."""
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


class Pass(NamedTuple):
    """One pass backward."""

    rows: Rows
    out: Tensor
    """[B, stride] 16-bit: the gradient of the reconstruction."""
    squared_error: Tensor
    on_b_dec: Tensor
    """[d]."""


def sparse_pass(x: Tensor, weights: Parameters, copies: Copies, codes: SparseCodes) -> Pass:
    """x [B, d] and its codes -> gradients, without those of AuxK."""
    d = x.shape[1]
    out, energy = decode_error(x, weights.b_dec, copies.W_dec, codes.latent, codes.kept, -2 / len(x))
    on_value = value_gradient(out, copies.W_dec, codes.latent, codes.kept, d)
    rows = gradient_rows(copies.x, out, codes.groups, on_value, d)
    through_encoder = product(rows.b_enc.to(out.dtype)[None], copies.W_enc)[0, :d]
    return Pass(rows, out, energy, out.sum(0, dtype=torch.float32)[:d] - through_encoder)


def pool_pass(x: Tensor, weights: Parameters, copies: Copies, codes: PoolCodes) -> Pass:
    """The same for a small pool: products over all its B x P values, kept or not."""
    d, m = x.shape[1], len(weights.b_enc)
    W_dec = copies.W_dec[padded(codes.columns)]
    error = x - weights.b_dec - product(codes.f, W_dec)[:, :d]
    out = torch.zeros_like(copies.x)
    out[:, :d] = error * (-2 / len(x))
    own = _own_rows(out, W_dec, codes.f, weights, copies, codes.columns)
    slot = torch.full((m,), -1, dtype=torch.int32, device=x.device)
    slot[codes.columns] = torch.arange(len(codes.columns), dtype=torch.int32, device=x.device)
    b_enc = torch.zeros(m, device=x.device).index_copy_(0, codes.columns, own.b_enc)
    on_b_dec = out.sum(0, dtype=torch.float32)[:d] - own.through_encoder
    return Pass(Rows(own.W_enc, own.W_dec, slot, b_enc, own.energy), out, error.square().sum(), on_b_dec)


def with_auxk(
    done: Pass, x: Tensor, weights: Parameters, copies: Copies, dead: Tensor, alpha: float, k_aux: int
) -> tuple[Pass, Tensor]:
    """Add AuxK's gradients; only the dead latents [n_dead] are encoded. Returns its loss too.

    A dead latent did not fire on this batch, so it has no gradient yet: its rows are put, not added.
    """
    d, latents = x.shape[1], padded(dead)
    W_dec = copies.W_dec[latents]
    f = encode_some(copies.x, copies.W_enc, weights.b_enc.to(W_dec.dtype), latents, len(dead))
    cut_rows(cut_into_blocks(f, k_aux), k_aux, dense=True)
    error = done.out[:, :d].float() * (-len(x) / 2)
    left = error - product(f, W_dec)[:, :d]
    variance = (error - error.mean(0)).square().sum()
    share = torch.where(variance > 0, 1 / variance, 0)  # nothing to explain counts as 0
    out = torch.zeros_like(copies.x)
    out[:, :d] = left * (-2 * alpha * share)
    own = _own_rows(out, W_dec, f, weights, copies, dead)
    rows = _put(done.rows, dead, own)
    return done._replace(rows=rows, on_b_dec=done.on_b_dec - own.through_encoder), left.square().sum() * share


class _Own(NamedTuple):
    """Gradients of some latents [n] alone."""

    W_enc: Tensor
    W_dec: Tensor
    b_enc: Tensor
    energy: Tensor
    through_encoder: Tensor
    """[d]: what b_dec feels of it before encoding."""


def _own_rows(out: Tensor, W_dec: Tensor, f: Tensor, weights: Parameters, copies: Copies, latents: Tensor) -> _Own:
    """Gradients of the latents [n] with codes f [B, padded n], from that of the reconstruction, `out` [B, stride]."""
    n, d = len(latents), weights.W_dec.shape[1]
    on_f = out @ W_dec.T
    b_enc = mask_(on_f, f)[:n]
    G_enc = product(on_f.T, copies.x)[:n, :d].contiguous()
    G_dec = product(f.T, out)[:n, :d].contiguous()
    along = (G_dec * weights.W_dec[latents]).sum(1)
    energy = G_enc.square().sum() + G_dec.square().sum() - along.square().sum() + b_enc.square().sum()
    through_encoder = product(b_enc.to(out.dtype)[None], copies.W_enc[latents])[0, :d]
    return _Own(G_enc, G_dec, b_enc, energy, through_encoder)


def _put(rows: Rows, latents: Tensor, own: _Own) -> Rows:
    """Rows with those of further latents [n]."""
    b_enc, energy = rows.b_enc.index_copy_(0, latents, own.b_enc), rows.energy + own.energy
    if len(rows.W_enc) == len(b_enc):  # every latent has its row already
        rows.W_enc.index_copy_(0, latents, own.W_enc)
        rows.W_dec.index_copy_(0, latents, own.W_dec)
        slot = rows.slot.index_copy_(0, latents, latents.to(torch.int32))
        return Rows(rows.W_enc, rows.W_dec, slot, b_enc, energy)
    first = len(rows.W_enc)
    numbers = torch.arange(first, first + len(latents), dtype=torch.int32, device=latents.device)
    slot = rows.slot.index_copy_(0, latents, numbers)
    return Rows(torch.cat([rows.W_enc, own.W_enc]), torch.cat([rows.W_dec, own.W_dec]), slot, b_enc, energy)
