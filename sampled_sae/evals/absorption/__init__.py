"""Absorption by the first-letter task: how often other latents fire in place of the letter's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sampled_sae.evals import Evaluation, Job, register_evaluation
from sampled_sae.evals.absorption.evaluate import evaluate_absorption_many
from sampled_sae.evals.absorption.schema import AbsorptionConfig, AbsorptionResult, to_saebench
from sampled_sae.utils.cost import Cost, Workload
from sampled_sae.utils.measures import Metric

WORDS = 40_000  # approximate number of words of ASCII letters in a tokenizer's vocabulary


@register_evaluation
class Absorption(Evaluation):
    name = "absorption"
    title = "Absorption"
    note = "Mean over the usable letters."
    config = AbsorptionConfig
    unit = "words"
    order = 30
    one_by_one = True
    metrics = (
        Metric(
            "absorption",
            "Absorption fraction",
            "Fraction of a first letter's direction that latents other than its main ones carry; mean over words, then "
            "letters.",
            "low",
            ("fraction",),
            headline=True,
        ),
        Metric(
            "absorption_full",
            "Full absorption",
            "Share of words at which the letter's main latents do not fire and one other latent takes over.",
            "low",
            ("full",),
        ),
        Metric(
            "absorption_f1",
            "F1 of main latents",
            "F1 of probes on the main latents of each letter; where it is low, the absorption fraction means little.",
            "high",
            ("main_f1",),
            null=0.0,
            brief="F1",
        ),
        Metric(
            "absorption_splits",
            "Main latents per letter",
            "Number of latents needed to predict a first letter; 1 where no letter is split.",
            "low",
            ("splits",),
            digits=2,
            unit="latents per letter",
        ),
        Metric(
            "absorption_letters",
            "Usable letters",
            "Letters of 26 that a probe finds in the residual stream at this layer; absorption counts these alone.",
            None,
            ("usable_letters",),
            digits=0,
            unit="letters",
        ),
    )

    def run(self, job: Job, config: AbsorptionConfig) -> Iterator[AbsorptionResult]:
        return evaluate_absorption_many(job.saes, job.model, job.layer, config, job.progress)

    def cost(self, config: AbsorptionConfig, work: Workload) -> Cost:
        """Prompts of about eight tokens per line; test words are read twice."""
        words = min(WORDS, config.max_words or WORDS)
        tokens = words * (2 - config.train_share) * (8 * config.lines + 3)
        probes = work.speed.word * words * work.d_sae * work.saes
        return Cost(self.name, work.read(tokens) + work.encode(2 * words) + probes, 200_000 * work.saes, 0)

    def to_saebench(self, result: AbsorptionResult, config: AbsorptionConfig) -> dict[str, Any]:
        return to_saebench(result, config)
