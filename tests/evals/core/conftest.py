"""Shared by the tests of the core evaluation: a tiny language model and some contexts."""

import pytest
import torch

from sampled_sae.models.language_model import LanguageModel
from tests.evals.core.tools import shared, some_contexts


@pytest.fixture
def lm() -> LanguageModel:
    return shared()


@pytest.fixture
def contexts() -> torch.Tensor:
    return some_contexts()
