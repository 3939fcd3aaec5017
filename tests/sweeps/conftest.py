"""Tiny sweeps on files of activations."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sampled_sae.sweeps.spec import SweepConfig, completed

SHARED = {
    "methods": ["batchtopk", "topk"],
    **{"d_sae": 32, "k": 4, "batch_size": 64, "heldout_tokens": 200, "optimizer": {"lr": 1e-3}},
    **{"steps": 60, "checkpoint_every": 20},
}


@pytest.fixture
def make_spec(tmp_path: Path, activations) -> Callable[..., SweepConfig]:
    """A spec on a.npy, or on files of these names in the test's folder."""
    np.save(tmp_path / "a.npy", activations.numpy())

    def make(*names: str, **changes) -> SweepConfig:
        files = [str(tmp_path / f"{name}.npy") for name in names or ("a",)]
        return SweepConfig.from_dict(completed({**SHARED, "activations": files, **changes}))

    return make
