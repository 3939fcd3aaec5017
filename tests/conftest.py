"""Shared by all tests: one thread each, because the test runner already uses every core."""

import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from tests.chromium import CHROME

torch.set_num_threads(1)


@pytest.fixture
def activations() -> torch.Tensor:
    """[4000, 16] sparse combinations of 32 random directions."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(32, 16, generator=generator)
    fires = torch.rand(4000, 32, generator=generator) < 0.1
    return (fires * torch.rand(4000, 32, generator=generator)) @ directions


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; tests that ask for it are skipped where it or Playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROME is None:
        pytest.skip("there is no Chromium or Chrome")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROME, args=["--no-sandbox"])
        yield started
        started.close()


# A busy machine may take long over one example; that says nothing about the code. CI repeats the same examples,
# so that a change fails for what it did; new ones are looked for at home.
hypothesis.settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("house")
