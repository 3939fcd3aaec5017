"""JumpReLU: z where z > threshold and z > 0, else 0. BatchTopK and TopK SAEs trained here use it for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sampled_sae.method.architectures import ARCHITECTURES, Architecture, pick


class JumpReLU(Architecture):
    tensors = ("b_enc", "threshold")

    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | slice | None) -> Tensor:
        cut = sae.cut
        if isinstance(cut, float):
            return torch.threshold_(pre, cut, 0.0)
        return pre.masked_fill_(pre <= pick(cut, latents), 0.0)


ARCHITECTURES.register("jumprelu", JumpReLU(), __name__)
