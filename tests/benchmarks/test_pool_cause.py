"""The experiment on the cause of pools' FVU: what it restricts, and its committed data."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import pool_cause

DATA = Path(__file__).parents[2] / "docs" / "results" / "pool-cause.json"
SMALL = {"d_sae": 96, "k": 4, "pool": 12, "steps": 20, "batch_size": 64, "dead_after": 0.4}


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(64, 16, generator=generator)
    active = (torch.rand(1500, 64, generator=generator) < 0.1) * torch.rand(1500, 64, generator=generator)
    return active @ features


def trained(rows, method, **setting):
    setting = SMALL | setting
    return pool_cause.train(rows, pool_cause.configuration(method, setting, 1.0, 0, 16), method, setting, 0)


@pytest.mark.parametrize("method", ["batchtopk", "l2", "prefix", "trained-random", "l2-groups-32"])
def test_one_run(rows, method):
    found = pool_cause.run(rows[200:], rows[:192], method, SMALL, 1.0, 0)
    assert found["live"] <= 1 and found["used"] <= 96
    assert found["ever_pooled"] == pytest.approx(12 / 96) if method == "prefix" else found["ever_pooled"] > 12 / 96
    if method == "prefix":  # the same 12 latents in every batch, which the pool of the evaluation cannot add to
        assert found["pooled"] >= found["free"] - 0.05


def test_only_the_pool_is_trained(rows):
    whole, _ = trained(rows, "batchtopk")
    everything, _ = trained(rows, "trained-pool", pool=96)
    assert torch.equal(whole.W_dec, everything.W_dec)
    config = pool_cause.configuration("trained-random", SMALL, 1.0, 0, 16)  # and no latent is dead yet
    start = pool_cause.Learner(config, 16, 1, 0, rows.device, torch.float32).weights.W_dec.clone()
    after, _ = trained(rows, "trained-random", steps=1, dead_after=2)
    moved = (start - after.W_dec).abs().amax(1) > 1e-4  # all rows are scaled to norm 1 again
    assert 0 < int(moved.sum()) <= 12


def test_a_late_pool_is_none_at_first(rows):
    assert [pool_cause.Late(at=0.5).size(12, 96, done) for done in (0, 0.49, 0.5, 0.99)] == [96, 96, 12, 12]
    found, pools = trained(rows, "late-50")
    assert pools["ever_pooled"] == 1 and found.cfg.training.pool_size_at(19, 20) == 12


def test_the_rate_of_seed_0_counts():
    runs = [
        {"method": "l2", "factor": factor, "seed": seed, "fvu": fvu}
        for factor, seed, fvu in [(1, 0, 0.3), (2, 0, 0.2), (1, 1, 0.1), (2, 1, 0.4)]
    ]
    assert [one["fvu"] for one in pool_cause.best(runs, "l2")] == [0.2, 0.4]
    assert not pool_cause.best(runs, "prefix")
