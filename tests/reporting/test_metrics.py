"""The registry of numbers against the evaluations' own classes."""

from __future__ import annotations

from typing import Any

import pytest

from sampled_sae.reporting.collect import kinds
from sampled_sae.utils.measures import Metric, Value, find
from tests.reporting.made_up_sweep import ALL, absorption, core

METRICS = [metric for kind in kinds() for metric in kind.metrics]
TRAINING = {"heldout": {"fvu": 0.1, "l0": 4.0}, "dead": 0.25, "ever_pooled": 0.9, "seconds": 3.0}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_number_is_where_its_evaluation_puts_it(metric: Metric) -> None:
    result = TRAINING if metric.evaluation == "training" else ALL[metric.evaluation]()
    assert find(metric, result) is not None


def test_names_are_unique_and_known() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names) and all(name.isidentifier() for name in names)
    assert {metric.evaluation for metric in METRICS} == {kind.name for kind in kinds()}
    assert len({metric.title for metric in METRICS}) == len(METRICS)
    assert all(metric.meaning.endswith(".") and "\n" not in metric.meaning for metric in METRICS)


def metric(*path: str) -> Metric:
    return Metric("x", "X", "X.", "low", path)


@pytest.mark.parametrize(
    ("result", "value"),
    [
        ({"a": {"b": 0.5}}, Value(0.5, None, None)),
        ({"a": {"b": {"value": 0.5, "low": 0.4, "high": 0.6}}}, Value(0.5, 0.4, 0.6)),
        ({"a": {"b": {"value": 0.5, "low": None, "high": None}}}, Value(0.5, None, None)),
        ({"a": {"b": {"mean": 0.5, "std": 0.1}}}, Value(0.5, None, None)),
        ({"a": {"b": {"value": None, "low": None, "high": None}}}, None),
        ({"a": {"b": None}}, None),
        ({"a": None}, None),
        ({"a": [1]}, None),
        ({"a": {"b": float("nan")}}, None),
        ({"a": {"b": "0.5"}}, None),
        ({"a": {"b": True}}, None),
        ([], None),
    ],
)
def test_what_counts_as_a_number(result: Any, value: Value | None) -> None:
    assert find(metric("a", "b"), result) == value


def test_what_could_not_be_measured_is_none() -> None:
    by_name = {metric.name: metric for metric in METRICS}
    assert find(by_name["fvu"], core(None)) is None
    assert find(by_name["absorption"], absorption(None, "too few letters")) is None


def test_an_axis_says_which_way_is_better() -> None:
    by_name = {metric.name: metric for metric in METRICS}
    assert by_name["fvu"].axis == "FVU (lower is better)"
    assert by_name["cosine"].axis == "Cosine (higher is better)"
    assert by_name["l0"].axis == "L0"
