"""The experiment on the cause of pools' FVU: what it restricts, and its committed data."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks import pool_cause

DATA = Path(__file__).parents[2] / "docs" / "results" / "pool-cause.json"
PAGE = DATA.parents[1] / "concepts" / "pools.md"
SMALL = {"d_sae": 96, "k": 4, "pool": 12, "wide": 36, "steps": 20, "batch_size": 64, "dead_after": 0.4}


def trained(rows, method, **setting):
    setting = SMALL | setting
    return pool_cause.train(rows, pool_cause.configuration(method, setting, 1.0, 0, 16), method, setting, 0)


@pytest.mark.parametrize("method", ["batchtopk", "l2", "l2-wide", "prefix", "trained-random", "l2-groups-32"])
def test_one_run(rows, method):
    found = pool_cause.run(rows[200:], rows[:192], method, SMALL, 1.0, 0)
    assert found["ever_pooled"] == pytest.approx(12 / 96) if method == "prefix" else found["ever_pooled"] > 12 / 96
    if method == "batchtopk":  # which needs more than the 12 latents of the pool
        assert found["used"] > 24 and found["pooled"] > 1.2 * found["free"]


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
    assert pool_cause.next_factor(runs, "prefix") == 1
    assert pool_cause.next_factor(runs, "l2") == 4
    assert pool_cause.next_factor([*runs, runs[0] | {"factor": 4}], "l2") is None


@pytest.fixture(scope="module")
def runs() -> list[dict]:
    return json.loads(DATA.read_text(encoding="utf-8"))["runs"]


def test_the_page_has_the_table_of_the_data(runs):
    assert pool_cause.table(runs) in PAGE.read_text(encoding="utf-8")
    for method in pool_cause.METHODS:
        assert {one["seed"] for one in pool_cause.best(runs, method)} == {0, 1, 2}
        assert pool_cause.next_factor(runs, method) is None


def test_the_numbers_of_the_page(runs):
    def mean(method: str, column: str) -> float:
        return statistics.fmean(one[column] for one in pool_cause.best(runs, method))

    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    base = mean("batchtopk", "fvu")
    for words in (
        f"(`trained-pool`), FVU is {mean('trained-pool', 'fvu') / base:.2f} times",
        f"(`l2`), it is {mean('l2', 'fvu') / base:.2f} times",
        f"the two have {mean('trained-pool-wide', 'fvu') / base:.2f} and {mean('l2-wide', 'fvu') / base:.2f} times",
        f"has an FVU of {mean('batchtopk', 'pooled'):.3f}. The SAE that was trained with these pools has "
        f"{mean('l2', 'pooled'):.3f}",
        f"{mean('released-50', 'live'):.0%} of the latents are live",
        f"(`released-50`, {mean('released-50', 'fvu') / base:.2f} times)",
        f"FVU is {mean('late-50', 'fvu') / base:.2f} times",
        f"FVU is {mean('trained-random', 'fvu') / base:.2f} times",
        f"FVU is {mean('l2-groups-32', 'fvu') / mean('batchtopk-groups-32', 'fvu'):.2f} times that of BatchTopK",
    ):
        assert words in text, words
    churn = [one["churn"] for one in pool_cause.best(runs, "l2")]
    assert f"{1 - max(churn):.0%} to {1 - min(churn):.0%} of a batch's pool" in text
    # Even under the restriction of the pool, no SAE that was trained with a pool for the whole batch is better.
    for method in ("l2", "prefix", "trained-pool", "late-50", "released-50", "released-90"):
        assert mean(method, "pooled") > mean("batchtopk", "pooled")
    spread = max(
        max(values) / min(values) - 1
        for method in pool_cause.METHODS
        for values in [[one["fvu"] for one in pool_cause.best(runs, method)]]
    )
    assert f"at most {math.ceil(1000 * spread) / 10}% in FVU" in text
