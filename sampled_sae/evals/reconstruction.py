"""How well an SAE reconstructs: FVE, L0 and firing frequency, by threshold or as in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.candidates import PlainEncoder, candidates
from sampled_sae.codes import Codes, decode
from sampled_sae.errors import UserError
from sampled_sae.sae import SAE
from sampled_sae.step import Parameters, activations, keep_largest


class Reconstruction(NamedTuple):
    """Measured over all tokens given."""

    fve: float
    """Fraction of variance explained: 1 - sum ||x - x_hat||^2 / sum ||x - mean||^2, the mean over all tokens."""
    l0: float
    """Mean active latents a token."""
    frequency: Tensor
    """[m] share of the tokens on which each latent fires."""


def parameters(sae: SAE) -> Parameters:
    """The SAE's weights as the training step knows them."""
    return Parameters(sae.W_enc_rows.detach(), sae.b_enc.detach(), sae.W_dec.detach(), sae.b_dec.detach())


def by_threshold(sae: SAE, x: Tensor, theta: Tensor | None = None, batch_size: int = 4096) -> Reconstruction:
    """Inference: keep z > theta (the SAE's own threshold by default) on x [n, d]."""
    weights = parameters(sae)
    cut = sae.threshold if theta is None else theta

    def select(part: Tensor) -> Codes:
        z = activations(part, weights)
        token, latent = (z > cut).nonzero(as_tuple=True)
        return Codes(token, latent, z[token, latent], len(part), sae.m)

    return _measure(sae, x, select, batch_size)


def as_trained(sae: SAE, x: Tensor, batch_size: int, seed: int = 0) -> Reconstruction:
    """Training's own selection, as in its last step: pool and cut over batches of x [n, d]."""
    if sae.config is None:
        raise UserError("this SAE has no training configuration: it can only be evaluated by threshold")
    config, weights = sae.config, parameters(sae)
    generator = torch.Generator(sae.device).manual_seed(seed)

    def select(part: Tensor) -> Codes:
        found = candidates(PlainEncoder(part, weights), config, 10**9 - 1, 10**9, generator)
        return keep_largest(found.z, config.k, found.group, sae.m, found.columns, config.cut)

    whole = len(x) - len(x) % batch_size
    return _measure(sae, x[:whole] if whole else x, select, batch_size)


@torch.no_grad()
def _measure(sae: SAE, x: Tensor, select: Callable[[Tensor], Codes], batch_size: int) -> Reconstruction:
    mean = x.double().mean(0).to(sae.device, sae.dtype)
    error = variance = torch.zeros((), dtype=torch.float64, device=sae.device)
    fired = torch.zeros(sae.m, dtype=torch.long, device=sae.device)
    for part in x.split(batch_size):
        part = part.to(sae.device, sae.dtype)
        codes = select(part)
        x_hat = decode(codes, sae.W_dec) + sae.b_dec
        error = error + (part - x_hat).square().sum(dtype=torch.float64)
        variance = variance + (part - mean).square().sum(dtype=torch.float64)
        fired += torch.bincount(codes.latent, minlength=sae.m)
    l0 = float(fired.sum()) / len(x)
    return Reconstruction(float(1 - error / variance), l0, fired.double() / len(x))
