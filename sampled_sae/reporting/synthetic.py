"""The synthetic experiment: its page, figures and summary, and its results in a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sampled_sae.config import read_file
from sampled_sae.reporting import figures
from sampled_sae.reporting.collect import read_log
from sampled_sae.reporting.figures import Styles, base_figure, described, error_bars, heatmap, plain, styles, wrapped
from sampled_sae.reporting.pages import Figure, Mark, bold, finding, in_words, render, several, training
from sampled_sae.reporting.palette import GRID, INK, MUTED, PAPER
from sampled_sae.reporting.sweep import Configuration, Key, field, group_title, table_of
from sampled_sae.reporting.tables import console_of, drawn, safe
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import write_text
from sampled_sae.utils.measures import Column, Stat, Table, form, number

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from rich.console import Console

MEANINGS = {
    "FVE": "1 minus squared error over variance: 1 is perfect, 0 is no better than the mean.",
    "FVE train": "FVE on training samples; far above held-out FVE, it indicates memorization.",
    "FVE held-out": "FVE on fresh samples with training-time selection: each batch chooses its own candidate pool.",
    "FVE, inference threshold": "FVE on fresh samples with the inference threshold, calibrated on other fresh samples.",
    "L0, inference threshold": "Active latents per sample with the inference threshold; it should equal K.",
    "By moving average": "FVE and L0 with the threshold that training kept as a moving average; FVEs compare at equal "
    "L0 only.",
    "Dead": "Share of latents that never fire on the held-out samples with training-time selection; lower is better.",
    "Ever pooled": "Share of latents that were in a candidate pool at least once during training.",
    "LF+HA to HF+LA": "Share of the bucket's true features matched one to one with a latent at |cosine| >= 0.7.",
    "All features": "The same share, over the features of all buckets.",
    "MCC": "Mean |cosine| of latents and true features matched one to one, as in SynthSAEBench.",
    "Fidelity": "Correlation of learned and true firing frequency over all matched pairs, including poor matches.",
    "Seconds": "Training time of the whole run, divided by its number of SAEs.",
}


def load_results(path: Path) -> dict[str, Any]:
    """Read a results.json; UserError where it is missing, damaged or without SAEs."""
    results = read_file(path, "synthetic")
    saes, data = results.get("saes"), results.get("data", {})
    if not isinstance(saes, list) or not all(isinstance(sae, dict) and "name" in sae for sae in saes):
        raise UserError(f"{path}: not the results of a synthetic experiment")
    if not all(isinstance(sae.get("seed"), int | None) for sae in saes):
        raise UserError(f"{path}: saes: a seed must be a whole number")
    if not isinstance(results.get("train", {}), dict):
        raise UserError(f"{path}: train: must be an object with named fields")
    parts = data.get("buckets", []) if isinstance(data, dict) else None
    if not isinstance(parts, list) or not all(map(_is_bucket, parts)):
        raise UserError(f"{path}: data.buckets: must be a list of objects with a name and a number of features")
    if not saes:
        raise UserError(f"{path}: has no SAEs, so there is nothing to show")
    return results


def _is_bucket(part: Any) -> bool:
    named = isinstance(part, dict) and isinstance(part.get("name"), str)
    return named and (part.get("features") is None or number(part["features"]) is not None)


def buckets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The statistics of the buckets of true features."""
    return (results.get("data") or {}).get("buckets") or []


def data_table(results: dict[str, Any]) -> Table:
    """A row per bucket of true features."""
    columns = {
        "name": Column("Bucket"),
        "features": Column("Features", 0),
        "p": Column("Firing probability", 3, brief="p"),
        "sigma": Column("Sigma", 2),
        "mean_activation": Column("Mean active magnitude", 3, brief="mean |a|"),
        "std_activation": Column("Std", 3, brief="std |a|"),
    }
    rows = [[str(bucket.get("name")), *map(bucket.get, [*columns][1:])] for bucket in buckets(results)]
    return Table([*columns.values()], rows)


def data_line(results: dict[str, Any]) -> str:
    """The statistics of the data as a whole, in one sentence."""
    data = results.get("data") or {}
    noise = number(data.get("noise_db"))
    return (
        f"Mutual coherence {form(data.get('coherence'), 4)}; "
        f"L0 per sample: expected {form(data.get('expected_l0'), 2)}, observed {form(data.get('observed_l0'), 2)}; "
        + ("no noise." if noise is None else f"noise {form(noise, 0)} dB below the signal.")
    )


def configurations(results: dict[str, Any]) -> list[Configuration]:
    """The runs gathered by configuration, in the order of the file.

    Each run gains `recovered`: the share of all true features that it recovered, over the buckets.
    """
    gathered: dict[tuple[str, str, float | None], list[dict[str, Any]]] = {}
    for run in results["saes"]:
        key = str(run.get("label") or run["name"]), str(run.get("group")), number(run.get("l"))
        gathered.setdefault(key, []).append({**run, "recovered": _recovered(run, buckets(results))})
    return [Configuration(*key, tuple(runs)) for key, runs in gathered.items()]


def ranked(rows: list[Configuration]) -> list[Configuration]:
    """The best FVE at the inference threshold first; where it is missing, the other FVEs decide."""
    keys = ("fve_heldout_threshold", "fve_heldout", "fve_train")
    return sorted(rows, key=lambda row: [getattr(row.stat(key), "mean", -math.inf) for key in keys], reverse=True)


def _recovered(run: dict[str, Any], parts: list[dict[str, Any]]) -> float | None:
    counted = [part for part in parts if part.get("features")]  # an empty bucket has no share
    shares = [field(run, ("recovery", part["name"])) for part in counted]
    if not shares or None in shares:
        return None
    found = sum(share * part["features"] for share, part in zip(shares, counted, strict=True) if share)
    return found / sum(part["features"] for part in counted)


def columns(results: dict[str, Any]) -> dict[Key, Column]:
    """All numbers of a run, in the order of the tables; those with a brief header are shown in a terminal."""
    names = [str(part["name"]) for part in buckets(results)]
    return {
        "fve_train": Column("FVE train", 3, "high", brief="FVE\ntrain"),
        "fve_heldout": Column("FVE held-out", 3, "high", brief="FVE\nheld-out"),
        "fve_heldout_threshold": Column("FVE, inference threshold", 3, "high", brief="FVE,\nthresh."),
        "l0_threshold": Column("L0, inference threshold", 1, brief="\nL0"),
        "fve_heldout_ema": Column("FVE by moving average", 3),  # no contest: L0 differs between SAEs there
        "l0_ema": Column("L0 by moving average", 1),
        "dead": Column("dead", 2, "low", brief="\ndead"),
        "ever_pooled": Column("ever pooled", 2),
        **{("recovery", name): Column(name, 2, "high", brief=name.replace("+", "+\n", 1)) for name in names},
        "recovered": Column("all features", 3, "high"),
        "mcc": Column("MCC", 3, "high"),
        "fidelity": Column("fidelity", 2, "high", brief="fide-\nlity"),
        "seconds": Column("seconds", 1),
    }


HEADLINES: dict[Key, str] = {
    "fve_heldout_threshold": "Held-out FVE at the inference threshold",
    "recovered": "Share of true features recovered",
}


def summary(results: dict[str, Any], name: Callable[[str], str]) -> str:
    """What was run and what it shows, in a few sentences; `name` writes a configuration's label."""
    rows, trained = configurations(results), results.get("train") or {}
    runs, seeds = len(results["saes"]), max((len(row.runs) for row in rows), default=0)
    each = f" ({len(rows)} configurations, up to {seeds} seeds each: numbers are means)" if seeds > 1 else ""
    features = sum(part.get("features") or 0 for part in buckets(results))
    steps = f"{form(trained.get('steps'), 0)} steps of {form(trained.get('batch_size'), 0)} samples"
    gaps = [
        (train - held, f"{name(row.label)} ({form(train, 3)} against {form(held, 3)})")
        for row in rows
        if (train := row.mean("fve_train")) is not None and (held := row.mean("fve_heldout")) is not None
    ]
    gap, where = max(gaps, default=(0.0, ""))
    found = {title: finding(rows, key, title, "high", 3) for key, title in HEADLINES.items()}
    sentences = [
        f"{runs} SAE{'s' * (runs > 1)}{each}, trained for {steps} with {features:,} known features.",
        *in_words([one for one in found.values() if one], name),
        *(f"No SAE has a {title[0].lower()}{title[1:]}." for title, one in found.items() if not one),
    ]
    if gap >= 0.001:  # a smaller one may not show in the numbers as written
        sentences.append(f"The largest gap between training and held-out FVE is that of {where}.")
    return " ".join(sentences)


ROW_HEIGHT = 38  # room for a label of two lines, and a gap


def _label_axis(rows: list[Configuration]) -> dict[str, Any]:
    # Positions are numbers, so that two labels that shorten to the same text keep their own rows.
    return {
        "tickvals": list(range(len(rows))),
        "ticktext": [wrapped(row.label) for row in rows],
        "tickfont": {"color": INK, "size": 12},
        "range": [len(rows) - 0.4, -0.6],
        "showgrid": False,
        "fixedrange": True,
    }


# Name, field, plotly's symbol and its size, a letter that looks like it. The dot fits into the ring.
FVE_KINDS = [
    ("train", "fve_train", "line-ns", 10, "|"),
    ("held-out, training-time selection", "fve_heldout", "circle", 11, "○"),
    ("held-out, inference threshold", "fve_heldout_threshold", "circle", 6, "●"),
]


def fve_figure(rows: list[Configuration], look: Styles) -> Figure:
    """One line per configuration, in the order given, with its three FVEs."""
    caption = "Sorted by FVE at the inference threshold; an arrow to the left marks a value below the axis."
    if several(rows):
        caption += " Dots are means over seeds; thin lines reach from the smallest to the largest."
    table = [[row.stat(key) for row in rows] for _, key, *_ in FVE_KINDS]
    low, high = figures.fve_range(stat for stats in table for stat in stats)
    x = {"range": [low - 0.02, high + 0.01], "title": {"text": "FVE"}, "fixedrange": True}
    figure = base_figure(60 + ROW_HEIGHT * len(rows), x, _label_axis(rows), {"r": 12})
    spans: list[float | None] = []
    for trio in zip(*table, strict=True):
        means = [max(stat.mean, low) for stat in trio if stat]
        spans += [min(means), max(means), None] if means else [None, None, None]
    places = [y for y in range(len(rows)) for _ in range(3)]
    figure.add_scatter(x=spans, y=places, mode="lines", line={"color": GRID, "width": 4}, hoverinfo="skip")
    colors = [look[row.group].color for row in rows]
    for (name, _, symbol, size, glyph), stats in zip(FVE_KINDS, table, strict=True):
        shown = [stat and Stat(*(max(value, low) for value in stat)) for stat in stats]
        figure.add_scatter(
            x=[stat and stat.mean for stat in shown],
            y=list(range(len(rows))),
            mode="markers",
            marker={
                "symbol": ["triangle-left" if stat and stat.mean < low else symbol for stat in stats],
                # The hollow ones are filled with paper, which hides the bar behind them.
                "color": PAPER if glyph == "○" else colors,
                "size": size,
                "line": {"width": 2, "color": colors},
            },
            text=[described(f"{row.label}, {name}", stat) for row, stat in zip(rows, stats, strict=True)],
            hovertemplate="%{text}<extra></extra>",
            cliponaxis=False,
            **error_bars(shown, "error_x"),
        )
    kinds = [Mark(glyph, name, MUTED) for name, *_, glyph in FVE_KINDS]
    return Figure("fve", figure, "Variance explained", caption, kinds)


def recovery_figure(rows: list[Configuration], names: list[str]) -> Figure:
    """Configurations against buckets: the share of true features that were recovered."""
    caption = "Share of each bucket, in the same order." + " Means over seeds." * several(rows)
    keys: list[Key] = [*(("recovery", name) for name in names), "recovered"]
    stats = [[row.stat(key) for key in keys] for row in rows]
    x = {
        "tickvals": list(range(len(keys))),
        "ticktext": [*(plain(name) for name in names), "all"],
        "tickfont": {"color": INK, "size": 10},
        "side": "top",
        "tickangle": 0,
        "showgrid": False,
    }
    means = [[stat and stat.mean for stat in line] for line in stats]
    hover = [[described(row.label, stat) for stat in line] for row, line in zip(rows, stats, strict=True)]
    figure = heatmap(50 + ROW_HEIGHT * len(rows), x, _label_axis(rows), means, hover)
    return Figure("recovery", figure, "True features recovered", caption)


def fve_against_l(
    scored: list[Configuration], base: Configuration | None, look: Styles, key: Key, limits: list[float]
) -> go.Figure:
    """FVE against the pool multiplier, one line a score; `base`, a BatchTopK, is the dashed level."""
    ticks = sorted({row.l for row in scored if row.l})
    marks = {"tickvals": ticks, "ticktext": [f"{tick:.3g}" for tick in ticks]} if len(ticks) <= 8 else {}
    x = {"type": "log", "title": {"text": "pool multiplier l"}, "fixedrange": True, **marks}
    figure = base_figure(320, x, {"range": limits, "fixedrange": True, "tickformat": ".2f"}, {"r": 16})
    if base and (level := base.mean(key)) is not None:
        figure.add_hline(level, line={"color": look[base.group].color, "width": 1.5, "dash": "dash"})
    for group in dict.fromkeys(row.group for row in scored):
        style = look[group]
        line = sorted((row for row in scored if row.group == group), key=lambda row: row.l or 0)
        stats = [row.stat(key) for row in line]
        figure.add_scatter(
            x=[row.l for row in line],
            y=[stat and stat.mean for stat in stats],
            mode="lines+markers",
            line={"color": style.color, "width": 2},
            marker={"symbol": style.symbol, "size": 12 if "open" in style.symbol else 8},
            text=[described(row.label, stat) for row, stat in zip(line, stats, strict=True)],
            hovertemplate="%{text}<extra></extra>",
            **error_bars(stats, "error_y"),
        )
    return figure


def write_page(folder: Path) -> Path:
    """Read results.json and log.jsonl in `folder`, write index.html there and return its path."""
    results = load_results(folder / "results.json")
    rows = configurations(results)
    log, log_note = read_log(folder / "log.jsonl")
    look, shared = styles(rows), {key: value for key, value in results.items() if key not in ("saes", "data")}
    runs = [Configuration(str(run["name"]), row.group, row.l, (run,)) for row in rows for run in row.runs]
    text = render(
        "synthetic.html",
        title=f"Synthetic experiment: {results.get('preset')}",
        summary=summary(results, bold),
        data=data_table(results),
        data_line=data_line(results),
        groups=[Mark("■", group_title(group), style.color) for group, style in look.items()],
        several=several(rows),
        fve=fve_figure(ranked(rows), look),
        recovery=recovery_figure(ranked(rows), [str(part["name"]) for part in buckets(results)]),
        against_l=_against_l(rows, look),
        training=training(rows, look, log, log_note),
        table=table_of(rows, columns(results)),
        every=table_of(runs, columns(results)),
        meanings=MEANINGS,
        settings=shared | {"data": (results.get("data") or {}).get("config")},
        runs=results["saes"],
    )
    write_text(folder / "index.html", text)
    return folder / "index.html"


def _against_l(rows: list[Configuration], look: Styles) -> tuple[list[Mark], list[Figure]] | None:
    """Legend and figures of FVE against l; None where no SAE has a constant scored pool."""
    scored = [row for row in rows if row.l is not None and row.l > 0]
    if not scored:
        return None
    base = next((row for row in rows if row.group == "batchtopk"), None)
    kinds = {"training-time selection": "fve_heldout", "inference threshold": "fve_heldout_threshold"}
    limits = figures.fve_range(row.stat(key) for row in [*scored, base] if row for key in kinds.values())
    caption = "Held-out samples." + " Thin lines reach from the smallest to the largest seed." * several(rows)
    marks = [
        Mark(look[group].glyph, group_title(group), look[group].color)
        for group in dict.fromkeys(row.group for row in scored)
    ]
    marks += [Mark("- -", base.label, look[base.group].color)] if base else []
    drawn_ = [
        Figure(f"l-{i}", fve_against_l(scored, base, look, key, limits), f"FVE against l, {name}", caption)
        for i, (name, key) in enumerate(kinds.items())
    ]
    return marks, drawn_


def print_results(results: dict[str, Any], console: Console | None = None) -> None:
    """Print the data's statistics, a row per configuration (means over seeds) and a summary."""
    console = console or console_of(100)
    rows = configurations(results)
    shown = {key: column for key, column in columns(results).items() if column.brief}
    table = table_of(rows, shown)
    seeds = max((len(row.runs) for row in rows), default=0)
    over = f"; means over up to {seeds} seeds" if seeds > 1 else ""
    terms = "L0 and thresh.: inference threshold; buckets: share of true features recovered"
    note = f"* clearly best of its column, over seeds; {terms}{over}"
    console.print(safe("Data", "bold"), drawn(data_table(results)), safe(data_line(results)), "", sep="\n")
    console.print(safe("Results", "bold"), drawn(table, dense=True), safe(note), "", sep="\n")
    console.print(safe(summary(results, lambda label: f"'{label}'")))
