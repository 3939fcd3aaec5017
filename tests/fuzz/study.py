"""Designs of studies, their lines of results, and the latents that they keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sampled_sae.experiments.design import load_study, plan, runs_of
from sampled_sae.experiments.results import line, read_slice, write_results, write_slice
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.reporting.study import Run, read_rows
from sampled_sae.sae import SAE
from tests.fuzz.mutate import binary_damage, lines_damage
from tests.fuzz.target import File, Target, strict
from tests.reporting import made_up
from tests.reporting.test_study import rows

SLICE = "first-good-x1-s0.safetensors"
DESIGN: dict[str, Any] = {
    "tokens": 1280,
    "batch_size": 128,
    "settings": {name: {"model": "m", "layer": 1, "d_sae": 64, "k": 4} for name in ("first", "second")},
    "methods": {
        "batchtopk": {"spec": "batchtopk", "role": "baseline"},
        "good": {"spec": "sampled:score=l2,l=6"},
        "bad": {"spec": "sampled:score=l2,l=3", "role": "paper", "rate_of": "good", "cost": 0.8},
    },
    "stages": [
        {"name": "rates", "settings": ["first"], "methods": ["good"], "seeds": [0], "factors": [0.5, 1]}
        | {"measure": ["rate"], "tokens": 640},
        {"name": "seeds", "settings": ["first", "second"], "methods": ["batchtopk", "@leaders"], "seeds": [0, 1, 2]},
    ],
    "claims": [
        {"name": "H1", "text": "better", "metric": "fvu", "method": "good"},
        {"name": "H1", "text": "at most", "metric": "fvu", "method": "bad", "kind": "at most", "ratio": 1.9},
        {"name": "H2", "text": "front", "kind": "front", "metrics": ["fvu", "probing_5"], "methods": ["good", "bad"]},
        {"name": "H3", "text": "none", "kind": "no best", "metrics": ["fvu", "absorption"]},
        {"name": "H4", "text": "synthetic", "kind": "synthetic", "method": "BatchTopK", "ratio": 0.9},
    ],
    "needed": {"H1": "most"},
}


def build(root: Path) -> None:
    """Write the undamaged files."""
    folder = root / "study"
    (folder / "synthetic").mkdir(parents=True)
    (folder / "design.json").write_text(json.dumps(DESIGN))
    every = [row for row in (*rows(), *rows("second", 0.5)) if row.run.method != "same"]
    lines = [line(row.run, row.measure, {**row.values, "seconds": 2.0}, row.units) for row in every]
    (folder / "results.jsonl").write_text("".join(lines))
    results = made_up.results(made_up.sae("BatchTopK"), made_up.sae("BatchTopK", 1))
    results["train"]["samples"] = 1000
    (folder / "synthetic" / "finite.json").write_text(json.dumps(results))
    sae = SAE(InferenceConfig(6, 20, k=4))
    write_slice(folder, Run("first", "good", 1.0, 0), sae, torch.linspace(0, 0.2, 20))


def _design(folder: Path) -> Any:
    study = load_study(folder / "design.json")
    found = read_rows(folder / "results.jsonl")
    return study.to_dict(), plan(study), [runs_of(study, stage, found) for stage in study.stages]


def _rows(folder: Path) -> Any:
    return read_rows(folder / "results.jsonl", ("first", "second"))


def _tables(folder: Path) -> Any:
    written = write_results(load_study(folder / "design.json"), folder, folder / "page.md")
    return [path.read_text() for path in written]


def _slice(folder: Path) -> Any:
    run, sae = read_slice(folder / SLICE, torch.device("cpu"))
    return run, sae.cfg, sae.encode(torch.ones(3, sae.d_in))


def targets() -> list[Target]:
    """All of them."""
    design, lines = strict("design.json"), File("results.jsonl", lines_damage, "lenient")
    return [
        Target("design of a study", "study", design, _design),
        Target("lines of a study", "study", (lines,), _rows),
        Target(
            "tables of a study", "study", (*design, lines, *strict("synthetic/finite.json")), _tables, 0.5, copies=True
        ),
        Target("latents of a study", "study", (File(SLICE, binary_damage, "lenient"),), _slice),
    ]
