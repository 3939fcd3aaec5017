"""SAEs of which much is known, the model they are measured on, and results compared."""

import json
from functools import cache
from typing import Any

import pytest
import torch

from sampled_sae.evals.core.evaluate import evaluate_core_many
from sampled_sae.evals.core.schema import CoreResult
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.method.config import SAEConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from tests.models.tiny_models import WIDTH, WORDS, make_model

LAYER = 1


@cache
def shared() -> LanguageModel:
    """One model for all tests that leave it as it is."""
    return tiny()


def tiny(family: str = "llama") -> LanguageModel:
    return LanguageModel(make_model(family).double(), None, "tiny")


def evaluate_core(sae: SAE, *given: Any) -> CoreResult:
    """Of one SAE."""
    return evaluate_core_many([sae], *given)[0]


def random_sae(m: int = 40, seed: int = 0, config: SAEConfig | None = None) -> SAE:
    generator = torch.Generator().manual_seed(seed)
    sae = SAE(InferenceConfig(WIDTH, m, training=config), torch.float64)
    with torch.no_grad():
        for weight in sae.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3)
        sae.threshold.fill_(1.0)
    return sae


def identity_sae() -> SAE:
    sae = SAE(InferenceConfig(WIDTH, 2 * WIDTH), torch.float64)
    with torch.no_grad():
        eye = torch.eye(WIDTH, dtype=torch.float64)
        sae.W_enc.T[:] = sae.W_dec[:] = torch.cat([eye, -eye])
    return sae


def constant_sae(value: torch.Tensor | None = None) -> SAE:
    """Always its b_dec; no latent fires."""
    sae = SAE(InferenceConfig(WIDTH, 4), torch.float64)
    if value is not None:
        with torch.no_grad():
            sae.b_dec.copy_(value)
    return sae


def as_json(result) -> dict:
    return json.loads(json.dumps(result.to_dict(), allow_nan=False))


def assert_near(a, b, path=""):
    """Two results as JSON, but for the settings, the same up to rounding."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a.keys() - {"settings"}:
            assert_near(a[name], b[name], f"{path}.{name}")
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-9), path
    else:
        assert a == b, path


def some_contexts() -> torch.Tensor:
    return torch.randint(1, len(WORDS), (7, 10), generator=torch.Generator().manual_seed(1))
