"""The SAE of a finished training: calibrated, in the units of raw activations, with what is known about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sampled_sae.sae import SAE
from sampled_sae.training.heldout import by_threshold, calibrated_threshold
from sampled_sae.training.learner import Learner
from sampled_sae.utils.system import git_commit, versions


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
        theta = calibrated_threshold(part, heldout, learner.config.k, batch_size, ranks)
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
