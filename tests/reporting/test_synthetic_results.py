"""The synthetic experiment's numbers and what is said of them, on small made-up results."""

from __future__ import annotations

from typing import Any

import pytest

from sampled_sae.reporting.synthetic import columns, configurations, ranked, summary
from sampled_sae.utils.measures import form
from tests.reporting.made_up import results, sae


def test_all_features_are_weighed_by_bucket_size() -> None:
    content = results(sae("a"))
    content["data"]["buckets"][0]["features"] = 768
    (only,) = configurations(content)
    assert only.mean("recovered") == pytest.approx((768 + 128) / (768 + 3 * 256))


def test_an_empty_bucket_does_not_count() -> None:
    content = results(sae("a", recovery={"LF+HA": 1.0, "HF+HA": 0.5, "LF+LA": 0.0, "HF+LA": None}))
    assert configurations(content)[0].mean("recovered") is None
    content["data"]["buckets"][3]["features"] = 0
    assert configurations(content)[0].mean("recovered") == pytest.approx(0.5)


def test_numbers_as_text() -> None:
    assert form(-0.0001, 3) == "0.000"
    assert form(12345.6, 0) == "12,346"
    assert form(None, 2) == form(float("inf"), 2) == form(True, 2) == "-"


def said(*saes: dict[str, Any]) -> str:
    return summary(results(*saes), str)


def test_best_threshold_comes_first() -> None:
    runs = [sae("a"), sae("none", fve_heldout_threshold=None), sae("b", fve_heldout_threshold=0.9)]
    assert [row.label for row in ranked(configurations(results(*runs)))] == ["b", "a", "none"]


def test_fve_by_moving_average_is_no_contest() -> None:
    contest = {column.title for column in columns(results(sae("a"))).values() if column.better}
    # Each SAE has an L0 of its own under the moving average, and a higher L0 buys a higher FVE.
    assert "FVE, inference threshold" in contest and "FVE by moving average" not in contest


def test_seeds_that_read_the_same_have_no_range() -> None:
    def text(high: float) -> str:
        return said(sae("a", 0, fve_heldout_threshold=0.9), sae("a", 1, fve_heldout_threshold=high), sae("b"))

    assert "Means range from 0.900 (a) to 0.700 (b)" in text(0.9001)
    assert "Means range from 0.905 (0.900 to 0.910) (a) to 0.700 (b)" in text(0.91)


def test_a_winner_needs_seeds() -> None:
    def runs(label: str, *values: float) -> list[dict[str, Any]]:
        return [sae(label, seed, fve_heldout_threshold=value) for seed, value in enumerate(values)]

    clear = said(*runs("a", 0.9, 0.901, 0.902), *runs("b", 0.8, 0.801, 0.802))
    assert "inference threshold: a is best, 0.901 (0.900 to 0.902), ahead of b, 0.801 (0.800 to 0.802); n = 3." in clear
    noisy = said(*runs("a", 0.9, 0.7, 0.8), *runs("b", 0.7, 0.9, 0.7))
    assert "no clear winner among all configurations" in noisy and "is best" not in noisy
    assert "is best" not in said(*runs("a", 0.9), *runs("b", 0.1))


def test_the_best_batchtopk_is_always_placed() -> None:
    middle = sae("BatchTopK", group="batchtopk", fve_heldout_threshold=0.8)
    assert "to 0.700 (b); BatchTopK has 0.800." in said(sae("a", fve_heldout_threshold=0.9), sae("b"), middle)


def test_a_gap_that_does_not_show_is_not_told() -> None:
    assert "a (0.800 against 0.750)" in said(sae("a"))
    assert "largest gap" not in said(sae("a", fve_train=0.7504))
    assert "largest gap" not in said(sae("a", fve_train=0.5))
