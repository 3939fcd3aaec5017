"""Start values: unit decoder rows, encoder tied to them, b_dec at the data's geometric median."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Parameters(NamedTuple):
    """An SAE's weights, latents as rows in both matrices."""

    W_enc: Tensor
    """[m, d]: the encoder, one row per latent (the transpose of `SAE.W_enc`)."""
    b_enc: Tensor
    """[m]."""
    W_dec: Tensor
    """[m, d], unit rows."""
    b_dec: Tensor
    """[d]."""


def activations(x: Tensor, weights: Parameters, latents: Tensor | None = None) -> Tensor:
    """x [B, d] -> post-ReLU activations [B, n] of the given latents [n], or of all."""
    some = slice(None) if latents is None else latents
    return torch.addmm(weights.b_enc[some], x - weights.b_dec, weights.W_enc[some].T).relu_()


def start_parameters(d: int, m: int, generator: torch.Generator, dtype: torch.dtype) -> Parameters:
    """Random unit directions for the decoder, the same for the encoder, biases 0."""
    # A linear layer's default initialization, which is uniform in +-1/sqrt(fan in); only directions survive.
    bound = 1 / math.sqrt(m)
    device = generator.device
    W_dec = torch.rand(m, d, generator=generator, device=device, dtype=dtype).mul_(2 * bound).sub_(bound)
    unit_rows_(W_dec)
    return Parameters(
        W_enc=W_dec.clone(),
        b_enc=torch.zeros(m, device=device, dtype=dtype),
        W_dec=W_dec,
        b_dec=torch.zeros(d, device=device, dtype=dtype),
    )


def unit_rows_(W: Tensor) -> Tensor:
    """Scale each row of W [m, d] to norm 1, in place."""
    return W.div_(torch.linalg.vector_norm(W, dim=1, keepdim=True) + torch.finfo(W.dtype).eps)


def geometric_median(x: Tensor, rounds: int = 100, tolerance: float = 1e-5) -> Tensor:
    """The point [d] with the smallest sum of distances to the rows of x [B, d] (Weiszfeld's iteration)."""
    guess = x.mean(0)
    for _ in range(rounds):
        # A guess on top of a data point must not divide by zero.
        weight = 1 / torch.linalg.vector_norm(x - guess, dim=1).clamp_min(1e-12)
        previous, guess = guess, (weight / weight.sum()) @ x
        if torch.linalg.vector_norm(guess - previous) < tolerance:
            break
    return guess
