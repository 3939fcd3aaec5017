"""Train, evaluate and compare sparse autoencoders: TopK, BatchTopK and distribution-aware candidate pools.

The functions of `api.py` go from a language model and a text to SAEs, results and pages. `SAEConfig` and its parts are
the settings of an SAE; presets such as `batchtopk`, `topk` and `sampled` create them.
"""

from importlib import metadata as _metadata
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from sampled_sae.api import activations, browse, compare, evaluate, load_model, push, report, resume, train
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.method.config import (
    Annealed,
    AuxKConfig,
    Constant,
    Everything,
    Fraction,
    InitConfig,
    JumpReLUConfig,
    Multiplier,
    OptimizerConfig,
    PoolConfig,
    Rates,
    Released,
    SAEConfig,
    Scope,
    Size,
    ThresholdConfig,
)
from sampled_sae.method.presets import (
    annealed,
    batchtopk,
    jumprelu,
    matryoshka,
    paper_recipe,
    released,
    sampled,
    topk,
    topk_then_batchtopk,
)
from sampled_sae.method.rate import default_lr
from sampled_sae.method.scores import SCORES, register_input_score, register_score
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import Interrupted, UserError

if _TYPE_CHECKING:
    from sampled_sae.training.run import Callback

try:
    __version__ = _metadata.version("sampled-sae")
except _metadata.PackageNotFoundError:
    __version__ = "unknown"
__all__ = [
    "SAE",
    "SCORES",
    "Annealed",
    "AuxKConfig",
    "Callback",
    "Constant",
    "Everything",
    "Fraction",
    "InferenceConfig",
    "InitConfig",
    "Interrupted",
    "JumpReLUConfig",
    "Multiplier",
    "OptimizerConfig",
    "PoolConfig",
    "Rates",
    "Released",
    "SAEConfig",
    "Scope",
    "Size",
    "ThresholdConfig",
    "UserError",
    "__version__",
    "activations",
    "annealed",
    "batchtopk",
    "browse",
    "compare",
    "default_lr",
    "evaluate",
    "jumprelu",
    "load_model",
    "matryoshka",
    "paper_recipe",
    "push",
    "register_input_score",
    "register_score",
    "released",
    "report",
    "resume",
    "sampled",
    "topk",
    "topk_then_batchtopk",
    "train",
]


def __getattr__(name: str) -> _Any:
    """`Callback` is imported when it is first needed: its module takes time to import."""
    if name == "Callback":
        from sampled_sae.training.run import Callback

        return Callback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
