"""Tables and the picture of docs/quality.md from the finished runs of benchmarks/quality.py.

    python benchmarks/quality_table.py RUNS.jsonl [--picture docs/images/quality.png] [--out docs/quality/results.json]

The picture needs plotly and kaleido (and a Chrome for it).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quality_runs import PRESETS, Results, Setting, key

from sampled_sae.reporting.palette import TOOLKITS

OURS = "sampled-sae"
NAMES = {
    OURS: "sampled-sae, defaults",
    "saelens": "SAELens",
    "dictionary_learning": "dictionary_learning, normalized inputs",
    "dictionary_learning-raw": "dictionary_learning",
    "sparsify": "sparsify",
    "sparsify-adam": "sparsify, Adam",
}
Run = dict[str, Any]


def runs_of(results: Results, setting: Setting, tokens: int) -> list[Run]:
    """Runs of one length in a setting, ours first, with their evaluations."""
    found = []
    for line in results.lines:
        if line["what"] != "run":
            continue
        about = line["key"]
        if about == key(setting, about["toolkit"], about["lr"], tokens, about["seed"]):
            more = results.get(about, "evaluation") or {}
            found.append({**about, **line, "lr": line.get("lr") or about["lr"], "evaluation": more})
    return sorted(found, key=lambda run: (list(NAMES).index(run["toolkit"]), run["seed"], run["lr"]))


def best_runs(runs: list[Run]) -> list[Run]:
    """The lowest FVU on `select` of each toolkit; of ours all seeds."""
    best: dict[Any, Run] = {}
    for run in runs:
        which = (run["toolkit"], run["seed"])
        if which not in best or run["fvu"]["select"] < best[which]["fvu"]["select"]:
            best[which] = run
    return list(best.values())


def number(value: float | None, form: str = ".4f") -> str:
    return "" if value is None else format(value, form)


def searched(results: Results, setting: Setting) -> set[str]:
    """Peers whose search for a learning rate is finished."""
    tokens = setting.select_tokens
    return {toolkit for toolkit in NAMES if results.get(key(setting, toolkit, None, tokens), "selected")}


def table(runs: list[Run], finished: set[str]) -> str:
    """Markdown table of one length; "ours less by" compares on the last set of held-out tokens."""
    last = "wide" if "wide" in runs[0]["fvu"] else "report"
    ours = [run["fvu"][last] for run in runs if run["toolkit"] == OURS]
    mean = sum(ours) / len(ours) if ours else None
    head = ["", "lr", *(f"FVU, {name}" for name in runs[0]["fvu"]), "ours less by", "L0", "dead", "CE recovered"]
    head += ["absorption", "F1", "probing, k = 1", "k = 5", "seconds"]
    rows = [head, ["---"] * len(head)]
    for run in runs:
        e, theirs = run["evaluation"], run["fvu"][last]
        less = "" if mean is None or run["toolkit"] == OURS else f"{1 - mean / theirs:.1%}"
        probing = e.get("probing", {})
        name = NAMES[run["toolkit"]] + ("" if run["toolkit"] in {*finished, OURS} else " (search unfinished)")
        rows.append(
            [name, f"{run['lr']:.2g}" if run["lr"] else "", *map(number, run["fvu"].values()), less]
            + [number(run["l0"][last], ".1f"), number(run.get("dead"), ".1%"), number(e.get("ce_recovered"))]
            + [number(e.get("absorption"), ".3f"), number(e.get("main_f1"), ".2f")]
            + [number(probing.get(k), ".3f") for k in ("1", "5")]
            + [number(run["seconds"], ".1f")]
        )
    used = [i for i in range(len(head)) if i == 0 or any(row[i] for row in rows[2:])]
    return "\n".join("| " + " | ".join(row[i] for i in used) + " |" for row in rows)


def rates(runs: list[Run], which: str = "select") -> str:
    """Markdown table: FVU of every rate of the selection."""
    rows = ["| | lr: FVU on select |", "|---|---|"]
    for toolkit in NAMES:
        mine = [run for run in runs if run["toolkit"] == toolkit]
        best = min((run["fvu"][which] for run in mine), default=None)
        shown = [(f"{run['lr']:.2g}: {run['fvu'][which]:.4f}", run["fvu"][which] == best) for run in mine]
        if shown:
            cells = ", ".join(f"**{text}**" if bold and len(shown) > 1 else text for text, bold in shown)
            rows.append(f"| {NAMES[toolkit]} | {cells} |")
    return "\n".join(rows)


def title(setting: Setting) -> str:
    return f"{setting.model}, layer {setting.layer}, d_sae {setting.d_sae:,}, K {setting.k}"


def draw(results: Results, names: list[str], path: Path) -> None:
    """FVU against GPU seconds: hollow the selection, filled full length, joined at the best rate.

    Small markers are the other rates, and all rates of a search that is not finished.
    """
    from plotly.subplots import make_subplots

    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    titles = [f"{title(PRESETS[n])}<br>{PRESETS[n].tokens // 10**6}M tokens" for n in names]
    figure = make_subplots(
        rows=rows, cols=columns, subplot_titles=titles,
        horizontal_spacing=0.06, vertical_spacing=0.18,
    )  # fmt: skip
    shown: set[str] = set()
    for index, name in enumerate(names):
        setting, of_best = PRESETS[name], list[float]()
        place = {"row": index // columns + 1, "col": index % columns + 1}
        lengths = sorted({setting.select_tokens, setting.tokens})
        for toolkit, color in TOOLKITS.items():
            every = {t: [r for r in runs_of(results, setting, t) if r["toolkit"] == toolkit] for t in lengths}
            whole = [run for runs in every.values() for run in runs]
            if not whole:
                continue
            done = toolkit in {OURS, *searched(results, setting)}
            best = [best_runs(runs)[0] for runs in every.values() if runs and done]
            last = "wide" if "wide" in whole[0]["fvu"] else "report"
            common = place | {"legendgroup": toolkit}
            figure.add_scatter(
                x=[r["seconds"] for r in best], y=[r["fvu"][last] for r in best], mode="lines+markers",
                name=NAMES[toolkit], line={"color": color, "width": 2}, showlegend=bool(best) and toolkit not in shown,
                marker={"size": 11, "color": [color if r["tokens"] == setting.tokens else "white" for r in best],
                        "line": {"color": color, "width": 2}},
                **common,
            )  # fmt: skip
            rest = [run for run in whole if run not in best]
            figure.add_scatter(
                x=[r["seconds"] for r in rest], y=[r["fvu"][last] for r in rest], mode="markers", showlegend=False,
                marker={"size": 6, "symbol": "circle-open", "color": color}, **common,
            )  # fmt: skip
            shown |= {toolkit} if best else set()
            of_best += [r["fvu"][last] for r in best]
        ticks = [1, 2, 5, 10, 20, 50, 100, 200, 500]
        figure.update_xaxes(
            type="log", tickvals=ticks, ticktext=[str(t) for t in ticks],
            title="GPU seconds of training" if place["row"] == rows else None, **place,
        )  # fmt: skip
        low, high = min(of_best), max(of_best)  # without failed rates
        within = [low - 0.08 * (high - low), high + 0.08 * (high - low)]
        figure.update_yaxes(range=within, tickformat=".3f", title="FVU" if place["col"] == 1 else None, **place)
    figure.update_annotations(font_size=14)
    figure.update_layout(
        template="plotly_white", font={"size": 14}, width=120 + 400 * columns, height=180 + 320 * rows,
        legend={"orientation": "h", "y": -0.12 if rows > 1 else -0.2}, margin={"t": 70, "l": 70, "r": 20},
    )  # fmt: skip
    figure.write_image(path, scale=1.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path, help="write the best runs as JSON there")
    a = parser.parse_args()
    results = Results(a.runs)
    content, there = {}, []
    for name, setting in PRESETS.items():
        short, full = (runs_of(results, setting, tokens) for tokens in (setting.select_tokens, setting.tokens))
        if not full:
            continue
        there.append(name)
        done = searched(results, setting)
        print(f"\n## {name}: {title(setting)}\n\n{setting.tokens:,} tokens:\n\n{table(best_runs(full), done)}")
        if short:
            print(f"\n{setting.select_tokens:,} tokens:\n\n{table(best_runs(short), done)}\n\n{rates(short)}")
        content[name] = {"full": best_runs(full), "select": best_runs(short), "searched": sorted(done)}
    if a.out:
        a.out.write_text(json.dumps(content, indent=1) + "\n")
    if a.picture:
        draw(results, there, a.picture)


if __name__ == "__main__":
    main()
