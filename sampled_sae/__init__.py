"""Sparse autoencoders with distribution-aware candidate pools: TopK, BatchTopK and Sampled-SAE as one family."""

from sampled_sae.config import AuxKConfig, OptimizerConfig, SAEConfig, ThresholdConfig
from sampled_sae.errors import Interrupted, UserError
from sampled_sae.pool_config import (
    Annealed,
    Constant,
    Everything,
    Fraction,
    Multiplier,
    PoolConfig,
    Released,
    Scope,
    Size,
)
from sampled_sae.presets import annealed, batchtopk, released, sampled, topk, topk_then_batchtopk
from sampled_sae.sae import SAE
from sampled_sae.scores import SCORES, register_input_score, register_score
from sampled_sae.trainer import train, train_layers

__all__ = [
    "SAE",
    "SCORES",
    "Annealed",
    "AuxKConfig",
    "Constant",
    "Everything",
    "Fraction",
    "Interrupted",
    "Multiplier",
    "OptimizerConfig",
    "PoolConfig",
    "Released",
    "SAEConfig",
    "Scope",
    "Size",
    "ThresholdConfig",
    "UserError",
    "annealed",
    "batchtopk",
    "register_input_score",
    "register_score",
    "released",
    "sampled",
    "topk",
    "topk_then_batchtopk",
    "train",
    "train_layers",
]
