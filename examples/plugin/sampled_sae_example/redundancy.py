"""An evaluation: how similar each latent's decoder direction is to that of the nearest other latent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.config import Config, Positive
from sampled_sae.evals import Evaluation, Progress, register_evaluation
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
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

    def run(
        self,
        saes: Sequence[SAE],
        model: LanguageModel,
        layer: int,
        contexts: Tensor | None,
        config: RedundancyConfig,
        progress: Progress,
    ) -> Iterator[RedundancyResult]:
        for number, sae in enumerate(saes, start=1):
            rows = torch.nn.functional.normalize(sae.W_dec.detach(), dim=1)
            nearest = []
            for first, part in zip(
                range(0, len(rows), config.rows_at_once), rows.split(config.rows_at_once), strict=True
            ):
                cosine = part @ rows.T
                cosine.diagonal(first).fill_(-1)  # not with itself
                nearest.append(cosine.amax(dim=1))
            progress(number, len(saes))
            yield RedundancyResult(float(torch.cat(nearest).mean()))
