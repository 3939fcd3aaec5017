"""Numbers in the README's comparison: those of the committed data, as precise as they are printed."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLKITS = ("sampled-sae", "saelens", "dictionary_learning-raw", "sparsify-adam")


def cells(title: str) -> list[str]:
    """The cells of the row of that title."""
    rows = [row for row in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if row.startswith("|")]
    row = next(row for row in rows if title in row.split("|")[1])
    return [cell.strip(" *") for cell in row.split("|")[2:-1]]


def check(title: str, measured: list[float | None]) -> None:
    for cell, value in zip(cells(title), measured, strict=True):
        if value is None:
            assert cell == ""
        else:
            digits = len(cell.partition(".")[2])
            assert cell == f"{value:.{digits}f}", (title, cell, value)


def test_step_times():
    ms = {name: each["ms"] for name, each in json.loads((ROOT / "docs/speed/step.json").read_text())["figures"].items()}
    peers = ("SAELens BatchTopK, autocast", "dictionary_learning BatchTopK, bf16 autocast")
    check("ms per step", [ms["sampled-sae BatchTopK"], *(ms[name] for name in peers), None])
    check("the same, TopK", [ms["sampled-sae TopK"], None, None, ms["sparsify TopK, bf16, fused Adam"]])


def test_quality():
    data = json.loads((ROOT / "docs/quality/results.json").read_text())
    for title, setting in (("FVU, SmolLM2-135M", "16k"), ("FVU, Gemma 3 270M", "gemma")):
        runs = {run["toolkit"]: run for run in data[setting]["full"]}
        check(title, [runs[name]["fvu"]["wide"] for name in TOOLKITS])
    evaluated = {run["toolkit"]: run["evaluation"] for run in data["16k"]["full"]}
    check("CE loss recovered", [evaluated[name]["ce_recovered"] for name in TOOLKITS])
    check("absorption](", [evaluated[name]["absorption"] for name in TOOLKITS])


def test_the_answer_to_which_method():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rates = [json.loads(line) for line in (ROOT / "docs/recipe/rates.jsonl").read_text().splitlines()]
    runs = [run for run in rates if run.get("use") == "seeds" and run["lr"] > 0.0012]  # at the rule's rate
    found = re.search(r"FVU (0\.\d+) on SmolLM2-135M \(\[three seeds\]", text)
    assert found and len(runs) == 3
    assert found[1] == f"{sum(run['fvu_report'] for run in runs) / 3:.4f}"
    runs = [json.loads(line) for line in (ROOT / "docs/recipe/absorption.jsonl").read_text().splitlines()]
    topk, batchtopk = re.search(r"TopK at a threshold is worse \((0\.\d+) against (0\.\d+), one seed\)", text).groups()
    printed = {f"{value:.3f}" for run in runs for key, value in run.items() if key == "fvu_report"}
    assert {topk, batchtopk} <= printed, printed
