"""Sparse probing: how well a few latents, all of them, or the residual stream tell classes of texts apart."""

from sampled_sae.evals.probing.evaluate import evaluate_probing, evaluate_probing_many
from sampled_sae.evals.probing.schema import ProbingConfig, ProbingResult, to_saebench

__all__ = ["ProbingConfig", "ProbingResult", "evaluate_probing", "evaluate_probing_many", "to_saebench"]
