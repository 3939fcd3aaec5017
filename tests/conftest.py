"""Shared by all tests: one thread each, because the test runner already uses every core."""

import os

import hypothesis
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def activations() -> torch.Tensor:
    """[4000, 16] sparse combinations of 32 random directions."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(32, 16, generator=generator)
    fires = torch.rand(4000, 32, generator=generator) < 0.1
    return (fires * torch.rand(4000, 32, generator=generator)) @ directions


# A busy machine may take long over one example; that says nothing about the code. CI repeats the same examples,
# so that a change fails for what it did; new ones are looked for at home.
hypothesis.settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("house")
