"""Batches of a stream in the units of training, with a check for values that are too large."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sampled_sae.data.stream import ActivationStream, bad_value
from sampled_sae.utils.errors import UserError


class Inputs:
    """The batches of a stream, divided by `scale`, on the device and in the dtype of training."""

    def __init__(self, stream: ActivationStream, device: torch.device, dtype: torch.dtype, kept: Callable[[], str]):
        """`kept` says what is left of the run when a batch cannot be trained on."""
        self.stream, self.device, self.dtype, self.kept = stream, device, dtype, kept
        self.scale = 1.0
        self.unchecked: list[tuple[int, Tensor]] = []
        """Steps and the largest value of each row of their batches, on the device."""

    @torch.inference_mode(False)
    def batch(self, step: int) -> Tensor:
        """Batch number `step` [batch_size, d_in]. Overflow is checked at once, on a GPU when a line is logged."""
        x = self.stream.batch(step).to(self.device, self.dtype) / self.scale
        self.unchecked.append((step, torch.linalg.vector_norm(x, torch.inf, dim=1)))
        if self.device.type == "cpu" or len(self.unchecked) == 256:
            self.check()
        return x

    def check(self) -> None:
        """Raise if a value in a batch since the last check is too large to be squared; this waits for the GPU."""
        batches, self.unchecked = self.unchecked, []
        limit = max(1e3, torch.finfo(self.dtype).max ** 0.5 / 1e3)  # room for sums of squares
        largest = torch.stack([values.max() for _, values in batches]).tolist() if batches else []
        for (step, values), worst in zip(batches, largest, strict=True):
            if not worst <= limit:
                position = int((~(values <= limit)).nonzero()[0])
                row = self.stream.row(step, position)
                error = bad_value(float(values[position]) * self.scale, f"activations: batch {step}", row)
                raise UserError(f"{error}{self.kept()}")
