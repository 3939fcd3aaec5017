"""The pictures of the synthetic experiment: configurations in, plotly figures out."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from sampled_sae.report.plotting import (
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
from sampled_sae.report.rows import Configuration, Key, Stat, form

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
