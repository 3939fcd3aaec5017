"""The weights: their values before the first step, the encoder's affine map, the scale of their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.method.config import OptimizerConfig
from sampled_sae.method.latents import WHOLE, Shard


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


class JumpReLUParameters(NamedTuple):
    """The same with what decides the thresholds."""

    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor
    threshold: Tensor
    """[m]: logarithms of the thresholds, or the thresholds themselves (see `JumpReLUConfig.variant`)."""


Weights = Parameters | JumpReLUParameters


def activations(x: Tensor, weights: Weights, latents: Tensor | None = None) -> Tensor:
    """x [B, d] -> post-ReLU activations [B, n] of the given latents [n], or of all."""
    some = slice(None) if latents is None else latents
    return torch.addmm(weights.b_enc[some], x - weights.b_dec, weights.W_enc[some].T).relu_()


def start_parameters(
    d: int,
    m: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    encoder_scale: float = 1.0,
    shard: Shard = WHOLE,
) -> Parameters:
    """Random unit directions for the decoder, `encoder_scale` times the same for the encoder, biases 0.

    With latents over ranks, the rows of this rank's latents.
    """
    # A linear layer's default initialization, which is uniform in +-1/sqrt(fan in); only directions survive.
    bound = 1 / math.sqrt(m)
    W_dec = torch.empty(m // shard.number, d, device=generator.device, dtype=dtype)
    draw_rows_(W_dec, lambda rows: rows.uniform_(generator=generator), shard)
    unit_rows_(W_dec.mul_(2 * bound).sub_(bound))
    return Parameters(
        W_enc=W_dec * encoder_scale,
        b_enc=W_dec.new_zeros(len(W_dec)),
        W_dec=W_dec,
        b_dec=W_dec.new_zeros(d),
    )


def draw_rows_(W: Tensor, draw_: Callable[[Tensor], Tensor], shard: Shard) -> None:
    """Fill W [n, d], this rank's rows, with what `draw_` would give them in one call for the rows of all ranks."""
    if shard.number == 1:
        draw_(W)
        return
    total, flat, own = shard.number * W.numel(), W.view(-1), shard.index * W.numel()
    unit, start = _in_step(W.device), 0
    size = unit * max(1, DRAWN // unit)
    while start < total:
        stop = total if total - start < size + 16 else start + size
        drawn = draw_(W.new_empty(stop - start))
        first, last = max(start, own), min(stop, own + len(flat))
        if first < last:
            flat[first - own : last - own] = drawn[first - start : last - start]
        start = stop


DRAWN = 2**22
"""Numbers drawn at once, most of which are for other ranks."""


def _in_step(device: torch.device) -> int:
    """So many numbers, or a multiple, can be drawn by themselves before the others without a change of any.

    A CPU draws one after the other, normal ones by 16; on a GPU all threads draw four each at a time.
    """
    if device.type != "cuda":
        return 16
    about = torch.cuda.get_device_properties(device)
    return 4 * int(about.multi_processor_count) * int(about.max_threads_per_multi_processor)


def fit_to_batch_(
    weights: Weights, x: Tensor, decoder: str, encoder_scale: float, generator: torch.Generator, shard: Shard = WHOLE
) -> None:
    """What depends on the first batch x [B, d]: b_dec, and the decoder's directions if they follow the covariance."""
    weights.b_dec.copy_(geometric_median(x))
    if decoder == "covariance":
        draw_rows_(weights.W_dec, lambda rows: rows.normal_(generator=generator), shard)
        weights.W_dec.copy_(weights.W_dec @ quarter_power(covariance(x)).to(weights.W_dec))
        unit_rows_(weights.W_dec)
        torch.mul(weights.W_dec, encoder_scale, out=weights.W_enc)


def covariance(x: Tensor) -> Tensor:
    """x [B, d] -> [d, d], in 32 bits or more."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(0)
    return centered.T @ centered / len(x)


EIGENVALUE_FLOOR = 1e-6
"""Smallest eigenvalue of a covariance, relative to the mean: a batch of few tokens leaves directions without any."""


def quarter_power(C: Tensor) -> Tensor:
    """C^(1/4) of a covariance [d, d]. Rows g C^(1/4) of standard normal rows g have the covariance C^(1/2)."""
    values, vectors = torch.linalg.eigh(C if C.device.type in ("cpu", "cuda") else C.cpu())
    floor = EIGENVALUE_FLOOR * values.mean() + torch.finfo(C.dtype).tiny
    return (vectors * values.maximum(floor).pow(0.25)) @ vectors.T


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


LEAST_SHARE = 0.1
"""Cautious steps: the elements that move take at most 1/0.1 times Adam's step."""


def gradient_factor(norm: Tensor, parameters: int, config: OptimizerConfig) -> Tensor:
    """Factor [] of a gradient with this norm [] over so many parameters.

    Normalized, the elements have a root mean square of 1, so that Adam's eps is far below them. A gradient of zeros
    stays zero, and one that is not finite still shows in the weights.
    """
    if config.clip is not None:
        return (config.clip / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(norm > 0, math.sqrt(parameters) / norm, 0)
