"""The pictures of the synthetic experiment: configurations in, plotly figures out.

Colours are written for a light page; the page swaps them by `DARK` where the reader prefers a dark one.
"""

from __future__ import annotations

import html
import itertools
import textwrap
from collections.abc import Iterable
from typing import Any, NamedTuple

import plotly.graph_objects as go

from sampled_sae.report.synthetic_results import Configuration, Key, Stat, field, form

INK, MUTED, GRID, PAPER = "#1c2024", "#6b7076", "#e3e3de", "#fdfdfb"
SCALE = ["#f3f5f6", "#5ab4e6"]  # pale enough for ink on it
DARK = {
    INK: "#e8e8e4",
    MUTED: "#9ba1a8",
    GRID: "#2e3338",
    PAPER: "#16191c",
    "#000000": "#ffffff",
    "#a89a00": "#f0e442",  # Okabe and Ito's yellow is too pale for a white page
    "#0072b2": "#2b8fd0",
    SCALE[0]: "#20252a",
    SCALE[1]: "#1b5f8c",
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
DASHES = ["solid", "9px,4px", "2px,3px", "9px,3px,2px,3px", "16px,4px", "16px,3px,2px,3px,2px,3px"]
MAX_POINTS = 200  # of one curve: more cannot be told apart on a screen
LABEL_WIDTH = 20  # letters a line
ROW_HEIGHT = 38  # room for a label of two lines, and a gap


class Style(NamedTuple):
    """How one group looks in every picture: colour, plotly's symbol, and a letter that looks like it."""

    color: str
    symbol: str
    glyph: str


# The palette of Okabe and Ito, with its grey.
KNOWN = {
    "batchtopk": Style("#000000", "circle", "●"),
    "topk": Style("#999999", "square", "■"),
    "l2": Style("#0072b2", "circle", "●"),
    "squared_l2": Style("#56b4e9", "square-open", "□"),  # open, for it often lies on top of l2
    "entropy": Style("#cc79a7", "diamond", "◆"),
    "uniform": Style("#e69f00", "triangle-up", "▲"),
    "released": Style("#009e73", "triangle-right", "▶"),
    "annealed": Style("#d55e00", "triangle-down", "▼"),
}
OWN = [
    Style("#a89a00", "hexagon", "⬢"),
    Style("#8c6d5a", "star", "★"),
    Style("#8a77d1", "triangle-left", "◀"),
]
Styles = dict[str, Style]


def styles(rows: Iterable[Configuration]) -> Styles:
    """A style for each group, in the order of the file; a user's own groups take the free ones in turn."""
    groups = dict.fromkeys(row.group for row in rows)
    free = itertools.cycle([*OWN, *(style for group, style in KNOWN.items() if group not in groups)])
    return {group: KNOWN.get(group) or next(free) for group in groups}


def plain(text: str) -> str:
    """Text that plotly shows as it stands: its labels know some HTML."""
    return html.escape(text, quote=False)


def wrapped(text: str) -> str:
    """A label in at most two short lines, so that a phone has room for the picture."""
    return "<br>".join(map(plain, textwrap.wrap(text, LABEL_WIDTH, max_lines=2, placeholder="…")))


def described(label: str, stat: Stat | None) -> str:
    """The hover text of a point: label, mean and, where seeds differ, their range."""
    if stat is None:
        return f"{plain(label)}: no value"
    spread = f"<br>seeds {form(stat.low, 3)} to {form(stat.high, 3)}" if stat.low < stat.high else ""
    return f"<b>{plain(label)}</b><br>{form(stat.mean, 3)}{spread}"


def _figure(height: int, x: dict[str, Any], y: dict[str, Any], margin: dict[str, int]) -> go.Figure:
    axis = {
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": GRID,
        "tickfont": {"color": MUTED, "size": 12},
        "title": {"font": {"color": MUTED, "size": 12}, "standoff": 8},
        "ticks": "",
        "ticklabelstandoff": 4,
        "automargin": True,
    }
    layout = {
        "template": "none",
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8, **margin},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "color": INK, "size": 13},
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": PAPER, "bordercolor": MUTED, "font": {"color": INK, "size": 13}},
        "dragmode": False,
    }
    figure = go.Figure(layout=layout)
    figure.update_xaxes(**axis).update_xaxes(**x)
    figure.update_yaxes(**axis).update_yaxes(**y)
    return figure


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


def fve_range(stats: Iterable[Stat | None]) -> list[float]:
    """An axis up to 1. It leaves out what lies far below zero, which would squeeze all else into a corner."""
    known = [stat for stat in stats if stat]
    lowest, best = min((s.low for s in known), default=0.0), max((s.high for s in known), default=0.0)
    return [max(lowest, min(0.0, best - 1)) - 0.03, 1.0]


def error_bars(stats: list[Stat | None], name: str) -> dict[str, Any]:
    """Bars from the smallest to the largest over the seeds, or nothing where all have one."""
    if not any(stat and stat.low < stat.high for stat in stats):
        return {}
    up = [stat and stat.high - stat.mean for stat in stats]
    down = [stat and stat.mean - stat.low for stat in stats]
    look = {"thickness": 1, "width": 0, "color": MUTED}
    return {name: {"type": "data", "symmetric": False, "array": up, "arrayminus": down, **look}}


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
    figure = _figure(60 + ROW_HEIGHT * len(rows), x, _label_axis(rows), {"r": 12})
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
    figure = _figure(50 + ROW_HEIGHT * len(rows), x, _label_axis(rows), {})
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
    figure = _figure(320, x, {"range": limits, "fixedrange": True, "tickformat": ".2f"}, {"r": 16})
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


Log = dict[str, list[dict[str, Any]]]  # the log's lines of each run, by its name


def dash(place: int) -> tuple[str, float]:
    """Dash pattern and width of the line of a group's n-th configuration."""
    return DASHES[place % len(DASHES)], 2.2 if place < len(DASHES) else 1.0


def curves(rows: list[Configuration], look: Styles, log: Log, key: str) -> go.Figure:
    """One number of the log against the step: a line a configuration, and a hidden band over its seeds."""
    groups = list(look)
    lines = [(row, _points(row, log, key)) for row in rows]
    y: dict[str, Any] = {"type": "log", "dtick": "D2", "tickformat": "~g"} if key == "loss" else {"rangemode": "tozero"}
    if key == "fve":
        y = {"range": fve_range(stat for _, points in lines for _, stat in points)}
    x = {"title": {"text": "step"}, "nticks": 6, "tickformat": ",", "rangemode": "tozero"}
    figure = _figure(280, x, y, {"r": 12}).update_layout(dragmode="zoom")
    seen = dict.fromkeys(groups, 0)
    for row, points in lines:
        pattern, width = dash(seen[row.group])
        seen[row.group] += 1
        if not points:
            continue
        color, group = look[row.group].color, groups.index(row.group)
        steps = [step for step, _ in points]
        if any(stat.low < stat.high for _, stat in points):
            edge = [stat.high for _, stat in points] + [stat.low for _, stat in reversed(points)]
            band = {"fill": "toself", "fillcolor": color, "line": {"width": 0}, "mode": "lines", "opacity": 0.18}
            hidden = {"visible": False, "hoverinfo": "skip", "meta": {"group": group, "band": True}}
            figure.add_scatter(x=steps + steps[::-1], y=edge, **band, **hidden)
        figure.add_scatter(
            x=steps,
            y=[stat.mean for _, stat in points],
            mode="lines",
            line={"color": color, "width": 1.5},
            name=plain(row.label),
            hovertemplate="<b>%{fullData.name}</b><br>step %{x:,}: %{y:.3f}<extra></extra>",
            meta={"group": group, "band": False, "dash": pattern, "width": width},
        )
    return figure


def _points(row: Configuration, log: Log, key: str) -> list[tuple[float, Stat]]:
    """(step, number over the seeds), at most MAX_POINTS of them, the last one always among them."""
    values: dict[float, list[float]] = {}
    for run in row.runs:
        for line in log.get(run["name"], []):
            step, value = field(line, "step"), field(line, key)
            if step is not None and value is not None and (step or key != "churn"):  # no pool came before step 0
                values.setdefault(step, []).append(value)
    stride = -(-len(values) // MAX_POINTS) or 1
    steps = sorted(values, reverse=True)[::stride][::-1]
    return [(step, Stat(sum(v) / len(v), min(v), max(v))) for step in steps for v in [values[step]]]
