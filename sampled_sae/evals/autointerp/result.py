"""Scores of latents, what they come to for an SAE, and the same in SAEBench's layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sampled_sae.evals.autointerp.config import AutointerpConfig
from sampled_sae.evals.autointerp.trials import Kind, Trial
from sampled_sae.evals.bootstrap import NOTHING, Estimate, estimate, totals
from sampled_sae.evals.explanations import save_explanations
from sampled_sae.evals.to_json import plain

KINDS: tuple[Kind, ...] = ("detection", "balanced", "fuzzing")


class LatentScores(NamedTuple):
    """What a judge's answers on one latent come to; none where there is no answer."""

    detection: float | None
    """Share of SAEBench's windows judged rightly; naming none gives 10/14."""
    balanced: float | None
    """Balanced accuracy with as many firing as checked silent windows; without knowledge 1/2."""
    fuzzing: float | None
    """Balanced accuracy in telling right marks from wrong ones; without knowledge 1/2."""


class LatentResult(NamedTuple):
    """One latent."""

    latent: int
    """Its number."""
    fired: int
    """Counted tokens at which it fires."""
    explanation: str | None
    """What it is said to fire on; none if it could not be explained."""
    scores: LatentScores
    """How well that tells where it fires."""
    control: LatentScores
    """The same for the explanation of another latent."""
    random_that_fire: int
    """SAEBench's random windows in which it fires in fact, and which count as silent there."""
    reasons: tuple[str, ...]
    """Why some of it is missing."""


class Score(NamedTuple):
    """A score over latents."""

    mean: Estimate
    """With a bootstrap interval over latents."""
    deviation: float | None
    """Standard deviation over latents; none for fewer than two."""
    latents: int
    """Latents that have it."""


class Calls(NamedTuple):
    """What was asked of a chat endpoint."""

    asked: int
    """Questions."""
    from_disk: int
    """Of these, answered before."""
    failed: int
    """Of these, without any answer."""
    prompt_tokens: int
    """Tokens of the questions that were sent, as the endpoint counts them."""
    answer_tokens: int
    """Tokens of the answers."""


class AutointerpResult(NamedTuple):
    """One SAE on one layer of one model."""

    layer: int
    """The residual stream after this block, counted from 0."""
    tokens: int
    """Tokens of text at which firing counts."""
    high_norm: int
    """Tokens at which it does not, because their norm is too high."""
    alive: int | None
    """Latents that fire often enough; none if latents were named."""
    explainer: str
    """Who wrote the explanations."""
    judge: str
    """Who judged."""
    detection: Score
    """SAEBench's score."""
    balanced: Score
    """With checked negatives."""
    fuzzing: Score
    """By marks."""
    control: dict[str, Score]
    """The three scores with explanations of other latents; empty if it was not wanted."""
    chosen: int
    """Latents that were to be explained."""
    skipped: dict[str, int]
    """Why latents, or single scores of them, are missing, and how many."""
    calls: Calls | None
    """Calls of this SAE; none without a chat model."""
    latents: list[LatentResult]
    """Each latent, by number."""
    settings: AutointerpConfig
    """How it was measured."""

    def best(self, n: int = 10) -> list[LatentResult]:
        """The latents of the highest scores: by detection, then balanced, then fuzzing."""
        scored = [latent for latent in self.latents if latent.scores.detection is not None]
        return sorted(scored, key=lambda latent: ([-(score or 0.0) for score in latent.scores], latent.latent))[:n]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        found: dict[str, Any] = plain(self)
        return found

    def save_explanations(self, folder: Path) -> Path:
        """Write evals/explanations.json in the SAE's folder; `score` is detection's."""
        entries = {
            latent.latent: {
                "explanation": latent.explanation,
                "explainer": self.explainer,
                "score": latent.scores.detection,
                "scores": latent.scores._asdict(),
                "fired": latent.fired,
            }
            for latent in self.latents
            if latent.explanation is not None
        }
        return save_explanations(folder, entries, explainer=self.explainer, judge=self.judge, layer=self.layer)


def score_trial(trial: Trial, named: Sequence[bool]) -> float:
    """Share of windows judged rightly in detection, balanced accuracy in the other kinds."""
    right = [item.right for item in trial.items]
    hits = [name == truth for name, truth in zip(named, right, strict=True)]
    if trial.kind == "detection":
        return sum(hits) / len(hits)
    positive = [hit for hit, truth in zip(hits, right, strict=True) if truth]
    negative = [hit for hit, truth in zip(hits, right, strict=True) if not truth]
    return (sum(positive) / len(positive) + sum(negative) / len(negative)) / 2


def summarise(values: Sequence[float | None], settings: AutointerpConfig) -> Score:
    """The scores of all latents -> their mean, with an interval."""
    there = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    n = len(there)
    if n == 0:
        return Score(NOTHING, None, 0)
    drawn = totals({"sum": there, "n": torch.ones(n)}, settings.resamples, settings.seed)
    mean = estimate(drawn["sum"] / drawn["n"], n, settings.level)
    return Score(mean, float(there.std()) if n > 1 else None, n)


def to_saebench(result: AutointerpResult, settings: AutointerpConfig) -> dict[str, Any]:
    """SAEBench's layout; its score is detection's, and means the same only where a chat model explains and judges."""
    score = result.detection
    details = {
        str(latent.latent): {
            "latent": latent.latent,
            "explanation": latent.explanation,
            "score": latent.scores.detection,
            "balanced": latent.scores.balanced,
            "fuzzing": latent.scores.fuzzing,
        }
        for latent in result.latents
    }
    return {
        "eval_type_id": "autointerp",
        "eval_config": {
            "n_latents": None if settings.latents else settings.max_latents,
            "override_latents": list(settings.latents) or None,
            "dead_latent_threshold": settings.dead_below,
            "random_seed": settings.seed,
            "buffer": settings.buffer,
            "no_overlap": True,
            "act_threshold_frac": settings.mark_above,
            "total_tokens": result.tokens,
            "scoring": True,
            "n_top_ex_for_generation": settings.shown_top,
            "n_iw_sampled_ex_for_generation": settings.shown_weighted,
            "n_top_ex_for_scoring": settings.scored_top,
            "n_random_ex_for_scoring": settings.scored_random,
            "n_iw_sampled_ex_for_scoring": settings.scored_weighted,
        },
        "eval_id": None,
        "datetime_epoch_millis": None,
        "eval_result_metrics": {
            "autointerp": {"autointerp_score": score.mean.value, "autointerp_std_dev": score.deviation}
        },
        "eval_result_details": [],
        "eval_result_unstructured": {"explainer": result.explainer, "judge": result.judge, "latents": details},
    }
