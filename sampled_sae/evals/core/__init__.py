"""Core evaluation: reconstruction, density of the latents, and the model's loss with the reconstruction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sampled_sae.evals import Contexts, Evaluation, Job, Needs, register_evaluation
from sampled_sae.evals.core.evaluate import evaluate_core_many
from sampled_sae.evals.core.schema import CoreConfig, CoreResult, special_tokens, to_saebench
from sampled_sae.evals.reading import skipped
from sampled_sae.evals.results import save_firing
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.cost import Cost, Workload
from sampled_sae.utils.measures import Metric

FVU = Metric(
    "fvu",
    "FVU",
    "Fraction of variance unexplained at the inference threshold, without high-norm tokens: 0 is perfect, 1 is no "
    "better than the mean.",
    "low",
    ("normal", "fvu"),
    headline=True,
    null=1.0,
    evaluation="core",
)


def contexts_at_once(model: LanguageModel, context: int) -> int:
    """Contexts of so many tokens in one pass: on a GPU, 16-bit logits take a twelfth of its memory at most."""
    if model.device.type != "cuda":
        return 4
    room = torch.cuda.get_device_properties(model.device).total_memory // 12
    return max(1, min(64, room // (2 * context * model.vocabulary)))


@register_evaluation
class Core(Evaluation):
    name = "core"
    title = "Reconstruction and model loss"
    note = (
        "At the inference threshold, without high-norm tokens unless marked otherwise; 95% intervals over contexts. "
        "Measured on the evaluation text; training prints the FVU of held-out tokens of its own text."
    )
    config = CoreConfig
    needs = Needs(text=True)
    unit = "contexts"
    order = 10
    definition = 2  # densities once counted the high-norm tokens
    columns = ("fvu", "fvu_all", "l0", "cosine", "ce_recovered", "kl_recovered", "alive", "over_10_percent")
    metrics = (
        FVU,
        Metric(
            "fvu_all",
            "FVU, all tokens",
            "Fraction of variance unexplained at the inference threshold, over all measured tokens, high-norm tokens "
            "included.",
            "low",
            ("measured", "fvu"),
            null=1.0,
        ),
        Metric(
            "fvu_trained",
            "FVU, training-time selection",
            "Fraction of variance unexplained with the training-time selection, where a batch shares pool and budget.",
            "low",
            ("trained", "fvu"),
            null=1.0,
        ),
        Metric(
            "l0",
            "L0",
            "Mean active latents per token at the inference threshold, which should equal K.",
            None,
            ("normal", "l0"),
            digits=1,
            unit="latents per token",
        ),
        Metric(
            "cosine", "Cosine", "Mean cosine of an activation and its reconstruction.", "high", ("normal", "cosine")
        ),
        Metric(
            "explained_legacy",
            "Explained variance (SAEBench)",
            "SAEBench's legacy measure: mean over tokens of each token's own explained variance.",
            "high",
            ("normal", "explained_variance_legacy"),
            null=0.0,
        ),
        Metric(
            "ce_recovered",
            "CE recovered",
            "Fraction of the zero-ablation CE loss recovered by the reconstruction.",
            "high",
            ("loss", "ce_recovered"),
            headline=True,
            null=0.0,
        ),
        Metric(
            "kl_recovered",
            "KL recovered",
            "Fraction of the zero-ablation KL divergence from the model's own predictions that the reconstruction "
            "recovers.",
            "high",
            ("loss", "kl_recovered"),
            null=0.0,
        ),
        Metric(
            "alive",
            "Alive",
            "Share of latents that fire on the held-out text, without high-norm tokens.",
            "high",
            ("density", "alive"),
            headline=True,
        ),
        Metric(
            "over_10_percent",
            "Over 10%",
            "Share of latents that fire on more than 10% of the tokens; the paper counts these per SAE.",
            None,
            ("density", "over_10_percent"),
            digits=4,
            headline=True,
        ),
        Metric(
            "over_1_percent",
            "Over 1%",
            "Share of latents that fire on more than 1% of the tokens.",
            None,
            ("density", "over_1_percent"),
            digits=4,
        ),
        Metric(
            "middle_firings",
            "Firings, 0.1% to 10%",
            "Share of all firings that are of latents which fire on 0.1% to 10% of the tokens.",
            None,
            ("density", "middle_firings"),
        ),
    )

    def contexts(self, config: CoreConfig) -> Contexts:
        return Contexts(config.contexts, config.context)

    def settings_for(self, config: CoreConfig, sae: InferenceConfig, model: LanguageModel) -> CoreConfig:
        """As the SAE was trained: without the same positions and norms, with selection in batches of the same size."""
        trained, saved = sae.metadata, sae.metadata.get("high_norm_limit")
        limit = config.norm_limit or (saved if config.norm_factor == CoreConfig().norm_factor else None)
        context = config.context or int(trained.get("context_size") or 512)
        return replace(
            config,
            skip_first=skipped(config.skip_first, sae),
            left_out=special_tokens(model.tokenizer) if config.left_out is None else config.left_out,
            norm_limit=None if limit is None else float(limit),
            # An SAE that was trained without high-norm tokens leaves them as they are.
            put_in=config.put_in or ("saebench" if limit is None and saved is None else "normal"),
            cut_batch=config.cut_batch or int(trained.get("training", {}).get("batch_size") or 4096),
            contexts_at_once=config.contexts_at_once or contexts_at_once(model, context),
        )

    def run(self, job: Job, config: CoreConfig) -> Iterator[CoreResult]:
        assert job.contexts is not None
        yield from evaluate_core_many(job.saes, job.model, job.layer, job.contexts, config, job.progress)

    def cost(self, config: CoreConfig, work: Workload) -> Cost:
        """One whole pass, two ablations, and one pass from the layer on per SAE."""
        tokens = (config.contexts or 64) * (config.context or work.context)
        rest = work.read(tokens, work.shape.blocks - work.layer - 1, head=True)
        whole = work.read(tokens, work.shape.blocks, head=True)
        seconds = work.speed.load + whole + (2 + work.saes) * rest + work.encode(tokens, times=3)
        return Cost(self.name, seconds, 200_000 * work.saes, 0)

    def to_dict(self, result: CoreResult) -> dict[str, Any]:
        return result.to_dict()

    def to_saebench(self, result: CoreResult, config: CoreConfig) -> dict[str, Any]:
        return to_saebench(result, config)

    def save_extras(self, result: CoreResult, folder: Path) -> None:
        assert result.fired is not None
        save_firing(folder, result.fired, result.normal.tokens)
