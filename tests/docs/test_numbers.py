"""Numbers in the README and in the table of methods: those of the committed data, as precise as they are printed."""

import json
import re
import statistics
from functools import cache
from pathlib import Path

from sampled_sae.experiments.design import load_study
from sampled_sae.reporting.study import Results, read_rows

ROOT = Path(__file__).parents[2]
GEMMA = ("gemma-9", "gemma-14")
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
    for title, setting in (("FVU, SmolLM2-135M", "16k"), ("FVU, Gemma 3 270M", "gemma-no-sinks")):
        fvu: dict[str, list[float]] = {}  # several seeds of some
        for run in data[setting]["full"]:
            fvu.setdefault(run["toolkit"].replace("saelens-raw", "saelens"), []).append(run["fvu"]["wide"])
        middle = {"saelens": min}  # the better one of its two variants
        check(title, [middle.get(name, statistics.fmean)(fvu[name]) for name in TOOLKITS])
    lines = map(json.loads, (ROOT / "docs/quality/runs.jsonl").read_text().splitlines())
    of_16k = [x for x in lines if x["what"] == "evaluation" and x["key"]["tokens"] == 10_000_000]
    evaluated = {x["key"]["toolkit"]: x for x in of_16k}
    check("CE loss recovered", [evaluated[name]["ce_recovered"] for name in TOOLKITS])
    check("absorption](", [evaluated[name]["absorption"] for name in TOOLKITS])


@cache
def results() -> Results:
    """All rows of the study."""
    design = load_study(ROOT / "docs/results/design.json")
    rows = read_rows(ROOT / "docs/results/results.jsonl")
    return Results(rows, {name: it.model for name, it in design.settings.items()})


def study(method: str, metric: str, measure: str = "core", setting: str = "primary", middle=statistics.fmean) -> float:
    """The mean over seeds in a setting of the study, with the learning rate that counts there."""
    wanted = (setting, method, measure)
    found = [row for row in results().rows if (row.run.setting, row.run.method, row.measure) == wanted]
    if metric != "seconds":  # not measured where runs shared the GPU
        found = [row for row in found if row.run.factor == results().best(setting, method)]
    found = [row for row in found if metric in row.values]
    assert len(found) >= 3 or (method, setting) == ("short-topk", "gemma-9"), method
    return middle(row.values[metric] for row in found)


def pool_ratios(setting: str) -> list[float]:
    """FVU of each L2 pool that was run in a setting, as a multiple of BatchTopK's with the same seeds."""
    base = results().measured(setting, "batchtopk", "fvu")
    methods = {"l2-l5", "l2-l30", "l2-l100"} & set(results().methods(setting))
    pools = [results().measured(setting, method, "fvu") for method in methods]
    return [sum(pool.values()) / sum(base[seed] for seed in pool) for pool in pools]


def test_the_answer_to_which_method():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    pattern = r"seeds\): (\S+), against (\S+) for TopK followed by BatchTopK, (\S+) for Matryoshka and (\S+) for TopK "
    pattern += r"\((\S+) without a threshold\)"
    methods = ("batchtopk", "topk-then-batchtopk", "matryoshka", "topk")
    expected = [*(study(method, "fvu") for method in methods), study("topk", "fvu_trained")]
    assert re.search(pattern, text).groups() == tuple(f"{value:.4f}" for value in expected)
    pattern = r"TopK followed by BatchTopK is ahead: (\S+) and (\S+), BatchTopK (\S+) and (\S+)\. "
    expected = [study(m, "fvu", setting=s) for m in ("topk-then-batchtopk", "batchtopk") for s in GEMMA]
    assert re.search(pattern, text).groups() == tuple(f"{value:.4f}" for value in expected)
    ratios = sorted(ratio for setting in results().settings for ratio in pool_ratios(setting))
    assert len([setting for setting in results().settings if pool_ratios(setting)]) == 8
    saes = len({row.run for row in results().rows if row.measure != "rate"})
    assert f"[study](docs/results.md) of {saes} SAEs" in text
    assert f"its L2 pools have {ratios[0]:.1f} to {ratios[-1]:.1f} times BatchTopK's FVU in eight settings" in text


def test_the_table_of_methods():
    rows = [r.split("|")[1:-1] for r in (ROOT / "docs/howto/choose.md").read_text().splitlines() if r.startswith("| `")]
    names = {"topk_then_batchtopk:until=0.3": "topk-then-batchtopk"}
    columns = [("fvu", "core"), ("ce_recovered", "core"), ("probing_5", "probing"), ("absorption", "absorption")]
    checked = 0
    for title, *cells_ in ([cell.strip(" *`") for cell in row] for row in rows):
        if not title.startswith(("batchtopk", "topk", "matryoshka", "sampled:score=l2")) or len(cells_) < 6:
            continue
        method = names.get(title, re.sub(r"sampled:score=(\w+),l=(\d+)", r"\1-l\2", title))
        for cell, (metric, measure) in zip(cells_[:4], columns, strict=True):
            assert cell == f"{study(method, metric, measure):.{len(cell.partition('.')[2])}f}", (title, metric)
        assert cells_[4] == f"{study(method, 'alive'):.0%}"
        assert cells_[5] == f"{study(method, 'seconds', middle=statistics.median):.1f}"
        checked += 1
    assert checked == 7
    names = ("topk-then-batchtopk", "topk", "batchtopk", "matryoshka")
    rows = [r.split("|")[2:-1] for r in (ROOT / "docs/howto/choose.md").read_text().splitlines() if "| layer " in r]
    expected = [[f"{study(name, 'fvu', setting=setting):.4f}" for name in names] for setting in GEMMA]
    assert [[cell.strip(" *") for cell in row] for row in rows] == expected


def test_a_short_topk_phase():
    text = (ROOT / "docs/howto/choose.md").read_text()
    rows = [r.split("|")[2:-1] for r in text.splitlines() if r.startswith(("| SmolLM2, ", "| Gemma, "))]
    settings = ("layer-6", "small", "k20", "k120", "layer-20", "gemma-9")
    for row, setting in zip(rows, settings, strict=True):
        expected = [f"{study(method, 'fvu', setting=setting):.4f}" for method in ("batchtopk", "short-topk")]
        assert [cell.strip(" *") for cell in row] == expected, setting
        _, verdict = results().difference(setting, "short-topk", "batchtopk", "fvu")
        assert (verdict == "better") == ("**" in row[1]) and "**" not in row[0], setting
