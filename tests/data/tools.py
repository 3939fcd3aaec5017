"""Small harvests of tiny models."""

from collections.abc import Iterable
from typing import Any

from sampled_sae.data.buffer import HarvestConfig
from sampled_sae.data.model_source import ModelActivations
from sampled_sae.data.text import TextList
from sampled_sae.models.language_model import LanguageModel

SMALL = {"context": 20, "skip_first": 8, "high_norm_factor": None}  # behind eight others, no two tokens look the same


def harvest(hooks: tuple[int | str, ...], **settings: Any) -> HarvestConfig:
    return HarvestConfig(hooks=hooks, **SMALL | settings)


def open_harvest(
    model: LanguageModel,
    documents: Iterable[str],
    config: HarvestConfig,
    batch_size: int = 30,
    heldout_tokens: int = 65_536,
    seed: int = 0,
    progress: bool = False,
    steps: int | None = None,
) -> dict[str, Any]:
    source = ModelActivations(model, TextList(tuple(documents)), config, progress)
    return dict(source.open(batch_size, heldout_tokens, seed, steps))
