"""Automated interpretability: latents are explained, and the explanations tried on other windows of text."""

from sampled_sae.evals.autointerp.evaluate import evaluate_autointerp, evaluate_autointerp_many
from sampled_sae.evals.autointerp.schema import AutointerpConfig, AutointerpResult, to_saebench

__all__ = ["AutointerpConfig", "AutointerpResult", "evaluate_autointerp", "evaluate_autointerp_many", "to_saebench"]
