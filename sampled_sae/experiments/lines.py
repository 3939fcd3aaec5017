"""Results of evaluations as lines of a study's results.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sampled_sae.evals import get_evaluation
from sampled_sae.experiments.design import Measure
from sampled_sae.reporting.study import Run
from sampled_sae.sae import SAE
from sampled_sae.utils.measures import find

EVALUATIONS: dict[str, str] = {"select": "core", "finalists": "probing"}  # others have the evaluation's own name


def values_of(measure: Measure, result: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation's result."""
    evaluation = get_evaluation(EVALUATIONS.get(measure, measure))
    found = {metric.name: find(metric, result) for metric in evaluation.metrics}
    values = {name: value.value for name, value in found.items() if value is not None}
    return values | ({"fvu_matched": result["matched"]} if result.get("matched") is not None else {})


def seconds_of(measure: Measure, sae: SAE) -> dict[str, float]:
    """Training time, beside the core metrics."""
    return {"seconds": sae.cfg.metadata["training"]["seconds"]} if measure == "core" else {}


def line(run: Run, measure: str, values: Mapping[str, float | None], units: Mapping[str, Any] | None = None) -> str:
    """A result as one line of results.jsonl: metrics, and those of single datasets or letters."""
    rounded = {name: round(value, 6) for name, value in values.items() if value is not None}
    row: dict[str, Any] = {**run._asdict(), "measure": measure, "values": rounded, "units": units or {}}
    return json.dumps({name: value for name, value in row.items() if value != {}}, separators=(",", ":")) + "\n"


def units_of(measure: Measure, result: Mapping[str, Any]) -> dict[str, Any]:
    """For each dataset or letter its source and its metrics."""
    if measure == "absorption":
        return {
            letter["letter"]: [
                "",
                {"absorption": round(letter["fraction"], 4), "absorption_f1": round(_main_f1(letter), 4)},
            ]
            for letter in result["letters"]
            if letter["why_not"] is None and letter["fraction"] is not None
        }
    if EVALUATIONS.get(measure, measure) != "probing":
        return {}
    return {
        one["name"]: [
            one["source"],
            {f"probing_{k}": round(s["accuracy"]["mean"], 4) for k, s in one["summary"]["top"].items()},
        ]
        for one in result["datasets"]
    }


def _main_f1(letter: Mapping[str, Any]) -> float:
    main = len(letter["main"])
    return float(letter["sparse_f1"][main - 1]) if main else 0.0
