"""The built-in architectures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sampled_sae.method.architectures import ARCHITECTURES, Architecture, pick


class Standard(Architecture):
    """ReLU."""

    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | slice | None) -> Tensor:
        return pre.relu_()


class JumpReLU(Architecture):
    """z where z > threshold and z > 0, else 0. BatchTopK and TopK SAEs trained here use it for inference."""

    tensors = ("b_enc", "threshold")

    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | slice | None) -> Tensor:
        cut = sae.cut
        if isinstance(cut, float):
            return torch.threshold_(pre, cut, 0.0)
        return pre.masked_fill_(pre <= pick(cut, latents), 0.0)


class TopK(Architecture):
    """The k largest pre-activations of each token, if they are positive."""

    per_latent = False
    needs_k = True

    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | slice | None) -> Tensor:
        largest = pre.topk(min(sae.cfg.k, pre.shape[-1]), dim=-1, sorted=False)
        return torch.zeros_like(pre).scatter(-1, largest.indices, largest.values.relu())


class GroupMax(Architecture):
    """Latents in k groups of neighbors; the largest pre-activation of each group, if it is positive."""

    per_latent = False
    needs_k = True

    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | slice | None) -> Tensor:
        groups = pre.view(len(pre), sae.cfg.k, -1)
        largest = groups.max(dim=-1, keepdim=True)
        return torch.zeros_like(groups).scatter(-1, largest.indices, largest.values.relu()).view_as(pre)


class Gated(Architecture):
    """A gate on pre + b_gate, and a magnitude relu(pre * exp(r_mag) + b_mag) where it is open."""

    tensors = ("b_gate", "r_mag", "b_mag")

    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | slice | None) -> Tensor:
        b_gate, r_mag, b_mag = (pick(getattr(sae, name), latents) for name in self.tensors)
        closed = pre <= -b_gate
        return (pre * r_mag.exp()).add_(b_mag).relu_().masked_fill_(closed, 0.0)


ARCHITECTURES.register("gated", Gated(), __name__)
ARCHITECTURES.register("groupmax", GroupMax(), __name__)
ARCHITECTURES.register("jumprelu", JumpReLU(), __name__)
ARCHITECTURES.register("standard", Standard(), __name__)
ARCHITECTURES.register("topk", TopK(), __name__)
