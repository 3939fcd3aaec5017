"""The inference threshold, set so that held-out tokens have K active latents on average; how well it does there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sampled_sae.sae import SAE
from sampled_sae.select import largest


@torch.no_grad()
def calibrated_threshold(sae: SAE, x: Tensor, k: int, chunk: int = 4096) -> float:
    """x [n, d] -> theta such that exactly k * n activations of x pass z > theta (0 if fewer are positive).

    Exact up to ties: each chunk gives its largest values, more than could pass, and theta is the largest
    value that must not.
    """
    wanted, spare = k * len(x), 4
    while True:
        values, floor = [], 0.0
        for part in x.split(chunk):
            z = sae.pre_activations(part.to(sae.device))
            keep = min(spare * k * len(part), z.numel())
            top = z.view(-1)[largest(z, keep)]
            if len(top) == keep < z.numel():  # this chunk may have more below its smallest
                floor = max(floor, float(top.min()))
            values.append(top)
        everything = torch.cat(values)
        enough = len(everything) > wanted
        theta = float(everything.topk(wanted + 1, sorted=False).values.min()) if enough else 0.0
        if theta >= floor or floor == 0.0:
            # The SAE keeps its threshold in float32: round up, so that the value itself does not pass.
            rounded = np.float32(theta)
            return float(rounded if rounded >= theta else np.nextafter(rounded, np.float32(np.inf)))
        spare *= 4


class Heldout(NamedTuple):
    """An SAE by its threshold on held-out tokens."""

    fvu: float | None
    """Fraction of variance unexplained; none where the tokens are all the same."""
    l0: float
    """Mean active latents a token."""


@torch.no_grad()
def measure_heldout(sae: SAE, x: Tensor, chunk: int = 4096) -> Heldout:
    """x [n, d] -> what the SAE makes of it; for a threshold calibrated on the same tokens L0 is K."""
    mean = x.double().mean(0)
    error = variance = 0.0
    active = 0
    for part in x.split(chunk):
        codes = sae.encode(part.to(sae.device))
        active += int((codes > 0).sum())
        error += float((part.to(sae.device) - sae.decode(codes)).double().square().sum())
        variance += float((part.double() - mean).square().sum())
    return Heldout(error / variance if variance > 0 else None, active / len(x))
