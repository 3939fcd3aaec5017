"""The synthetic experiment's numbers: read from their file, one row a configuration, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from sampled_sae.reporting import pages as parts
from sampled_sae.reporting import style as plotting
from sampled_sae.reporting.collect import Log, read_log
from sampled_sae.reporting.pages import training_part
from sampled_sae.reporting.style import (
    GRID,
    INK,
    PAPER,
    SCALE,
    Styles,
    base_figure,
    described,
    error_bars,
    fve_range,
    plain,
    wrapped,
)
from sampled_sae.reporting.sweep import Column, Configuration, Key, Stat, field
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import read_json, write_text
from sampled_sae.utils.measures import form, in_html, number

# One line each: a number, a colon, what it means.
MEANINGS = """
FVE: 1 minus squared error over variance: 1 is perfect, 0 is no better than always answering the mean.
FVE train: FVE on training samples; far above held-out FVE, it tells of samples learned by heart.
FVE held-out: FVE on fresh samples, where each batch chooses its own candidate pool as in training.
FVE by threshold: FVE on fresh samples at inference: one threshold, calibrated on other fresh samples.
L0 by threshold: Active latents a sample under that threshold; neither high nor low is good, it should meet K.
By moving average: FVE and L0 with the threshold that training kept as a moving average; FVEs compare at equal L0 only.
Dead: Share of latents that never fire on the held-out samples, with the SAE's own pools; lower is better.
Ever pooled: Share of latents that were in a candidate pool at least once during training.
LF+HA to HF+LA: Share of the bucket's true features matched one to one with a latent at |cosine| >= 0.7.
All features: The same share, over the features of all buckets.
Fidelity: Correlation of learned and true firing frequency over all matched pairs, the poor matches too.
Seconds: Training time of the whole run, divided by its number of SAEs.
"""


def load_results(path: Path) -> dict[str, Any]:
    """Read a results.json; UserError where it is missing, damaged or without SAEs."""
    results = read_json(path)
    saes = results.get("saes") if isinstance(results, dict) else None
    if not isinstance(saes, list) or not all(isinstance(sae, dict) and "name" in sae for sae in saes):
        raise UserError(f"{path}: not the results of a synthetic experiment")
    if not saes:
        raise UserError(f"{path}: has no SAEs, so there is nothing to show")
    return results


def buckets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The statistics of the buckets of true features."""
    return (results.get("data") or {}).get("buckets") or []


def data_line(results: dict[str, Any]) -> str:
    """The statistics of the data as a whole, in one sentence."""
    data = results.get("data") or {}
    noise = number(data.get("noise_db"))
    return (
        f"Mutual coherence {form(data.get('coherence'), 4)}; L0 a sample: expected {form(data.get('expected_l0'), 2)}, "
        f"observed {form(data.get('observed_l0'), 2)}; "
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
    """The best FVE by threshold first; where it is missing, the other FVEs decide."""
    keys = ("fve_heldout_threshold", "fve_heldout", "fve_train")
    missing = float("-inf")
    return sorted(rows, key=lambda row: [getattr(row.stat(key), "mean", missing) for key in keys], reverse=True)


def _recovered(run: dict[str, Any], parts: list[dict[str, Any]]) -> float | None:
    counted = [part for part in parts if part.get("features")]  # an empty bucket has no share
    shares = [field(run, ("recovery", part["name"])) for part in counted]
    if not shares or None in shares:
        return None
    found = sum(share * part["features"] for share, part in zip(shares, counted, strict=True) if share)
    return found / sum(part["features"] for part in counted)


def columns(results: dict[str, Any]) -> list[Column]:
    """All numbers of a run, in the order of the tables."""
    names = [str(part["name"]) for part in buckets(results)]
    return [
        Column("FVE train", "fve_train", 3, "high", "FVE\ntrain"),
        Column("FVE held-out", "fve_heldout", 3, "high", "FVE\nheld-out"),
        Column("FVE by threshold", "fve_heldout_threshold", 3, "high", "FVE by\nthresh."),
        Column("L0 by threshold", "l0_threshold", 1, None, "\nL0"),
        Column("FVE by moving average", "fve_heldout_ema", 3),  # no contest: each SAE has its own L0 there
        Column("L0 by moving average", "l0_ema", 1),
        Column("dead", "dead", 2, "low", "\ndead"),
        Column("ever pooled", "ever_pooled", 2),
        *(Column(name, ("recovery", name), 2, "high", name.replace("+", "+\n", 1)) for name in names),
        Column("all features", "recovered", 3, "high"),
        Column("fidelity", "fidelity", 2, "high", "fide-\nlity"),
        Column("seconds", "seconds", 1),
    ]


def summary(results: dict[str, Any], name: Callable[[str], str]) -> str:
    """What was run and what the numbers say, in a few sentences; `name` writes a configuration's label."""
    rows, train = configurations(results), results.get("train") or {}
    runs, seeds = len(results["saes"]), max((len(row.runs) for row in rows), default=0)
    each = f" ({len(rows)} configurations, up to {seeds} seeds each: numbers are means)" if seeds > 1 else ""
    features = sum(part.get("features") or 0 for part in buckets(results))
    steps = f"{form(train.get('steps'), 0)} steps of {form(train.get('batch_size'), 0)} samples"
    return " ".join(
        [
            f"{runs} SAE{'s' * (runs > 1)}{each}, trained for {steps} with {features:,} known features.",
            _leader(rows, "fve_heldout_threshold", "held-out FVE by threshold", name),
            _leader(rows, "recovered", "share of true features recovered", name),
            _memory(rows, name),
        ]
    ).strip()


def _leader(rows: list[Configuration], key: Key, what: str, name: Callable[[str], str]) -> str:
    """Who has the highest `key`, who comes next, and where the best BatchTopK stands."""
    known = [(stat, row) for row in rows if (stat := row.stat(key))]
    if not known:
        return f"No SAE has a {what}."
    # Equal as written is equal: the digits beyond say nothing. Among equals BatchTopK is named first.
    order = sorted(known, key=lambda pair: (-round(pair[0].mean, 3), pair[1].group != "batchtopk", -pair[0].mean))
    top = order[0][0]
    low, high = form(top.low, 3), form(top.high, 3)
    value = form(top.mean, 3) + (f" (seeds {low} to {high})" if low != high else "")
    first = [row for stat, row in order if form(stat.mean, 3) == form(top.mean, 3)]
    if len(first) == len(rows):
        return f"{'All SAEs have the same' if len(rows) > 1 else 'It has a'} {what}, {value}."
    names = _listed([name(row.label) for row in first])
    parts = [f"{names} {'have' if len(first) > 1 else 'has'} the best {what}, {value}"]
    rest = order[len(first) :]
    second = [(stat, row) for stat, row in rest if form(stat.mean, 3) == form(rest[0][0].mean, 3)]
    if second:
        names = _listed([name(row.label) for _, row in second])
        overlap = any(stat.low < stat.high and stat.high >= top.low for stat, _ in second)
        parts.append(
            f"next {'come' if len(second) > 1 else 'comes'} {names} with {form(second[0][0].mean, 3)}"
            + ", some seeds overlapping with the best" * overlap
        )
    if not any(row.group == "batchtopk" for row in [*first, *(row for _, row in second)]):
        base = [f"{name(row.label)} has {form(stat.mean, 3)}" for stat, row in rest if row.group == "batchtopk"]
        parts += base[:1]
    return "; ".join(parts) + "."


def _memory(rows: list[Configuration], name: Callable[[str], str]) -> str:
    """Where training flatters most."""
    gaps = [
        (train - held, f"{name(row.label)} ({form(train, 3)} against {form(held, 3)})")
        for row in rows
        if (train := row.mean("fve_train")) is not None and (held := row.mean("fve_heldout")) is not None
    ]
    gap, where = max(gaps, default=(0.0, ""))
    # A smaller gap may not show in the numbers as written.
    return f"Training FVE lies above held-out FVE most of all for {where}." if gap >= 0.001 else ""


def _listed(names: list[str]) -> str:
    shown = names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


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
    ("held-out, own pools", "fve_heldout", "circle", 11, "○"),
    ("held-out, by threshold", "fve_heldout_threshold", "circle", 6, "●"),
]


def fve_dots(rows: list[Configuration], look: Styles) -> go.Figure:
    """One line a configuration, in the order given, with its three FVEs."""
    table = [[row.stat(key) for row in rows] for _, key, *_ in FVE_KINDS]
    low, high = fve_range(stat for stats in table for stat in stats)
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
    return figure


def recovery_map(rows: list[Configuration], names: list[str]) -> go.Figure:
    """Configurations against buckets: the share of true features that were recovered."""
    keys: list[Key] = [*(("recovery", name) for name in names), "recovered"]
    stats = [[row.stat(key) for key in keys] for row in rows]
    x = {
        "tickvals": list(range(len(keys))),
        "ticktext": [*(plain(name) for name in names), "all"],
        "tickfont": {"color": INK, "size": 10},
        "side": "top",
        "tickangle": 0,
        "showgrid": False,
        "fixedrange": True,
    }
    figure = base_figure(50 + ROW_HEIGHT * len(rows), x, _label_axis(rows), {})
    return figure.add_heatmap(
        z=[[stat and stat.mean for stat in line] for line in stats],
        text=[[form(stat and stat.mean, 2) for stat in line] for line in stats],
        customdata=[[described(row.label, row.stat(key)) for key in keys] for row in rows],
        texttemplate="%{text}",
        hovertemplate="%{customdata}<extra></extra>",
        textfont={"color": INK},
        colorscale=[[i, color] for i, color in enumerate(SCALE)],
        zmin=0,
        zmax=1,
        showscale=False,
        xgap=3,
        ygap=3,
    )


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
    page = folder / "index.html"
    write_text(page, _page(results, *read_log(folder / "log.jsonl")))
    return page


def _page(results: dict[str, Any], log: Log, log_note: str) -> str:
    rows = configurations(results)
    look = plotting.styles(rows)
    opening = summary(results, lambda label: f"<b>{in_html(label)}</b>")
    main = f"""<section><h2>The data</h2>{_data(results)}</section>
<section><h2>The results</h2>{_pictures(rows, look, results)}{_against_l(rows, look)}</section>
<section><h2>The training</h2>{training_part(rows, look, log, log_note)}</section>
<section><h2>All numbers</h2>{_numbers(rows, results)}</section>
<section><h2>The configurations</h2>{_settings(results)}</section>"""
    return parts.document(f"Synthetic experiment: {results.get('preset')}", opening, main)


def _data(results: dict[str, Any]) -> str:
    lines = [
        f"<th scope='row'>{in_html(str(part['name']))}</th><td>{form(part.get('features'), 0)}</td>"
        f"<td>{form(part.get('p'), 3)}</td><td>{form(part.get('sigma'), 2)}</td>"
        f"<td>{form(part.get('mean_activation'), 3)} ± {form(part.get('std_activation'), 3)}</td>"
        for part in buckets(results)
    ]
    heads = ["Bucket", "Features", "Firing probability", "Sigma", "Mean active magnitude\u00a0±\u00a0std"]
    text = """<p>Each sample is a sparse sum of known features and a little noise. A feature fires with low or
high frequency (LF, HF) and with low or high amplitude (LA, HA), which makes four buckets.</p>"""
    return f"{text}{parts.table(heads, lines, 'data')}<p class='note'>{data_line(results)}</p>"


def _pictures(rows: list[Configuration], look: plotting.Styles, results: dict[str, Any]) -> str:
    order = ranked(rows)
    fve = "Best by threshold on top; an arrow to the left marks a value below the axis."
    fve += parts.several(rows, " Dots are means over seeds; thin lines reach from the smallest to the largest.")
    recovery = "Share of each bucket, in the same order." + parts.several(rows, " Means over seeds.")
    kinds = parts.key_list((glyph, name, plotting.MUTED) for name, *_, glyph in FVE_KINDS)
    names = [str(part["name"]) for part in buckets(results)]
    return (
        parts.key_list(("■", group, style.color) for group, style in look.items())
        + parts.figure_block("fve", fve_dots(order, look), "Variance explained", fve, kinds)
        + parts.figure_block("recovery", recovery_map(order, names), "True features recovered", recovery)
    )


def _against_l(rows: list[Configuration], look: plotting.Styles) -> str:
    scored = [row for row in rows if row.l is not None and row.l > 0]
    if not scored:
        return "<p class='note'>No SAE here has a constant scored pool, so there is no FVE against l.</p>"
    base = next((row for row in rows if row.group == "batchtopk"), None)
    kinds = [("own pools", "fve_heldout"), ("by threshold", "fve_heldout_threshold")]
    limits = plotting.fve_range(row.stat(key) for row in [*scored, base] if row for _, key in kinds)
    caption = "Held-out samples." + parts.several(rows, " Thin lines reach from the smallest to the largest seed.")
    marks = [(look[group].glyph, group, look[group].color) for group in dict.fromkeys(row.group for row in scored)]
    marks += [("- -", base.label, look[base.group].color)] if base else []
    pair = "".join(
        parts.figure_block(f"l-{i}", fve_against_l(scored, base, look, key, limits), f"FVE against l, {name}", caption)
        for i, (name, key) in enumerate(kinds)
    )
    return f"{parts.key_list(marks)}<div class='pair'>{pair}</div>"


def _numbers(rows: list[Configuration], results: dict[str, Any]) -> str:
    shown = columns(results)
    runs = [Configuration(str(run["name"]), row.group, row.l, (run,)) for row in rows for run in row.runs]
    meanings = (line.split(": ", 1) for line in MEANINGS.strip().splitlines())
    defined = parts.definitions((term, text) for term, text in meanings)
    note = "A click on a head sorts; the best of each column is marked." + parts.several(
        rows, " Means over seeds, with the smallest and the largest below."
    )
    every = f"<details><summary>Every run</summary>{parts.results_table(runs, shown)}</details>"
    return f"""<p class="note">{note}</p>{parts.results_table(rows, shown)}{parts.several(rows, every)}
<h3 class="apart">What the numbers mean</h3>{defined}"""


def _settings(results: dict[str, Any]) -> str:
    """All settings, as they stand in the file: of the experiment, then of each run."""
    shared = {key: value for key, value in results.items() if key not in ("saes", "data")}
    shared["data"] = (results.get("data") or {}).get("config")
    runs = "".join(parts.folded(str(run["name"]), run.get("config")) for run in results["saes"])
    each = f"<details><summary>Each run ({len(results['saes'])})</summary>{runs}</details>"
    return parts.folded("The experiment", shared) + each
