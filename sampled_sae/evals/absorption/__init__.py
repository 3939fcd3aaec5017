"""Absorption by the first-letter task: how often other latents stand in for the one that should fire."""

from sampled_sae.evals.absorption.evaluate import evaluate_absorption_many, measure_sae, over_letters
from sampled_sae.evals.absorption.schema import AbsorptionConfig, AbsorptionResult, to_saebench

__all__ = [
    "AbsorptionConfig",
    "AbsorptionResult",
    "evaluate_absorption_many",
    "measure_sae",
    "over_letters",
    "to_saebench",
]
