"""Evaluations of benchmarks/quality.py: for several SAEs of one layer, what goes into the line of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sampled_sae.evals.absorption.evaluate import evaluate_absorption_many
from sampled_sae.evals.absorption.schema import AbsorptionConfig
from sampled_sae.evals.core.evaluate import evaluate_core_many
from sampled_sae.evals.core.schema import CoreConfig
from sampled_sae.evals.probing.evaluate import evaluate_probing_many
from sampled_sae.evals.probing.schema import ProbingConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE

Line = dict[str, Any]


def losses(saes: Sequence[SAE], model: LanguageModel, layer: int, contexts: Tensor, limit: float) -> list[Line]:
    """CE loss recovered over contexts [n, length]; tokens with a norm above the limit keep their activations."""
    config = CoreConfig(put_in="normal", norm_limit=limit, contexts_at_once=16, tokens_at_once=4096, resamples=0)
    lines = []
    for r in evaluate_core_many(saes, model, layer, contexts, config):
        assert r.loss is not None
        line = {"ce_recovered": r.loss.ce_recovered.value, "ce_sae": r.loss.ce_sae.value}
        lines.append(line | {"ce_model": r.loss.ce_model.value, "kl_recovered": r.loss.kl_recovered.value})
    return lines


def probing(saes: Sequence[SAE], model: LanguageModel, layer: int, datasets: Sequence[str]) -> list[Line]:
    """Accuracy of probes on 1 and 5 latents, the mean over datasets, and on the residual stream."""
    config = ProbingConfig(datasets=tuple(datasets), k=(1, 5), all_latents=False)
    lines = []
    for p in evaluate_probing_many(saes, model, layer, config):
        accuracy = {str(k): one.accuracy.mean for k, one in p.summary.top.items()}
        lines.append({"probing": accuracy, "probing_residual": p.summary.residual.accuracy.mean})
    return lines


def absorption(saes: Sequence[SAE], model: LanguageModel, layer: int, words: int | None) -> list[Line]:
    """Absorption of first letters; `words` None: all words of the vocabulary."""
    lines = []
    for b in evaluate_absorption_many(saes, model, layer, AbsorptionConfig(max_words=words)):
        line = {"absorption": b.fraction and b.fraction.mean, "full_absorption": b.full and b.full.mean}
        lines.append(line | {"main_f1": b.main_f1 and b.main_f1.mean, "letters": b.usable_letters})
    return lines
