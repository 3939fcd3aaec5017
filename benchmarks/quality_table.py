"""Tables and the picture of docs/quality.md from the finished runs of benchmarks/quality.py.

    python benchmarks/quality_table.py RUNS.jsonl [--page docs/quality.md] [--out docs/quality/results.json] \
        [--picture docs/images/quality.png]

`--page` replaces what is between `<!-- begin NAME -->` and `<!-- end NAME -->`. The picture needs plotly and kaleido
(and a Chrome for it).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from quality_runs import PRESETS, Results, Setting, best_rate, key, next_rate

from sampled_sae.reporting.palette import TOOLKITS
from sampled_sae.reporting.study_page import fill_page

OURS, BATCHTOPK = "sampled-sae", "sampled-sae-batchtopk"
OWN = (OURS, BATCHTOPK)
NAMES = {
    OURS: "**sampled-sae, defaults**",
    BATCHTOPK: "sampled-sae, `batchtopk`",
    "saelens": "SAELens",
    "saelens-raw": "SAELens, raw inputs",
    "dictionary_learning": "dictionary_learning, normalized inputs",
    "dictionary_learning-raw": "dictionary_learning",
    "sparsify": "sparsify",
    "sparsify-adam": "sparsify, Adam",
}
Run = dict[str, Any]
Row = list[str]


def runs_of(results: Results, setting: Setting, tokens: int) -> list[Run]:
    """Runs of one length in a setting, ours first, with their evaluations."""
    found = []
    for line in results.lines:
        if line["what"] != "run":
            continue
        about = line["key"]
        if about == key(setting, about["toolkit"], about["lr"], tokens, about["seed"]):
            lr = line.get("lr") or about["lr"]
            found.append({**about, **line, "lr": lr, "evaluation": results.evaluation(about)})
    return sorted(found, key=lambda run: (list(NAMES).index(run["toolkit"]), run["seed"], run["lr"]))


def best_runs(runs: list[Run]) -> list[Run]:
    """All seeds of ours, and of each peer's rate that has the lowest FVU on `select` with seed 0."""
    best = []
    for toolkit in NAMES:
        mine = [run for run in runs if run["toolkit"] == toolkit]
        if toolkit not in OWN and mine:
            lr = best_rate({run["lr"]: run["fvu"]["select"] for run in mine if run["seed"] == 0})
            mine = [run for run in mine if run["lr"] == lr]
        best += mine
    return best


def finished(results: Results, setting: Setting, toolkit: str, tokens: int | None = None) -> bool:
    """Whether both neighbors of the peer's best rate were tried, by default in the search."""
    rates = results.rates(setting, toolkit, tokens or setting.select_tokens)
    return bool(rates) and next_rate(rates, min(rates)) is None


# ---- tables -------------------------------------------------------------------------------------------


def number(value: float | None, form: str = ".4f") -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there) if there else None


def span(values: list[float]) -> str:
    """One decimal; the range where seeds differ by over 5%."""
    low, high = min(values), max(values)
    return f"{fmean(values):.1f}" if high <= 1.05 * low else f"{low:.1f} to {high:.1f}"


def by_toolkit(runs: list[Run], held: str) -> list[list[Run]]:
    """The best runs of each toolkit: ours first, then the peers from low to high FVU."""
    best = best_runs(runs)
    groups = [[run for run in best if run["toolkit"] == toolkit] for toolkit in NAMES]
    there = [group for group in groups if group]
    own = [group for group in there if group[0]["toolkit"] in OWN]
    peers = [group for group in there if group[0]["toolkit"] not in OWN]
    return [*own, *sorted(peers, key=lambda group: fmean(run["fvu"][held] for run in group))]


def last_set(runs: list[Run]) -> str:
    """The held-out tokens on which toolkits are compared."""
    return "wide" if "wide" in runs[0]["fvu"] else "report"


def less(groups: list[list[Run]], theirs: list[Run], held: str) -> float | None:
    """How far our mean FVU is below a peer's, as a share of the peer's."""
    ours = [run["fvu"][held] for group in groups for run in group if run["toolkit"] == OURS]
    return 1 - fmean(ours) / fmean(run["fvu"][held] for run in theirs) if ours else None


def rows_of(results: Results, setting: Setting, runs: list[Run]) -> list[Row]:
    """A row for each toolkit at its best rate, means over seeds."""
    held = last_set(runs)
    groups, rows = by_toolkit(runs, held), []
    for group in groups:
        toolkit, seeds = group[0]["toolkit"], len(group)
        name = NAMES[toolkit] + (f", mean of {seeds} seeds" if seeds > 1 else "")
        if toolkit not in OWN and not any(finished(results, setting, toolkit, n) for n in {None, group[0]["tokens"]}):
            name += ", search unfinished"
        fvu = [number(mean(run["fvu"][which] for run in group)) for which in group[0]["fvu"]]
        under = "" if toolkit == OURS else percent(less(groups, group, held))
        l0, dead = mean(run["l0"][held] for run in group), mean(run.get("dead") for run in group)
        row = [name, number(group[0]["lr"], ".2g"), *fvu, under, number(l0, ".1f"), number(dead, ".1%")]
        rows.append([*row, span([run["seconds"] for run in group])])
    return rows


def percent(value: float | None) -> str:
    """Two digits from 10% on, else one decimal."""
    return "" if value is None else f"{value:.0%}" if value >= 0.0995 else f"{value:.1%}"


def markdown(head: Row, rows: list[Row]) -> str:
    """A Markdown table; columns without a value are left out."""
    used = [i for i in range(len(head)) if i == 0 or any(row[i] for row in rows)]
    lines = [[head[i] for i in used], ["---"] * len(used), *([row[i] for i in used] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def about(name: str) -> str:
    """A setting as a line of a table."""
    s = PRESETS[name]
    model = "" if s.model == "smollm2" else f"{s.model}, "
    limit = "" if s.high_norm_factor == 10 else f", tokens above {s.high_norm_factor:g} times the median norm left out"
    return f"*`{name}`: {model}layer {s.layer}, d_sae {s.d_sae:,}, K {s.k}{limit}*"


def length(tokens: int) -> str:
    return f"{tokens // 10**6}M tokens" if tokens >= 10**6 else f"{tokens:,} tokens"


def fvu_table(results: Results, names: list[str], full: bool) -> str:
    """FVU of every toolkit at its best rate, one length or the search."""
    rows, sets = list[Row](), list[str]()
    for name in names:
        s = PRESETS[name]
        runs = runs_of(results, s, s.tokens if full else s.select_tokens)
        if runs:
            sets = [which for which in runs[0]["fvu"] if which != "select"]
            rows += [[about(name), *[""] * (len(runs[0]["fvu"]) + 5)], *rows_of(results, s, runs)]
    return markdown(["", "lr", "FVU, select", *sets, "ours lower by", "L0", "dead", "GPU s"], rows)


def rates_table(results: Results, names: list[str], full: bool) -> str:
    """FVU on `select` of every rate, at full length of peers with several; bold: the best of them."""
    rows = list[Row]()
    for name in names:
        s = PRESETS[name]
        tokens, found = s.tokens if full else s.select_tokens, list[Row]()
        for toolkit in NAMES:
            fvu = results.rates(s, toolkit, tokens) if toolkit not in OWN else {}
            cells = [f"{lr:.2g}: {fvu[lr]:.4f}" for lr in sorted(fvu)]
            if len(fvu) > 1:
                cells = [f"**{c}**" if lr == best_rate(fvu) else c for c, lr in zip(cells, sorted(fvu), strict=True)]
            if len(fvu) > full:
                found.append(
                    [NAMES[toolkit], ", ".join(cells), "yes" if finished(results, s, toolkit, tokens) else "no"]
                )
        rows += [[about(name), "", ""], *found] if found else []
    return markdown(["", "lr: FVU", "both neighbors worse"], rows) if rows else "Each peer ran at one rate."


def margins(results: Results, names: list[str]) -> str:
    """Our FVU against that of the best peer, in every setting at full length and in the search."""
    rows = list[Row]()
    done = set[tuple[Any, ...]]()
    for name in names:
        s = PRESETS[name]
        for tokens in (s.select_tokens, s.tokens):
            runs = runs_of(results, s, tokens)
            which = tuple(key(s, "", None, tokens).items())
            groups = by_toolkit(runs, last_set(runs)) if runs else []
            peers = [group for group in groups if group[0]["toolkit"] not in OWN]
            if not peers or groups[0][0]["toolkit"] != OURS or which in done:
                continue
            done.add(which)
            best, tried = peers[0], [group[0]["toolkit"] for group in peers]
            tuned = [finished(results, s, toolkit, tokens) for toolkit in tried]
            under = percent(less(groups, best, last_set(runs)))
            row = [f"`{name}`", length(tokens), under, NAMES[best[0]["toolkit"]], f"{len(groups[0])}, {len(best)}"]
            rows.append([*row, f"{sum(tuned)} of {len(tuned)}"])
    head = ["", "", "ours lower by", "best peer", "seeds (ours, peer)", "peers with both neighboring rates worse"]
    return markdown(head, rows)


def evaluations(results: Results, names: list[str]) -> str:
    """CE loss recovered, absorption and probing, a row for each SAE."""
    rows = list[Row]()
    for name in names:
        every = runs_of(results, PRESETS[name], PRESETS[name].tokens)
        best = {run["toolkit"]: run["lr"] for run in best_runs(every)}
        runs = [run for run in every if run["evaluation"]]
        seeds = len({run["seed"] for run in runs}) > 1
        rows += [[f"*`{name}`*", *[""] * 5]] if runs else []
        for run in runs:
            e = run["evaluation"]
            title = NAMES[run["toolkit"]] + (f", seed {run['seed']}" if seeds and run["toolkit"] in OWN else "")
            if run["lr"] != best[run["toolkit"]]:
                title += f" at lr {run['lr']:g} (best: {best[run['toolkit']]:g})"
            values = [
                number(e.get("ce_recovered")),
                number(e.get("absorption"), ".3f"),
                number(e.get("main_f1"), ".2f"),
            ]
            rows.append([title, *values, *(number(e.get("probing", {}).get(k), ".3f") for k in ("1", "5"))])
    return markdown(
        ["", "CE loss recovered", "absorption fraction", "F1 of main latents", "probing, k = 1", "k = 5"], rows
    )


def blocks(results: Results) -> dict[str, str]:
    """The tables of the page by name."""
    names = [name for name, s in PRESETS.items() if runs_of(results, s, s.tokens)]
    short: dict[Any, str] = {}  # settings that share a search: the first of them
    for name in names:
        s = PRESETS[name]
        if runs_of(results, s, s.select_tokens):
            short.setdefault(tuple(key(s, "", None, s.select_tokens).items()), name)
    lengths = dict.fromkeys(PRESETS[name].tokens for name in names)
    full = [
        f"**{length(tokens)}:**\n\n" + fvu_table(results, [n for n in names if PRESETS[n].tokens == tokens], True)
        for tokens in lengths
    ]
    return {
        "margins": margins(results, names),
        "full": "\n\n".join(full),
        "full-rates": rates_table(results, names, True),
        "evaluations": evaluations(results, names),
        "search": fvu_table(results, list(short.values()), False),
        "search-rates": rates_table(results, list(short.values()), False),
    }


def title(setting: Setting) -> str:
    """Of a panel of the picture."""
    limit = "" if setting.high_norm_factor == 10 else f", norms up to {setting.high_norm_factor:g} medians"
    what = f"{setting.model}, layer {setting.layer}, d_sae {setting.d_sae:,}, K {setting.k}"
    return f"{what}<br>{length(setting.tokens)}{limit}"


def draw(results: Results, names: list[str], path: Path) -> None:
    """FVU against GPU seconds: hollow the selection, filled full length, joined at the best rate.

    Small markers are the other rates.
    """
    from plotly.subplots import make_subplots

    columns = min(3 if len(names) in (5, 6, 9) else 4, len(names))
    rows = -(-len(names) // columns)
    titles = [title(PRESETS[name]) for name in names]
    figure = make_subplots(
        rows=rows, cols=columns, subplot_titles=titles,
        horizontal_spacing=0.06, vertical_spacing=0.36 / rows,
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
            best, last = [best_runs(runs)[0] for runs in every.values() if runs], last_set(whole)
            common = place | {"legendgroup": toolkit}
            figure.add_scatter(
                x=[r["seconds"] for r in best], y=[r["fvu"][last] for r in best], mode="lines+markers",
                name=NAMES[toolkit].strip("*"), line={"color": color, "width": 2},
                showlegend=toolkit not in shown,
                marker={"size": 11, "color": [color if r["tokens"] == setting.tokens else "white" for r in best],
                        "line": {"color": color, "width": 2}},
                **common,
            )  # fmt: skip
            rest = [run for run in whole if run not in best]
            figure.add_scatter(
                x=[r["seconds"] for r in rest], y=[r["fvu"][last] for r in rest], mode="markers", showlegend=False,
                marker={"size": 6, "symbol": "circle-open", "color": color}, **common,
            )  # fmt: skip
            shown.add(toolkit)
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
    parser.add_argument("--page", type=Path, help="fill the tables of this Markdown file")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path, help="write the best runs as JSON there")
    a = parser.parse_args()
    results = Results(a.runs)
    made = blocks(results)
    if a.page:
        fill_page(a.page, [(name, text) for name, text in made.items()])
    else:
        print("\n\n".join(f"## {name}\n\n{text}" for name, text in made.items()))
    content = {}
    for name, setting in PRESETS.items():
        short, full = (runs_of(results, setting, tokens) for tokens in (setting.select_tokens, setting.tokens))
        if full:
            done = [toolkit for toolkit in NAMES if finished(results, setting, toolkit)]
            content[name] = {"full": best_runs(full), "select": best_runs(short), "searched": done}
    if a.out:
        a.out.write_text(json.dumps(content, indent=1) + "\n")
    if a.picture:
        draw(results, list(content), a.picture)


if __name__ == "__main__":
    main()
