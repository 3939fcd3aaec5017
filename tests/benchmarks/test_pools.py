"""The experiment on pools and thresholds: it runs, and its committed data is complete."""

import json
from pathlib import Path

import pytest

from benchmarks import pools

DATA = Path(__file__).parents[2] / "docs" / "results" / "pools.json"
SMALL = {"d_sae": 96, "k": 4, "l": 3, "steps": 40, "batch_size": 64, "dead_after": 0.4}


@pytest.mark.parametrize("method", ["batchtopk", "prefix", "uniform", "entropy-no-auxk", "entropy-once"])
def test_one_run(rows, method):
    found = pools.run(rows[512:], rows[:512], method, SMALL, 0)
    assert found["trained"]["l0"] <= 4 and found["threshold"]["l0"] == pytest.approx(4, rel=0.2)
    remedies = found["remedies"]
    assert remedies["ever_pooled"]["latents"] == found["ever_pooled"]
    if method == "batchtopk":
        assert found["firings"] == {"outside_pool": 0, "never_pooled": 0, "not_in_last_tenth": 0}
        assert remedies["inference_size_1"]["fvu"] == pytest.approx(found["threshold"]["fvu"], rel=0.02)
    if method in ("prefix", "entropy-once"):  # the pool is always the same, so everything outside it is untrained
        assert found["pool"] == found["ever_pooled"] == 12
        assert found["firings"]["outside_pool"] == pytest.approx(found["firings"]["never_pooled"])
        assert remedies["inference_size_1"] == remedies["ever_pooled"]
        assert remedies["inference_size_1"]["fvu"] == pytest.approx(found["trained"]["fvu"], rel=0.1)


@pytest.fixture(scope="module")
def runs() -> list[dict]:
    return json.loads(DATA.read_text(encoding="utf-8"))["runs"]


def test_the_page_has_the_table_of_the_data(runs):
    page = (DATA.parents[1] / "concepts" / "threshold.md").read_text(encoding="utf-8")
    assert pools.table(runs) in page


def test_turnover_of_the_pool_goes_with_the_failure_at_the_threshold(runs):
    """What the page says: scores without a scale exchange their pools and fail; one kept pool does not."""
    repeated = json.loads(DATA.read_text(encoding="utf-8"))["repeated"]
    assert {one["method"] for one in runs} == {one["method"] for one in repeated} == set(pools.METHODS)
    for one in [*runs, *repeated]:
        lost = one["threshold"]["fvu"] / one["trained"]["fvu"]
        if one["method"] in ("batchtopk", "l1", "l2", "prefix", "prefix-no-auxk", "entropy-once"):
            assert lost < 1.01 and (one["pool"] == 4096 or one["ever_pooled"] <= 6 * one["pool"])
        else:
            assert lost > 1.5 and one["ever_pooled"] > 6 * one["pool"] and one["firings"]["outside_pool"] > 0.5
        assert one["remedies"]["inference_size_1"]["fvu"] <= 1.04 * one["trained"]["fvu"]
