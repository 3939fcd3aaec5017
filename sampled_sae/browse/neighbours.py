"""The nearest latents by decoder cosine, in the same SAE and in another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.browse.summary import NONE
from sampled_sae.evals.similarity.stream import blocks, directions

AT_ONCE = 2**24
"""Cosines held at one time."""


class Neighbours(NamedTuple):
    """The nearest latents of each latent, nearest first."""

    latent: Tensor
    """[m, c] int64; NONE where there are fewer, and for latents without a direction."""
    cosine: Tensor
    """[m, c]; nan where there is none."""

    @property
    def nearest(self) -> Tensor:
        """[m]: the largest cosine; nan where there is none."""
        return self.cosine[:, 0] if self.cosine.shape[1] else torch.full((len(self.cosine),), torch.nan)


@torch.no_grad()
def neighbours(
    decoder: Tensor, other: Tensor | None, count: int, tick: Callable[[int], None] | None = None
) -> Neighbours:
    """Decoder rows [m, d] -> the `count` nearest rows of another decoder [n, d], or of the same one but itself."""
    own = directions(decoder)
    its = own if other is None else directions(other, "other")
    latent = torch.full((len(decoder), count), NONE)
    cosine = torch.full((len(decoder), count), torch.nan)
    for first, block in blocks(own.rows, its.rows, AT_ONCE):
        height = len(block)
        if other is None:
            here = torch.arange(height, device=block.device)
            block[here, here + first] = -torch.inf
        found = block.topk(min(count, block.shape[1]), dim=1)
        rows = own.latent[first : first + height].cpu()
        there = found.values.isfinite().cpu()
        names = torch.where(there, its.latent[found.indices].cpu(), NONE)
        latent[rows, : names.shape[1]] = names
        cosine[rows, : names.shape[1]] = torch.where(there, found.values.cpu().clamp(max=1), torch.nan)
        if tick is not None:
            tick(height)
    return Neighbours(latent, cosine)
