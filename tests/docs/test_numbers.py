"""Numbers in the README and in the table of methods: those of the committed data, as precise as they are printed."""

import json
import math
import re
import statistics
import sys
from functools import cache
from pathlib import Path

from sampled_sae.experiments.design import load_study
from sampled_sae.reporting.study import Results, leading, read_rows
from sampled_sae.reporting.study_power import Spread, chance, seeds_needed, spread, together
from sampled_sae.utils.paired import Key

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from quality_runs import PRESETS  # noqa: E402

GEMMA = ("gemma-9", "gemma-14")
TRIALS = {n: PRESETS[n] for n in ("16k", "16k-k20", "16k-k120", "16k-layer6", "gemma-no-sinks")}
TOOLKITS = ("sampled-sae", "saelens", "dictionary_learning-raw", "sparsify-adam")


def read_lines(path: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]


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
    found: dict[str, dict[tuple, dict]] = {}  # by toolkit and run: the lines of its evaluations together
    for x in read_lines("docs/quality/runs.jsonl"):
        of_16k = (x["key"].get("d_sae"), x["key"].get("tokens")) == (16_384, 10_000_000)
        if x["what"] == "evaluation" and of_16k:
            name = x["key"]["toolkit"].replace("saelens-raw", "saelens")
            found.setdefault(name, {}).setdefault((x["key"]["toolkit"], x["key"]["lr"], x["key"]["seed"]), {}).update(x)
    for title, metric in (("CE loss recovered", "ce_recovered"), ("absorption](", "absorption")):
        # Of a peer the last run, which is its better one.
        values = {name: [run[metric] for run in runs.values()] for name, runs in found.items()}
        means = [statistics.fmean(v) if name == "sampled-sae" else v[-1] for name, v in values.items()]
        check(title, [dict(zip(values, means, strict=True))[name] for name in TOOLKITS])


def test_the_topk_phase():
    fvu: dict[tuple[str, str], list[float]] = {}
    settings = {(s.model, s.layer, s.d_sae, s.k, s.high_norm_factor): name for name, s in TRIALS.items()}
    for x in read_lines("docs/quality/runs.jsonl"):
        key = x["key"]
        place = (*(key.get(n) for n in ("model", "layer", "d_sae", "k")), key.get("high_norm_factor", 10.0))
        if x["what"] == "run" and place in settings and key["tokens"] == 10_000_000 and key["seed"] < 2:
            fvu.setdefault((key["toolkit"], settings[place]), []).append(x["fvu"]["select"])
    for x in read_lines("docs/quality/changes.jsonl"):
        if "setting" in x and x["setting"] in TRIALS and x["seed"] < 2:
            fvu.setdefault((x["name"], x["setting"]), []).append(x["fvu"]["select"])
    candidates = ("sampled-sae-batchtopk", "topk_until_0.03", "sampled-sae", "topk_until_0.1")
    section = (ROOT / "docs/quality.md").read_text().partition("### The TopK phase")[2].partition("###")[0]
    rows = [[c.strip(" *") for c in r.split("|")[2:-1]] for r in section.splitlines() if r.startswith("| ")][1:]
    for row, name in zip(rows, candidates, strict=True):
        means = [statistics.fmean(fvu[name, setting]) for setting in TRIALS]
        assert all(len(fvu[name, setting]) == 2 for setting in TRIALS)
        assert row == [f"{value:.5f}" for value in [*means, statistics.geometric_mean(means)]], name
    assert min(candidates, key=lambda n: math.prod(sum(fvu[n, setting]) for setting in TRIALS)) == "sampled-sae"


def test_a_topk_phase_of_ten_percent():
    fvu: dict[tuple[str, int], dict[int, float]] = {}
    for x in read_lines("docs/quality/runs.jsonl"):
        key = x["key"]
        at = tuple(key.get(name) for name in ("model", "layer", "d_sae", "tokens", "toolkit"))
        if x["what"] == "run" and at == ("smollm2", 12, 16_384, 10_000_000, "sampled-sae-batchtopk"):
            fvu.setdefault(("none", key["k"]), {})[key["seed"]] = x["fvu"]["select"]
    for x in read_lines("docs/quality/changes.jsonl"):
        if x.get("name") == "topk_until_0.1" and x["setting"] in ("16k", "16k-k120"):
            fvu.setdefault(("10%", TRIALS[x["setting"]].k), {})[x["seed"]] = x["fvu"]["select"]
    found = {k: statistics.fmean(fvu["10%", k].values()) / statistics.fmean(fvu["none", k].values()) for k in (120, 60)}
    assert all(set(fvu[name, k]) == {0, 1, 2} for name in ("none", "10%") for k in found)
    large, usual = (f"{found[k] - 1:.1%}" for k in (120, 60))
    pages = ("quality", "results", "howto/choose")
    quality, results_, choose = (" ".join((ROOT / f"docs/{page}.md").read_text().split()) for page in pages)
    assert f"with three seeds, 10% raises it by {large} at K = 120 and by {usual} in `16k` (`select`)" in quality
    assert f"a phase of 10% raises FVU by {large} at K = 120 and by {usual} at K = 60" in results_
    assert f"it costs {large} at K 120 and {usual} at K 60" in choose


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
    methods = ("batchtopk", "topk-then-batchtopk", "topk", "topk", "matryoshka")
    titles = ("BatchTopK ", "TopK for 30%", "TopK, at", "TopK, K", "Matryoshka BatchTopK ")
    for title, method in zip(titles, methods, strict=True):
        metric = "fvu_trained" if title == "TopK, K" else "fvu"
        check(title, [study(method, metric, setting=setting) for setting in ("primary", *GEMMA)])
    ratios = sorted(ratio for setting in results().settings for ratio in pool_ratios(setting))
    assert len([setting for setting in results().settings if pool_ratios(setting)]) == 8
    saes = len({row.run for row in results().rows if row.measure != "rate"})
    assert f"[study](docs/results.md) of {saes} SAEs" in text
    assert f"L2 pools have {ratios[0]:.1f} to {ratios[-1]:.1f} times BatchTopK's FVU in eight settings" in text


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


def test_jumprelu_on_a_small_language_model():
    changes = ({"lr_factor": 0.5}, {"lr_factor": 2.0}, {"bandwidth": 0.5}, {"bandwidth": 2.0}, {"penalty": 1.0})
    fvu: dict[tuple, list[float]] = {}
    for line in read_lines("docs/recipe/jumprelu.jsonl"):
        settings = {name: line.get(name) for name in ("lr_factor", "bandwidth", "penalty")}
        fvu.setdefault((line["method"], *settings.values()), []).append(line["fvu"])
    base, text = statistics.fmean(fvu["jumprelu", None, None, None]), (ROOT / "docs/method.md").read_text()
    batchtopk = statistics.fmean(fvu["batchtopk", None, None, None])
    assert f"JumpReLU has an FVU of {base:.4f}, BatchTopK {batchtopk:.4f}" in text
    cells_ = []
    for change in (*changes, {"penalty": 10.0}):
        found = fvu[("jumprelu", *(change.get(name) for name in ("lr_factor", "bandwidth", "penalty")))]
        assert len(found) == 2
        cells_.append(f"{statistics.fmean(found) / base - 1:+.1%}")
    assert f"| {' | '.join(cells_)} |" in text


def test_what_more_seeds_would_decide():
    declared = load_study(ROOT / "docs/results/design.json")
    rows = read_rows(ROOT / "docs/results/results.jsonl", declared.settings)
    models = {name: setting.model for name, setting in declared.settings.items()}
    results = Results(rows, models, (), {name: method.rate_of for name, method in declared.methods.items()})
    roles = {name: method.role for name, method in declared.methods.items()}
    baselines = [name for name, role in roles.items() if role == "baseline"]

    def spreads(setting: str, metric: str, measure: str = "", without: str = "") -> dict[str, list[Spread]]:
        def values(method: str) -> dict[Key, float]:
            own = results.measured(setting, method, metric, measure)
            return {key: value for key, value in own.items() if without not in key}

        return {
            leader: [it for baseline in baselines if (it := spread(values(leader), values(baseline)))]
            for leader in leading(rows, roles)
        }

    def every(found: dict[str, list[Spread]]) -> list[Spread]:
        return [it for own in found.values() for it in own]

    def most(found: list[Spread], margin: float = 0.01) -> str:
        return f"{chance(together(found), math.inf, margin):.0%}"

    page = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    fvu = {  # with the margin of each comparison
        seeds_needed(it, 0.01 * statistics.fmean(results.measured("primary", baseline, "fvu").values()))
        for own in spreads("primary", "fvu").values()
        for baseline, it in zip(baselines, own, strict=True)
    }
    assert f"(FVU: {min(fvu)} to {max(fvu)}, depending" in page
    few = [most(every(spreads("primary", metric))) for metric in ("probing_1", "probing_5")]
    assert f"at most {few[0]} at k = 1 and {few[1]} at k = 5." in page
    gemma = seeds_needed(together(every(spreads("gemma-9", "probing_5"))), 0.01)
    assert f"In `gemma-9`, {gemma} seeds would be enough at k = 5." in page
    further = [spreads("primary", metric, "finalists") for metric in ("probing_1", "probing_5")]
    each = [seeds_needed(it, 0.01) for it in every(further[0])]
    whole = seeds_needed(together(every(further[0])), 0.01)
    assert f"at k = 1, about {whole} seeds are enough ({min(each)} to {max(each)}," in page
    assert seeds_needed(together(every(further[1])), 0.01) is None
    assert f"no number of seeds is enough (at most {most(every(further[1]))})" in page
    smaller = every(spreads("primary", "probing_5", "finalists", without="sae-probes:compound-words"))
    left = seeds_needed(together(smaller), 0.01)
    assert f"Without this source, left out after seeing the results, it takes {left} seeds." in page
    pairs = dict(zip(baselines, further[1]["topk-then-batchtopk"], strict=True))
    topk, batchtopk, matryoshka = (seeds_needed(pairs[name], 0.01) for name in ("topk", "batchtopk", "matryoshka"))
    assert f"takes {topk} against TopK and {batchtopk} against BatchTopK;" in page and matryoshka is None
    assert f"against Matryoshka, the probability is at most {most([pairs['matryoshka']])}." in page
    letters = [every(spreads(setting, "absorption")) for setting in ("primary", "small")]
    shares = [most(own, 0.02) for own in letters]
    assert f"at most {shares[0]} in `primary` and {shares[1]} in `small`." in page
    fixed = [[Spread(it.seeds + it.rest / it.size, 0.0, 0.0, 1) for it in own] for own in letters]
    counts = [seeds_needed(together(own), 0.02) for own in fixed]
    assert f"it would take {counts[0]} seeds in `primary` and {counts[1]} in `small`." in page


def test_pools_in_all_settings():
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8").partition("### Reconstruction")[2].partition("###")[0]
    head, _, *rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    settings = [cell.strip(" `") for cell in head[1:]]
    assert {setting for setting in results().settings if pool_ratios(setting)} == set(settings)
    for name, *cells_ in rows:
        pools = [results().measured(setting, name.strip(" `"), "fvu") for setting in settings]
        for setting, cell, pool in zip(settings, cells_, pools, strict=True):
            assert bool(cell.strip()) == bool(pool)
            if pool:
                ratio = statistics.fmean(pool.values()) / study("batchtopk", "fvu", setting=setting)
                assert cell.strip() == f"{ratio:.{len(cell.strip().partition('.')[2])}f}", (name, setting)


def test_the_best_trade_off():
    rows = read_lines("docs/results/results.jsonl")

    def mean(setting: str, method: str, factor: float, metric: str, measure: str = "") -> float:
        usual = "core" if metric in ("fvu", "alive") else "absorption" if metric == "absorption" else "probing"
        measure = measure or usual
        key = {"setting": setting, "method": method, "factor": factor, "measure": measure}
        return statistics.fmean(row["values"][metric] for row in rows if key.items() <= row.items())

    page = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    part = page[page.index("### The best trade-off") : page.index("### Reconstruction")]
    base = {name: mean("primary", "batchtopk", 1.0, name) for name in ("fvu", "alive", "absorption", "probing_5")}
    near = {name: mean("primary", "topk-then-batchtopk", 1.0, name) for name in base}
    rates = {"gemma-9": 0.5}
    assert f"its FVU is {near['fvu'] / base['fvu'] - 1:.1%} above" in part
    assert f"({near['absorption']:.3f} instead of {base['absorption']:.3f}; the verdict is only not worse)" in part
    assert f"({near['alive']:.0%} instead of {base['alive']:.0%})" in part

    def more(setting: str, method: str, factor: float) -> str:
        batchtopk = mean(setting, "batchtopk", rates.get(setting, 1.0), "fvu")
        return f"{mean(setting, method, factor, 'fvu') / batchtopk - 1:.0%}"

    released = [more(setting, "l2-released", 1.0) for setting in ("primary", "small", "gemma-9")]
    assert "by {} (`primary`), {} (`small`) and {} (`gemma-9`)".format(*released) in part
    others = [more(setting, "l2-l100", 1.0) for setting in ("gemma-9", "layer-20", "small", "layer-6")]
    assert others == sorted(others, key=lambda percent: int(percent[:-1]))
    words = f"by {more('primary', 'l2-l100', 2.0)} in `primary` and by {others[0]} to {others[-1]} in [other settings]"
    assert words in part
    assert f"({mean('primary', 'l2-l100', 2.0, 'probing_5'):.3f} instead of {base['probing_5']:.3f} on six" in part
    live = [f"{mean('primary', 'l2-l100', factor, 'alive'):.0%}" for factor in (1.0, 2.0)]
    slow, fast = (mean("primary", "l2-l100", factor, "fvu") for factor in (1.0, 2.0))
    assert f"{live[0]} of the latents of `l2-l100` are live (BatchTopK: {base['alive']:.0%})" in part
    assert f"its FVU is {slow:.3f}; at twice that rate, {live[1]} are live, and its FVU is {fast:.3f}." in part
    short = [
        min(row.values["fvu"] for row in results().rows if (row.run[:2], row.measure) == (("primary", method), "rate"))
        for method in ("l2-l100", "batchtopk")
    ]
    words = f"FVU is {short[0] / short[1]:.2f} times BatchTopK's after 5M tokens (one seed, selection text)"
    assert f"{words} and {fast / base['fvu']:.2f} times after 25M" in part
    fell, rose = (
        mean("primary", "l2-l100", 2.0, name, "finalists") - mean("primary", "batchtopk", 1.0, name, "finalists")
        for name in ("probing_1", "probing_5")
    )
    assert f"{rose:.3f} higher on 133, MDD" in part and f"it is {-fell:.3f} lower on 133 datasets" in part
