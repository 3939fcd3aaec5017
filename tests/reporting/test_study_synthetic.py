"""Tables of synthetic experiments in a study: paired differences, verdicts, what was not run."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from sampled_sae.experiments.results import not_run_of
from sampled_sae.reporting.study_synthetic import synthetic_table
from tests.reporting.made_up import results, sae


def made(label: str, *fves: float) -> list[dict[str, Any]]:
    return [sae(label, seed, fve_heldout_threshold=fve) for seed, fve in enumerate(fves)]


def row(label: str, *fves: float) -> dict[str, Any]:
    table = synthetic_table(results(*made("batchtopk", 0.80, 0.81, 0.82), *made(label, *fves)))
    found = next(row for row in table.rows if row[0] == label)
    return dict(zip([column.title for column in table.columns], found, strict=True))


def test_differences_are_paired_over_seeds():
    it = row("topk", 0.850, 0.861, 0.869)
    differences = [0.050, 0.051, 0.049]
    assert it["difference"] == pytest.approx(0.05)
    # 5.36 standard errors for three seeds, as docs/protocol.md says.
    assert it["MDD"] == pytest.approx(5.364 * statistics.stdev(differences) / 3**0.5, rel=1e-3)
    assert (it["seeds"], it["verdict"]) == (3, "better")
    assert row("topk", 0.75, 0.76, 0.77)["verdict"] == "worse"


def test_a_loss_within_the_margin_of_the_fvu_is_not_worse():
    # 1% of BatchTopK's FVU of 0.19 is 0.0019.
    assert row("topk", 0.8001, 0.8100, 0.8200)["verdict"] == "not worse"
    assert row("topk", 0.790, 0.815, 0.823)["verdict"] == "undecided"
    assert row("topk", 0.85)["verdict"] == "undecided", "one seed"
    assert row("batchtopk", 0.80)["verdict"] == "-"


def test_what_was_not_run_is_named():
    found = results(*made("batchtopk", 0.8))
    missing = not_run_of("synthsaebench", found)
    assert "topk" in missing and "batchtopk" not in missing
    assert not_run_of("a preset of one's own", found) == []
    assert "Unfinished: not run of this preset are a, b." in (synthetic_table(found, ["a", "b"]).note or "")
    assert "Unfinished" not in (synthetic_table(found).note or "")
