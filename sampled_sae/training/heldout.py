"""Held-out tokens: calibration of the threshold, FVU, L0 and firing frequency of an SAE.

Codes are selected by the inference threshold, or by training-time selection (pool and cut over a batch).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sampled_sae.method.codes import SparseCodes
from sampled_sae.method.config import Everything, SAEConfig
from sampled_sae.method.parameters import Parameters
from sampled_sae.method.pools import PlainEncoder, candidates
from sampled_sae.method.scores import get_score
from sampled_sae.method.selection import keep_largest, largest
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.ranks import Group

LAST, STEPS = 10**9 - 1, 10**9
"""The last step of a training of any length."""
TINY = torch.finfo(torch.float32).tiny


class Reconstruction(NamedTuple):
    """Reconstruction of some tokens."""

    fvu: float | None
    """Fraction of variance unexplained: sum ||x - x_hat||^2 / sum ||x - mean||^2; None if all tokens are equal."""
    l0: float
    """Mean active latents per token."""
    frequency: Tensor
    """[d_sae]: fraction of the tokens on which each latent fires."""

    @property
    def fve(self) -> float:
        """Fraction of variance explained, 1 - FVU; nan if all tokens are equal."""
        return math.nan if self.fvu is None else 1 - self.fvu


def parameters(sae: SAE) -> Parameters:
    """The SAE's weights as the training step takes them."""
    return Parameters(sae.W_enc.T.detach(), sae.b_enc.detach(), sae.W_dec.detach(), sae.b_dec.detach())


def training_time_codes(sae: SAE, x: Tensor, config: SAEConfig, generator: torch.Generator) -> SparseCodes:
    """Training-time selection as in the last step: pool and cut over the batch x [n, d_in]; JumpReLU has no other."""
    if config.jumprelu is not None:
        return sae.encode_sparse(x)
    if get_score(config.pool.score).learn is not None:  # what it learned is not saved: all latents are the pool
        config = replace(config, pool=replace(config.pool, size=Everything()))
    found = candidates(PlainEncoder(x, parameters(sae)), config, LAST, STEPS, generator)
    return keep_largest(found.z, config.k, found.group, sae.d_sae, found.columns, config.cut)


def by_threshold(
    sae: SAE, x: Tensor, theta: Tensor | None = None, batch_size: int = 4096, ranks: Group | None = None
) -> Reconstruction:
    """Inference on x [n, d_in], with the SAE's own threshold or with `theta` (). `ranks` have its latents in parts."""

    def select(part: Tensor) -> SparseCodes:
        if theta is None:
            return sae.encode_sparse(part)
        return SparseCodes.from_dense(torch.threshold_(sae.pre_activations(part), max(0.0, float(theta)), 0.0))

    return _measure(sae, x, select, batch_size, ranks or Group())


def as_trained(sae: SAE, x: Tensor, batch_size: int, seed: int = 0) -> Reconstruction:
    """Training-time selection over batches of x [n, d_in]."""
    config = sae.cfg.training
    if config is None:
        raise UserError("this SAE has no training configuration: it can only be evaluated by threshold")
    generator = torch.Generator(sae.device).manual_seed(seed)
    whole = len(x) - len(x) % batch_size
    rows = x[:whole] if whole else x
    return _measure(sae, rows, lambda part: training_time_codes(sae, part, config, generator), batch_size, Group())


@torch.no_grad()
def _measure(
    sae: SAE, x: Tensor, select: Callable[[Tensor], SparseCodes], batch_size: int, ranks: Group
) -> Reconstruction:
    mean = x.double().mean(0).to(sae.device, sae.dtype)
    error = variance = torch.zeros((), dtype=torch.float64, device=sae.device)
    fired = torch.zeros(sae.d_sae, dtype=torch.long, device=sae.device)
    for part in x.split(batch_size):
        part = part.to(sae.device, sae.dtype)
        codes = select(part)
        decoded = sae.decode(codes, part)
        if ranks.size > 1:
            decoded = ranks.ordered_sum(decoded - sae.b_dec) + sae.b_dec
        error = error + (part - decoded).square().sum(dtype=torch.float64)
        variance = variance + (part - mean).square().sum(dtype=torch.float64)
        fired += torch.bincount(codes.latent, minlength=sae.d_sae)
    fired = ranks.gather(fired).view(-1)
    fvu = float(error / variance) if variance > 0 else None
    return Reconstruction(fvu, float(fired.sum()) / len(x), fired.double() / len(x))


@torch.no_grad()
def calibrated_threshold(sae: SAE, x: Tensor, k: int, chunk: int = 4096, ranks: Group | None = None) -> float:
    """x [n, d_in] -> theta such that exactly k * n activations of x pass z > theta (0 if fewer are positive).

    `ranks` have the latents of the SAE in parts.

    An SAE with one threshold for each latent has z in units of these, so that theta is their common factor.
    Exact up to ties: each chunk gives its largest values, more than could pass, and theta is the largest
    value that must not pass.
    """
    wanted, spare = k * len(x), 4
    while True:
        values, floor = [], 0.0
        for part in x.split(chunk):
            z = sae.pre_activations(part.to(sae.device))
            z = z / sae.threshold.clamp_min(TINY).to(z.dtype) if sae.threshold.ndim else z
            keep = min(spare * k * len(part), z.numel())
            top = z.view(-1)[largest(z, keep)]
            if len(top) == keep < z.numel():  # this chunk may have more below its smallest
                floor = max(floor, float(top.min()))
            values.append(top)
        everything = torch.cat(values)
        if ranks is not None and ranks.size > 1:
            own = everything.topk(min(wanted + 1, len(everything)), sorted=False).values
            own = torch.nn.functional.pad(own, (0, wanted + 1 - len(own)))  # 0 is no activation
            everything = (every := ranks.gather(own).view(-1))[every > 0]
            floor = float(ranks.gather(torch.tensor(floor, dtype=torch.float64)).max())
        enough = len(everything) > wanted
        theta = float(everything.topk(wanted + 1, sorted=False).values.min()) if enough else 0.0
        if theta >= floor or floor == 0.0:
            # The SAE keeps its threshold in float32: round up, so that the value itself does not pass.
            rounded = np.float32(theta)
            return float(rounded if float(rounded) >= theta else np.nextafter(rounded, np.float32(np.inf)))
        spare *= 4


def fingerprint(x: Tensor) -> str:
    """A short digest of the first 256 rows of x [n, d_in], to tell activations apart."""
    return hashlib.sha256(x[:256].float().cpu().numpy().tobytes()).hexdigest()[:16]
