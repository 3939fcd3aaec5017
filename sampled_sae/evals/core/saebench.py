"""The core evaluation in SAEBench's layout."""

from __future__ import annotations

from typing import Any

from sampled_sae.evals.bootstrap import Estimate
from sampled_sae.evals.core.config import CoreConfig
from sampled_sae.evals.core.evaluate import CoreResult


def to_saebench(result: CoreResult, settings: CoreConfig) -> dict[str, Any]:
    """The result as SAEBench's own tools read it: what it measures over all tokens, not without those of high norm.

    Its `explained_variance`, which subtracts another mean, and what is not measured here are None; so are the losses
    unless reconstruction and ablations were put in where SAEBench puts them.
    """
    all_, density = result.measured, result.density_measured
    loss = result.loss if settings.put_in == "saebench" else None

    def value(estimate: Estimate | None) -> float | None:
        return None if estimate is None else estimate.value

    return {
        "eval_type_id": "core",
        "eval_config": {
            "batch_size_prompts": settings.contexts_at_once,
            "compute_kl": loss is not None,
            "compute_ce_loss": loss is not None,
            "exclude_special_tokens_from_reconstruction": bool(settings.left_out),
            "put_in": settings.put_in,
        },
        "eval_id": None,
        "datetime_epoch_millis": None,
        "eval_result_metrics": {
            "model_behavior_preservation": {
                "kl_div_score": value(loss and loss.kl_recovered),
                "kl_div_with_ablation": value(loss and loss.kl_zero),
                "kl_div_with_sae": value(loss and loss.kl_sae),
            },
            "model_performance_preservation": {
                "ce_loss_score": value(loss and loss.ce_recovered),
                "ce_loss_with_ablation": value(loss and loss.ce_zero),
                "ce_loss_with_sae": value(loss and loss.ce_sae),
                "ce_loss_without_sae": value(loss and loss.ce_model),
            },
            "reconstruction_quality": {
                "explained_variance": None,
                "explained_variance_legacy": value(all_.explained_variance_legacy),
                "mse": None,
                "cossim": value(all_.cosine),
            },
            "shrinkage": {
                "l2_norm_in": None,
                "l2_norm_out": None,
                "l2_ratio": value(all_.relative_norm),
                "relative_reconstruction_bias": None,
            },
            "sparsity": {"l0": value(all_.l0), "l1": None},
            "token_stats": {
                "total_tokens_eval_reconstruction": all_.tokens,
                "total_tokens_eval_sparsity_variance": all_.tokens,
            },
            "misc_metrics": {
                "freq_over_1_percent": value(density.over_1_percent),
                "freq_over_10_percent": value(density.over_10_percent),
                "frac_alive": density.alive,
            },
        },
        "eval_result_details": [],
        "eval_result_unstructured": {
            "fvu": value(all_.fvu),
            "fvu_without_high_norm_tokens": value(result.normal.fvu),
        },
    }
