"""Automated interpretability: latents are explained, and the explanations are tested on other windows of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sampled_sae.data.contexts import find_end_of_text
from sampled_sae.evals import Contexts, Evaluation, Job, Needs, register_evaluation
from sampled_sae.evals.autointerp.chat import Chat
from sampled_sae.evals.autointerp.evaluate import evaluate_autointerp_many
from sampled_sae.evals.autointerp.schema import CONTEXT, AutointerpConfig, AutointerpResult, most_latents
from sampled_sae.evals.core.schema import special_tokens
from sampled_sae.evals.reading import skipped
from sampled_sae.evals.results import saebench_layout
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.cost import Cost, Workload
from sampled_sae.utils.measures import Metric

EMBEDDERS = {"minilm": 10_600_000}  # Weights of an embedder without its vocabulary; others are taken for mpnet
MPNET = 85_000_000


@register_evaluation
class Autointerp(Evaluation):
    name = "autointerp"
    title = "Interpretability"
    note = "Means over latents; the explanations are in explanations.json beside the results."
    config = AutointerpConfig
    needs = Needs(text=True, extras={"sentence_transformers": "evals"}, saes_at_once=4)
    unit = "contexts and latents"
    order = 40
    one_by_one = True
    metrics = (
        Metric(
            "autointerp_balanced",
            "Interpretability (balanced detection)",
            "Balanced accuracy of the judge on equal numbers of windows where the latent fires and where it does not; "
            "guessing gives 0.5.",
            "high",
            ("balanced", "mean"),
            headline=True,
            null=0.5,
            brief="balanced",
        ),
        Metric(
            "autointerp",
            "Interpretability (detection)",
            "Share of text windows that a judge classifies correctly from a latent's explanation, as in SAEBench; "
            "answering none every time gives 0.714.",
            "high",
            ("detection", "mean"),
            null=10 / 14,
            brief="detection",
        ),
        Metric(
            "autointerp_fuzzing",
            "Interpretability (fuzzing)",
            "Balanced accuracy of the judge at telling windows with the firing tokens marked from windows with other "
            "tokens marked; guessing gives 0.5.",
            "high",
            ("fuzzing", "mean"),
            null=0.5,
            brief="fuzzing",
        ),
        Metric(
            "autointerp_control",
            "Interpretability (balanced detection), shuffled",
            "The balanced score with explanations of other latents, a control that should be close to guessing.",
            None,
            ("control", "balanced", "mean"),
            null=0.5,
            brief="balanced, shuffled",
        ),
    )

    def contexts(self, config: AutointerpConfig) -> Contexts:
        return Contexts(config.tokens // CONTEXT, CONTEXT, heldout=False, all=False)

    def settings_for(self, config: AutointerpConfig, sae: InferenceConfig, model: LanguageModel) -> AutointerpConfig:
        """Without special tokens and training's first positions, unless the settings name others."""
        known = sorted({*special_tokens(model.tokenizer), find_end_of_text(model.tokenizer)})
        left_out = tuple(known) if config.left_out is None else config.left_out
        return replace(config, left_out=left_out, skip_first=skipped(config.skip_first, sae))

    def check(self, config: AutointerpConfig) -> None:
        """A missing key, and packages of the chat client."""
        if config.uses_chat:
            Chat(config.chat)

    def run(self, job: Job, config: AutointerpConfig) -> Iterator[AutointerpResult]:
        assert job.contexts is not None
        return evaluate_autointerp_many(job.saes, job.model, job.layer, job.contexts, config, job.progress)

    def cost(self, config: AutointerpConfig, work: Workload) -> Cost:
        """Two readings by the SAEs; some 35 windows of 21 tokens per latent are embedded."""
        weights = EMBEDDERS.get(config.embedder or "", MPNET)
        texts = 35 * most_latents(config) * work.saes
        embedded = 2 * weights * 30 * texts / (work.rate * work.speed.model) * (config.judge == "offline")
        seconds = work.read(config.tokens) + work.encode(config.tokens, times=2) + embedded
        return Cost(self.name, seconds, 2_000_000 * work.saes, 0)

    def to_saebench(self, result: AutointerpResult, config: AutointerpConfig) -> dict[str, Any]:
        """SAEBench's layout; the score is detection's, comparable only where a chat model explains and judges."""
        score = result.detection
        details = {
            str(latent.latent): {
                "latent": latent.latent,
                "explanation": latent.explanation,
                **dict(zip(("score", "balanced", "fuzzing"), latent.scores, strict=True)),
            }
            for latent in result.latents
        }
        settings = {
            "n_latents": None if config.latents else most_latents(config),
            "override_latents": list(config.latents) or None,
            "dead_latent_threshold": config.dead_below,
            "random_seed": config.seed,
            "buffer": config.buffer,
            "no_overlap": True,
            "act_threshold_frac": config.mark_above,
            "total_tokens": result.tokens,
            "scoring": True,
            "n_top_ex_for_generation": config.shown_top,
            "n_iw_sampled_ex_for_generation": config.shown_weighted,
            "n_top_ex_for_scoring": config.scored_top,
            "n_random_ex_for_scoring": config.scored_random,
            "n_iw_sampled_ex_for_scoring": config.scored_weighted,
        }
        metrics = {"autointerp": {"autointerp_score": score.mean.value, "autointerp_std_dev": score.deviation}}
        extra = {"explainer": result.explainer, "judge": result.judge, "latents": details}
        return saebench_layout("autointerp", settings, metrics, [], extra)

    def save_extras(self, result: AutointerpResult, folder: Path) -> None:
        result.save_explanations(folder)
