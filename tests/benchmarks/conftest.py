"""Made-up activations for the experiments on pools."""

import pytest
import torch


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    """[3000, 16]: sums of a tenth of 64 random directions."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(64, 16, generator=generator)
    active = (torch.rand(3000, 64, generator=generator) < 0.1) * torch.rand(3000, 64, generator=generator)
    return active @ features
