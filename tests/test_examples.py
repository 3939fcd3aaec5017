"""Examples that explain results of docs/synthetic.md, at a tiny size."""

import importlib.util
from pathlib import Path

import pytest
import torch

import sampled_sae as ss

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_selections_on_fresh_samples():
    module = example("synthetic_memorization")
    x = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    fixed, calibration, fresh = x.split(200)
    (sae,) = ss.train(
        fixed,
        [ss.sampled(64, 4, "l2", l=3, seed=0)],
        steps=2,
        batch_size=100,
        heldout=calibration,
        input_norm="none",
        device="cpu",
        progress=False,
    )
    found = module.selections(sae, fixed, calibration, fresh, 4)
    assert found["K per sample"]["l0_max"] == 4
    same = sae(fresh).detach()
    fve = 1 - (fresh - same).square().sum() / (fresh - fresh.mean(0)).square().sum()
    assert found["threshold"]["fve"] == pytest.approx(float(fve), abs=1e-5), "the SAE's own threshold"
    inside = found["latents_that_fire_in_training"]
    assert 0 < inside < 64 and 0 < found["firings_of_others"] < 1
    assert 0 < found["threshold, latents that fire in training"]["l0"] < 8


def test_interference_of_weak_features():
    module = example("synthetic_ceiling")
    found = module.interference(module.SyntheticData(module.EXPERIMENTS["demo"].data), n=2000)
    assert found["LF+LA"]["own"] == pytest.approx(0.2, rel=0.1) and found["HF+HA"]["own"] == pytest.approx(1, rel=0.1)
    assert found["LF+LA"]["own"] < found["LF+LA"]["others"] < found["LF+HA"]["own"]
