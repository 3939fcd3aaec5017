"""TopK: the k largest pre-activations of each token, if they are positive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sampled_sae.method.architectures import ARCHITECTURES, Architecture


class TopK(Architecture):
    per_latent = False
    needs_k = True

    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | slice | None) -> Tensor:
        largest = pre.topk(min(sae.cfg.k, pre.shape[-1]), dim=-1, sorted=False)
        return torch.zeros_like(pre).scatter(-1, largest.indices, largest.values.relu())


ARCHITECTURES.register("topk", TopK(), __name__)
