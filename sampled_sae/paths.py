"""Which way a learner takes through a step: the fast one where its kernels run, the plain one elsewhere."""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from sampled_sae import kernels
from sampled_sae.config import SAEConfig
from sampled_sae.plain import PlainPath
from sampled_sae.selection import Selection
from sampled_sae.step import Moved, Parameters


class Path(Protocol):
    """What `plain.PlainPath` and `kernels.path.FastPath` have in common."""

    name: str

    def select(self, x: Tensor, step: int, pool: Tensor) -> Selection: ...

    def move(self, x: Tensor, selection: Selection, dead: Tensor | None, lr: float) -> Moved: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: dict[str, Tensor]) -> None: ...


def open_path(weights: Parameters, config: SAEConfig, steps: int, generator: torch.Generator) -> Path:
    """The fastest path that runs where the weights are. SAMPLED_SAE_PATH=plain takes the plain one everywhere."""
    if os.environ.get("SAMPLED_SAE_PATH") != "plain" and kernels.usable(weights.b_dec.device, weights.b_dec.dtype):
        from sampled_sae.kernels.path import FastPath

        return FastPath(weights, config, steps, generator)
    return PlainPath(weights, config, steps, generator)
