"""An evaluation: how similar each latent's decoder direction is to that of the nearest other latent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sampled_sae.config import Config, Positive
from sampled_sae.evals import Evaluation, Job, register_evaluation
from sampled_sae.utils.measures import Metric


@dataclass(frozen=True, slots=True)
class RedundancyConfig(Config):
    """Settings; on the command line --redundancy.rows-at-once."""

    rows_at_once: Positive = 1024
    """Latents that are compared with all others at once, without effect on the results."""


class RedundancyResult(NamedTuple):
    """One SAE."""

    nearest_cosine: float
    """Mean over latents of the largest cosine with another latent's decoder row."""


@register_evaluation
class Redundancy(Evaluation):
    name = "redundancy"
    title = "Decoder redundancy"
    note = "Mean over all latents, dead ones included."
    config = RedundancyConfig
    metrics = (
        Metric(
            "nearest_cosine",
            "Cosine with the nearest latent",
            "Mean over latents of the largest cosine of the decoder row with that of another latent.",
            "low",
            ("nearest_cosine",),
            headline=True,
        ),
    )

    def run(self, job: Job, config: RedundancyConfig) -> Iterator[RedundancyResult]:
        for number, sae in enumerate(job.saes, start=1):
            rows = torch.nn.functional.normalize(sae.W_dec.detach(), dim=1)
            nearest = []
            for first, part in zip(
                range(0, len(rows), config.rows_at_once), rows.split(config.rows_at_once), strict=True
            ):
                cosine = part @ rows.T
                cosine.diagonal(first).fill_(-1)  # not with itself
                nearest.append(cosine.amax(dim=1))
            job.progress(number, len(job.saes))
            yield RedundancyResult(float(torch.cat(nearest).mean()))
