"""The inference threshold, set so that held-out tokens have K active latents on average."""

from __future__ import annotations

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
