"""Activations in the units of training, and trained SAEs in those of raw activations: between them is `scale`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sampled_sae.data.stream import ActivationStream, bad_value
from sampled_sae.sae import SAE
from sampled_sae.training.heldout import by_threshold, calibrated_threshold
from sampled_sae.training.jumprelu import PEER_START
from sampled_sae.training.learner import CLOSED, Learner
from sampled_sae.training.settings import InputNorm
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.system import git_commit, versions


def input_scale(x: Tensor, norm: InputNorm) -> float:
    """c such that the rows of x / c, for x [n, d_in], have the given root mean square norm; 1 for no rows."""
    if norm == "none" or not len(x):
        return 1.0
    c = float(x.double().square().sum(dim=1).mean().sqrt())
    if c == 0:
        raise UserError("activations are all zero: there is nothing to train on")
    return c / math.sqrt(x.shape[1]) if norm == "sqrt_d_in" else c


class Inputs:
    """The batches of a stream, divided by `scale`, on the device and in the dtype of training."""

    def __init__(self, stream: ActivationStream, device: torch.device, dtype: torch.dtype):
        self.stream, self.device, self.dtype = stream, device, dtype
        self.scale = 1.0
        self.unchecked: list[tuple[int, Tensor]] = []
        """Steps and the largest value of each row of their batches, on the device."""

    @torch.inference_mode(False)
    def batch(self, step: int, kept: str) -> Tensor:
        """Batch number `step` [batch_size, d_in]. Overflow is checked at once, on a GPU when a line is logged."""
        x = self.stream.batch(step).to(self.device, self.dtype) / self.scale
        self.unchecked.append((step, torch.linalg.vector_norm(x, torch.inf, dim=1)))
        if self.device.type == "cpu" or len(self.unchecked) == 256:
            self.check(kept)
        return x

    def check(self, kept: str) -> None:
        """Raise if a value in a batch since the last check is too large to be squared; this waits for the GPU.

        `kept` ends the error: what is left of the run.
        """
        batches, self.unchecked = self.unchecked, []
        limit = max(1e3, torch.finfo(self.dtype).max ** 0.5 / 1e3)  # room for sums of squares
        largest = torch.stack([values.max() for _, values in batches]).tolist() if batches else []
        for (step, values), worst in zip(batches, largest, strict=True):
            if not worst <= limit:
                position = int((~(values <= limit)).nonzero()[0])
                row = self.stream.row(step, position)
                error = bad_value(float(values[position]) * self.scale, f"activations: batch {step}", row)
                raise UserError(f"{error}{kept}")


def finished(
    learner: Learner,
    heldout: Tensor,
    batch_size: int,
    scale: float,
    seconds: float,
    training: Mapping[str, Any],
    stream: Mapping[str, Any],
) -> SAE:
    """Calibrate the threshold on `heldout` [n, d_in] and fold the input's scale into the weights.

    `training` are the settings of the run and `stream` the metadata of its activations, which are saved with the SAE.
    """
    part, ranks, measured = learner.part().rescale_(scale), learner.shard.ranks, None
    if len(heldout):
        if (closed := learner.closed()) is not None:
            part.threshold = torch.where(closed, CLOSED, 1.0)
        elif part.threshold.ndim:  # dictionary_learning's may fall below 0, where no factor could raise them
            part.threshold = torch.where(part.threshold > 0, part.threshold, PEER_START * scale)
        theta = calibrated_threshold(part, heldout, learner.config.k, batch_size, ranks)
        if closed is not None:
            part.threshold = torch.where(closed, CLOSED, theta)
        else:
            part.threshold.mul_(theta) if part.threshold.ndim else part.threshold.fill_(theta)
        measured = by_threshold(part, heldout, batch_size=batch_size, ranks=ranks)
    sae = learner.joined(part)
    sae.cfg.metadata.update(stream)
    sae.cfg.metadata["training"] = {
        **training,
        "scale": scale,
        "seconds": seconds,
        "path": learner.path.name,
        "dead": float(learner.dead_share()),
        "ever_pooled": float(learner.ever_pooled.float().mean()),
        "heldout_tokens_used": len(heldout),
        "heldout": measured and {"fvu": measured.fvu, "l0": measured.l0},
        "versions": versions(),
        "git_commit": git_commit(),
    }
    return sae
