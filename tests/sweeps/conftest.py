"""Tiny sweeps on files of activations, and on a language model with a cache."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sampled_sae.sweeps.spec import SweepConfig, completed
from tests.models.tiny_models import make_model, save

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


def make_cached_spec(folder: Path, **changes) -> SweepConfig:
    """A spec with two jobs that read a cache, which two jobs write; its model and text are put into the folder."""
    save(make_model("llama"), folder / "model")
    (folder / "text.txt").write_text("\n".join(" ".join(f"the{n * i % 97}" for i in range(60)) for n in range(60)))
    fields = {
        **{"models": str(folder / "model"), "layers": 1, "text": str(folder / "text.txt"), "saes_per_job": 1},
        **{"source": {"context": 20, "buffer_tokens": 800}, "cache": {"parts": 2, "shard_tokens": 300}},
    }
    return SweepConfig.from_dict(completed({**SHARED, **fields, "heldout_tokens": 60, "steps": 20, **changes}))
