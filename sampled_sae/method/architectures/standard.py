"""Standard: ReLU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sampled_sae.method.architectures import ARCHITECTURES, Architecture


class Standard(Architecture):
    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | slice | None) -> Tensor:
        return pre.relu_()


ARCHITECTURES.register("standard", Standard(), __name__)
