"""Gated: a gate on pre + b_gate, and a magnitude relu(pre * exp(r_mag) + b_mag) where it is open."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sampled_sae.method.architectures import ARCHITECTURES, Architecture, pick


class Gated(Architecture):
    tensors = ("b_gate", "r_mag", "b_mag")

    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | slice | None) -> Tensor:
        b_gate, r_mag, b_mag = (pick(getattr(sae, name), latents) for name in self.tensors)
        closed = pre <= -b_gate
        return (pre * r_mag.exp()).add_(b_mag).relu_().masked_fill_(closed, 0.0)


ARCHITECTURES.register("gated", Gated(), __name__)
