"""Sparse probing: accuracy of linear probes on a few latents, on all of them, and on the residual stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sampled_sae.evals import Evaluation, Job, Needs, register_evaluation
from sampled_sae.evals.probing.data import check_files
from sampled_sae.evals.probing.evaluate import evaluate_probing_many
from sampled_sae.evals.probing.schema import ProbingConfig, ProbingResult, to_saebench
from sampled_sae.utils.cost import Cost, Workload
from sampled_sae.utils.measures import Metric

CLASSES = 5  # of a dataset, for the estimate of the cost


def _top(k: int) -> Metric:
    latents = "the one latent" if k == 1 else f"the {k} latents"
    return Metric(
        f"probing_{k}",
        f"Probing accuracy, k\u00a0=\u00a0{k}",
        f"Test accuracy of a linear probe on {latents} that differ most between a class and the others; mean "
        "over classes, then datasets.",
        "high",
        ("summary", "top", str(k), "accuracy"),
        headline=k in (1, 5),
        null=0.5,
        brief=f"k\u00a0=\u00a0{k}",
    )


@register_evaluation
class Probing(Evaluation):
    name = "probing"
    title = "Sparse probing"
    note = "Test accuracy: mean over classes, then datasets."
    config = ProbingConfig
    needs = Needs(extras={"datasets": "lm"})
    unit = "texts"
    order = 20
    metrics = (
        *(_top(k) for k in (1, 2, 5, 10)),
        Metric(
            "probing_all",
            "Probing accuracy, all latents",
            "Test accuracy of a linear probe on all latents; mean over classes, then datasets.",
            "high",
            ("summary", "all_latents", "accuracy"),
            null=0.5,
            brief="all latents",
        ),
        Metric(
            "probing_residual",
            "Probing accuracy, residual stream",
            "Test accuracy of a linear probe on the model's residual stream: the baseline, the same for every SAE.",
            None,
            ("summary", "residual", "accuracy"),
            null=0.5,
            brief="residual stream",
        ),
    )

    def check(self, config: ProbingConfig) -> None:
        check_files(config.datasets)

    def files(self, config: ProbingConfig) -> Sequence[str]:
        return config.datasets

    def run(self, job: Job, config: ProbingConfig) -> Iterator[ProbingResult]:
        yield from evaluate_probing_many(job.saes, job.model, job.layer, config, job.progress)

    def cost(self, config: ProbingConfig, work: Workload) -> Cost:
        classes, seeds = CLASSES * len(config.datasets), len(config.seeds)
        tokens = classes * (config.train_texts + config.test_texts) / 2 * seeds * config.tokens
        seconds = work.read(tokens) + work.encode(tokens) + work.speed.probe * classes * (work.saes + 1) * seeds
        return Cost(self.name, seconds, 200_000 * work.saes, 0)

    def to_saebench(self, result: ProbingResult, config: ProbingConfig) -> dict[str, Any]:
        return to_saebench(result, config)
