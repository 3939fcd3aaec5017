"""GroupMax: latents in k groups of neighbors; the largest pre-activation of each group, if it is positive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sampled_sae.method.architectures import ARCHITECTURES, Architecture


class GroupMax(Architecture):
    per_latent = False
    needs_k = True

    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | slice | None) -> Tensor:
        groups = pre.view(len(pre), sae.cfg.k, -1)
        largest = groups.max(dim=-1, keepdim=True)
        return torch.zeros_like(groups).scatter(-1, largest.indices, largest.values.relu()).view_as(pre)


ARCHITECTURES.register("groupmax", GroupMax(), __name__)
