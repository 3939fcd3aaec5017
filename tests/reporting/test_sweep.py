"""SAEs grouped into sweeps and configurations, and what is said about comparing them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sampled_sae.evals.core import FVU
from sampled_sae.method import presets
from sampled_sae.method.config import OptimizerConfig
from sampled_sae.reporting.collect import collect
from sampled_sae.reporting.sweep import Sweep, key_of, sweeps
from tests.reporting.made_up_sweep import K, M, absorption, core, grid, put, write_run, write_sae, write_sweep


def only(folder: Path) -> Sweep:
    (sweep,) = sweeps(collect([folder]))
    return sweep


def test_seeds_are_one_row_with_mean_and_range(tmp_path: Path) -> None:
    sweep = only(write_sweep(tmp_path))
    assert len(sweep.rows) == len(grid()) / 2
    for row in sweep.rows:
        values = []
        for run in row.runs:
            content = json.loads((Path(run["name"]) / "evals" / "core.json").read_text())
            values.append(content["result"]["normal"]["fvu"]["value"])
        assert row.stat(key_of(FVU)) == pytest.approx((sum(values) / 2, min(values), max(values)))
        assert sorted(run["seed"] for run in row.runs) == [0, 1]


def test_rows_begin_with_batchtopk_and_go_by_l(tmp_path: Path) -> None:
    sweep = only(write_sweep(tmp_path, ls=(10, 2, 5), scores=("uniform", "l2")))
    assert [row.label for row in sweep.rows] == [
        *("batchtopk", "topk", *(f"sampled:score={score},l={l}" for score in ("l2", "uniform") for l in (2, 5, 10))),
        "released",
    ]
    assert [row.l for row in sweep.rows][2:5] == [2, 5, 10]
    assert sweep.rows[-1].group == "released"


def test_the_default_method_is_not_listed_as_topk(tmp_path: Path) -> None:
    methods = [presets.topk(M, K), presets.topk_then_batchtopk(M, K), presets.topk_then_batchtopk(M, K, 0.3)]
    for config in presets.named(methods, 0):
        write_sae(tmp_path / str(config.name), config, core=core())
    assert {row.label: row.group for row in only(tmp_path).rows} == {
        "topk": "topk",
        "topk_then_batchtopk": "topk_then_batchtopk",
        "topk_then_batchtopk:until=0.3": "topk_then_batchtopk",
    }


def test_models_and_layers_are_kept_apart(tmp_path: Path) -> None:
    write_sweep(tmp_path / "a", seeds=(0,))
    write_sweep(tmp_path / "b", layer=2)
    write_sweep(tmp_path / "c", model="other", seeds=(0,))
    write_sweep(tmp_path / "d", model=None, layer=None, seeds=(0,))
    found = sweeps(collect([tmp_path]))
    assert [sweep.title for sweep in found] == [
        *("tiny, layer 2", "tiny, layer 1", "other, layer 1", "a model without a name, width 16")
    ]
    assert all(len({sae.metadata.get("layer") for sae in sweep.saes}) == 1 for sweep in found)


def test_labels_name_what_differs(tmp_path: Path) -> None:
    base = presets.batchtopk(M, K, lr=1e-3)
    variants = [base, replace(base, k=8), replace(base, optimizer=OptimizerConfig(lr=3e-4))]
    for config in presets.named(variants, 0):
        write_sae(tmp_path / str(config.name), config, core=core())
    labels = [row.label for row in only(tmp_path).rows]
    assert sorted(labels) == ["batchtopk k=4 lr=0.0003", "batchtopk k=4 lr=0.001", "batchtopk k=8 lr=0.001"]


def test_the_same_seed_twice_is_said(tmp_path: Path) -> None:
    (config,) = presets.named([presets.batchtopk(M, K)], 0)
    write_sae(tmp_path / "a", config, core=core(0.1))
    write_sae(tmp_path / "b", config, core=core(0.2))
    sweep = only(tmp_path)
    assert len(sweep.rows) == 1 and any("the same seed" in note for note in sweep.notes)


def test_numbers_that_were_asked_for_differently_are_said(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    assert not only(tmp_path).notes
    path = tmp_path / "saes" / "topk-s0" / "evals" / "core.json"
    put(path, json.loads(path.read_text()) | {"asked": {"contexts": 16}})
    (note,) = only(tmp_path).notes
    assert "contexts = " in note and "8" in note and "16" in note


def test_what_has_no_number_is_said_with_its_reason(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    why = "3 usable letters, 20 are needed"
    put(tmp_path / "saes" / "topk-s0" / "evals" / "absorption.json", {"result": absorption(None, why)})
    put(tmp_path / "saes" / "topk-s1" / "evals" / "core.json", {"result": core(1.0, alive=0)})
    notes = " ".join(only(tmp_path).notes)
    assert f"topk-s0: no absorption: {why}." in notes
    assert "topk-s1: no latent fires on the held-out text." in notes


def test_an_unfinished_run_has_curves_and_no_numbers(tmp_path: Path) -> None:
    configs = grid(seeds=(0,))
    sweep = only(write_run(tmp_path, configs, finished=False))
    assert len(sweep.rows) == len(configs) and not sweep.metrics
    assert len(sweep.log) == len(configs)
    assert any("is not finished" in note for note in sweep.notes)


def test_only_numbers_that_some_sae_has(tmp_path: Path) -> None:
    (config,) = presets.named([presets.batchtopk(M, K)], 0)
    write_sae(tmp_path / "a", config, absorption=absorption(0.1))
    names = {metric.name for metric in only(tmp_path).metrics}
    assert "absorption" in names and "dead" in names and "fvu" not in names


def test_settings_of_another_version_do_not_stop_it(tmp_path: Path) -> None:
    put(tmp_path / "a" / "sampled_sae.json", {"config": {"name": "odd", "new": {"x": 1}}, "metadata": {"layer": "six"}})
    put(tmp_path / "b" / "sampled_sae.json", {"config": None, "metadata": None})
    found = sweeps(collect([tmp_path]))
    labels = [row.label for sweep in found for row in sweep.rows]
    assert sorted(labels) == ["b", "odd"]


@pytest.mark.parametrize(
    "density", [None, [], {}, {"histogram": [1]}, {"histogram": [1, "x"], "log10_edges": [0, 1, 2]}]
)
def test_odd_densities_are_no_densities(tmp_path: Path, density: Any) -> None:
    (config,) = presets.named([presets.batchtopk(M, K)], 0)
    write_sae(tmp_path, config, core=core() | {"density": density})
    assert only(tmp_path).rows[0].runs[0]["density"] is None
