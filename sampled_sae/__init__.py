"""Sparse autoencoders with distribution-aware candidate pools: TopK, BatchTopK and Sampled-SAE as one family."""

from importlib import metadata as _metadata

from sampled_sae.api import browse, compare, load_model, report
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.method.config import (
    Annealed,
    AuxKConfig,
    Constant,
    Everything,
    Fraction,
    Multiplier,
    OptimizerConfig,
    PoolConfig,
    Released,
    SAEConfig,
    Scope,
    Size,
    ThresholdConfig,
)
from sampled_sae.method.presets import annealed, batchtopk, released, sampled, topk, topk_then_batchtopk
from sampled_sae.method.scores import SCORES, register_input_score, register_score
from sampled_sae.sae import SAE
from sampled_sae.training.trainer import train, train_layers
from sampled_sae.utils.errors import Interrupted, UserError

try:
    __version__ = _metadata.version("sampled-sae")
except _metadata.PackageNotFoundError:
    __version__ = "unknown"
__all__ = [
    "SAE",
    "SCORES",
    "Annealed",
    "AuxKConfig",
    "Constant",
    "Everything",
    "Fraction",
    "InferenceConfig",
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
    "__version__",
    "annealed",
    "batchtopk",
    "browse",
    "compare",
    "load_model",
    "register_input_score",
    "register_score",
    "released",
    "report",
    "sampled",
    "topk",
    "topk_then_batchtopk",
    "train",
    "train_layers",
]
