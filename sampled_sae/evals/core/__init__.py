"""The core evaluation: what an SAE keeps of a model's activations, and of what the model does with them."""

from sampled_sae.evals.core.evaluate import evaluate_core, evaluate_core_many
from sampled_sae.evals.core.schema import CoreConfig, CoreResult, to_saebench

__all__ = ["CoreConfig", "CoreResult", "evaluate_core", "evaluate_core_many", "to_saebench"]
