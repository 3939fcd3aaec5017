"""One training step's loss and gradients, by hand, so that only the encoder's product is dense."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.codes import Codes, by_latent, decode_with_pullback, sum_by_latent, total_by_latent, value_gradient
from sampled_sae.select import largest_of_rows


class Parameters(NamedTuple):
    """An SAE's weights, latents as rows in both matrices."""

    W_enc: Tensor
    """[m, d]: the encoder, one row a latent (the transpose of `SAE.W_enc`)."""
    b_enc: Tensor
    """[m]."""
    W_dec: Tensor
    """[m, d], unit rows."""
    b_dec: Tensor
    """[d]."""


class Outcome(NamedTuple):
    """What a step computed: gradients, and what its log and its counters need."""

    gradients: Any
    """`Parameters`, or whatever the path's own optimiser takes."""
    loss: Tensor
    """Reconstruction plus alpha times AuxK."""
    error: Tensor
    """Sum of squared errors over the batch."""
    auxk: Tensor
    """The auxiliary loss before its weight."""


class Moved(NamedTuple):
    """What a step's log needs to know once the weights have moved."""

    loss: Tensor
    error: Tensor
    auxk: Tensor
    norm: Tensor
    """Of the gradient, before clipping."""


def activations(x: Tensor, weights: Parameters, latents: Tensor | None = None) -> Tensor:
    """x [B, d] -> post-ReLU activations [B, n] of the given latents [n], or of all."""
    some = slice(None) if latents is None else latents
    return torch.addmm(weights.b_enc[some], x - weights.b_dec, weights.W_enc[some].T).relu_()


def keep_largest(z: Tensor, k: int, group: int, latents: int, columns: Tensor | None, cut: str) -> Codes:
    """The cut: of each group of tokens of z [B, n] the k*group largest (or of each token the k largest).

    `columns` [n] says which latents the columns of z are; none means all of them.
    """
    tokens, width = z.shape
    rows = tokens if cut == "token" else tokens // group
    flat = largest_of_rows(z.view(rows, -1), k * tokens // rows)
    column = flat % width
    latent = column if columns is None else columns[column]
    return Codes(flat // width, latent, z.view(-1)[flat], tokens, latents)


def loss_and_gradients(
    x: Tensor, weights: Parameters, codes: Codes, dead: Tensor | None, alpha: float, k_aux: int
) -> Outcome:
    """x [B, d], the kept codes and the numbers of the dead latents [n_dead] -> loss and all gradients."""
    tokens = len(x)
    decoded, leaf = decode_with_pullback(codes, weights.W_dec)
    with torch.no_grad():
        error = x - weights.b_dec - decoded.detach()
        energy = error.square().sum()
        out = error * (-2 / tokens)  # the loss's gradient for x_hat
    on_value = value_gradient(decoded, leaf, out)
    with torch.no_grad():
        groups = by_latent(codes)
        gradients = Parameters(
            W_enc=sum_by_latent(groups, on_value, x - weights.b_dec),
            b_enc=total_by_latent(groups, on_value),
            W_dec=sum_by_latent(groups, codes.value, out),
            b_dec=out.sum(0),
        )
        auxk = x.new_zeros(())
        if dead is not None and alpha > 0:
            auxk = add_auxk(gradients, x, weights, error, dead, alpha, k_aux)
        # b_dec is also subtracted before encoding; through there it feels every latent's bias gradient.
        gradients.b_dec.sub_(gradients.b_enc @ weights.W_enc)
        return Outcome(gradients, energy / tokens + alpha * auxk, energy, auxk)


def add_auxk(
    gradients: Parameters,
    x: Tensor,
    weights: Parameters,
    error: Tensor,
    dead: Tensor,
    alpha: float,
    k_aux: int,
) -> Tensor:
    """Add AuxK's gradients in place and return its loss. Only the dead latents [n_dead] are encoded.

    For each token the k_aux strongest dead latents predict the error, which gets no gradient itself.
    """
    W_dec = weights.W_dec[dead]
    z = activations(x, weights, dead)
    if k_aux < len(dead):
        top = z.topk(k_aux, dim=1, sorted=False)
        z = torch.zeros_like(z).scatter_(1, top.indices, top.values)
    left = error - z @ W_dec
    variance = (error - error.mean(0)).square().sum()
    if variance == 0:  # nothing to explain: the ratio is undefined and counts as 0
        return variance
    out = left * (-2 * alpha / variance)
    on_z = (out @ W_dec.T).mul_(z > 0)
    gradients.W_dec.index_add_(0, dead, z.T @ out)
    gradients.W_enc.index_add_(0, dead, on_z.T @ (x - weights.b_dec))
    gradients.b_enc.index_add_(0, dead, on_z.sum(0))
    return left.square().sum() / variance
