"""Standard: ReLU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sampled_sae.method.architectures import Architecture


class Standard(Architecture):
    name = "standard"

    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | None) -> Tensor:
        return pre.relu_()


ARCHITECTURE = Standard()
