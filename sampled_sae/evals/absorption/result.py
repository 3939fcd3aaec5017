"""Results of the absorption evaluation, letter by letter and over letters, and their layout in SAEBench."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from sampled_sae.evals.absorption.config import AbsorptionConfig
from sampled_sae.evals.absorption.score import Absorber
from sampled_sae.evals.to_json import plain


class LetterResult(NamedTuple):
    """One letter; what could not be measured is none."""

    letter: str
    why_not: str | None
    """Why the letter does not count; none for a usable one."""
    train_words: int
    """Words with this letter that probes were fitted on."""
    test_words: int
    """Words with this letter that tested them."""
    f1: float | None
    """Of the probe on the residual stream: whether the model knows the letter here."""
    sparse_f1: list[float]
    """Of probes on the first 1, 2, ... of `ranked`."""
    ranked: list[int]
    """Latents that the L1 probe points to, best first."""
    main: list[int]
    """The first ones of these, the letter's main latents. More than one: the letter is split."""
    words: int
    """Test words that the probe gets right: absorption is measured on these."""
    fraction: float | None
    """Mean absorption fraction over these words."""
    full: float | None
    """Share of these words that are fully absorbed."""
    full_words: int
    """Number of these words that are fully absorbed."""
    absorbers: list[Absorber]
    """The latents that absorb at most words."""
    absorbing: int
    """How many latents absorb at some word."""

    @property
    def usable(self) -> bool:
        """Whether the letter counts in the means."""
        return self.why_not is None


class Spread(NamedTuple):
    """Over the usable letters."""

    mean: float
    std: float | None
    """Standard deviation between letters; none for a single one."""


class AbsorptionResult(NamedTuple):
    """One SAE on one layer of one model."""

    model: str
    dtype: str
    """The model's precision."""
    layer: int
    """The residual stream after this block, counted from 0."""
    words: int
    """Words of the task, to train and to test."""
    left_out: int
    """Words of the vocabulary that are not one token in the prompt, and so are not used."""
    tail: int
    """Tokens of the template after the word."""
    usable_letters: int
    """Letters that the model knows here."""
    not_evaluable: str | None
    """Why there are no means; none where there are."""
    fraction: Spread | None
    """Absorption fraction: mean over words, then over usable letters."""
    full: Spread | None
    """Share of fully absorbed words."""
    splits: Spread | None
    """Main latents a letter; 1 where no letter is split."""
    main_f1: Spread | None
    """F1 of the probes on the main latents. Where it is low, the SAE has no latents for letters that others could
    absorb, and the numbers above say little."""
    letters: list[LetterResult]
    """All 26."""
    settings: AbsorptionConfig
    """How it was measured."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        found: dict[str, Any] = plain(self)
        return found


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation of a number a letter."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def to_saebench(result: AbsorptionResult, settings: AbsorptionConfig | None = None) -> dict[str, Any]:
    """The layout of SAEBench's `absorption_first_letter`; without means where there are none, and then with the reason.

    What names the run and the SAE (eval_id, datetime_epoch_millis, sae_lens_id and so on) is left to the caller.
    """
    settings = settings or result.settings
    means: dict[str, float | None] = {}
    for name, item in (
        ("absorption_fraction_score", result.fraction),
        ("full_absorption_score", result.full),
        ("num_split_features", result.splits),
    ):
        means[f"mean_{name}"] = item and item.mean
        means[f"std_dev_{name}"] = item and item.std
    return {
        "eval_type_id": "absorption_first_letter",
        "eval_config": _saebench_config(result, settings),
        "eval_id": None,
        "datetime_epoch_millis": None,
        "eval_result_metrics": {"mean": means},
        "eval_result_details": [_saebench_detail(letter) for letter in result.letters if letter.usable],
        "sae_bench_commit_hash": None,
        "sae_lens_id": None,
        "sae_lens_release_id": None,
        "sae_lens_version": None,
        "sae_cfg_dict": None,
        "eval_result_unstructured": result.not_evaluable and {"not_evaluable": result.not_evaluable},
    }


def _saebench_config(result: AbsorptionResult, settings: AbsorptionConfig) -> dict[str, Any]:
    return {
        "model_name": result.model,
        "random_seed": settings.seed,
        "f1_jump_threshold": settings.f1_jump,
        "max_k_value": settings.max_k,
        "prompt_template": settings.template,
        "prompt_token_pos": -1 - result.tail,
        "llm_batch_size": settings.prompts_at_once,
        "llm_dtype": result.dtype,
        "k_sparse_probe_l1_decay": settings.l1,
        "k_sparse_probe_batch_size": settings.sparse_batch,
        "k_sparse_probe_num_epochs": settings.sparse_epochs,
        "min_GT_probe_f1": settings.min_f1,
        "min_feats_for_eval": settings.min_letters,
        "eval_k_sparse_probe_batch_size": settings.words_at_once,
        "precalc_k_sparse_probe_sae_acts": True,
    }


def _saebench_detail(letter: LetterResult) -> dict[str, Any]:
    return {
        "first_letter": letter.letter,
        "mean_absorption_fraction": letter.fraction,
        "full_absorption_rate": letter.full,
        "num_full_absorption": letter.full_words,
        "num_probe_true_positives": letter.words,
        "num_split_features": len(letter.main),
    }
