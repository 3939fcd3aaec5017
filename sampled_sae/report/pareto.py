"""Which SAEs no other one beats in two numbers at once, and the picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from sampled_sae.report import labels
from sampled_sae.report.metrics import Better, Metric
from sampled_sae.report.plotting import INK, MUTED, PALE, Styles, base_figure, error_bars, plain
from sampled_sae.report.rows import Configuration, Stat, form
from sampled_sae.report.sweep import BASE, Sweep, key_of

PAIRS = (("probing_5", "absorption"),)
"""Pairs (y, x) for a paper besides each headline number against FVU."""


UNSEEN = {"size": 10, "opacity": 0}
"""A mark that keeps its label at a distance."""


def front(points: Sequence[tuple[float, float]], x_better: Better, y_better: Better) -> list[int]:
    """The numbers of the points that no other one dominates, by x: none is as good in both and better in one."""
    good = [(x if x_better == "high" else -x, y if y_better == "high" else -y) for x, y in points]
    kept = [i for i, (x, y) in enumerate(good) if not any(a >= x and b >= y and (a > x or b > y) for a, b in good)]
    return sorted(kept, key=lambda i: points[i])


def steps(x_better: Better) -> str:
    """plotly's line shape along a front: the edge of what its points dominate."""
    return "hv" if x_better == "low" else "vh"


def span(values: Sequence[float], pad: float = 0.08) -> list[float]:
    """An axis' range around these values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * pad or abs(high) * 0.1 or 0.1
    return [low - room, high + room]


def reach(rows: Sequence[Configuration], metric: Metric) -> list[float]:
    """The ends of the bars over seeds."""
    stats = [row.stat(key_of(metric)) for row in rows]
    return [end for stat in stats if stat for end in (stat.low, stat.high)]


def about(row: Configuration) -> str:
    """The settings of a row, for hover texts (plotly's HTML)."""
    run = row.runs[0]
    seeds = [str(one["seed"]) for one in row.runs if one["seed"] is not None]
    words = [
        plain(row.group),
        f"l = {row.l:g}" if row.l is not None else "",
        f"K = {run['k']:g}" if run["k"] is not None else "",
        f"lr {run['lr']:g}" if run["lr"] is not None else "",
        f"seed{'s' * (len(seeds) > 1)} {plain(', '.join(seeds))}" if seeds else "",
    ]
    return f"<b>{plain(row.label)}</b><br>" + ", ".join(filter(None, words))


def told(row: Configuration, metric: Metric) -> str:
    """One number of a row, for hover texts: with its range over seeds, or the evaluation's own interval."""
    stat = row.stat(key_of(metric))
    if stat is None:
        return f"{plain(metric.title)}: not measured"
    low, high = form(stat.low, metric.digits), form(stat.high, metric.digits)
    spread = f" (seeds {low} to {high})" if low != high else ""
    interval = row.runs[0]["intervals"].get(metric.name) if len(row.runs) == 1 else None
    if interval:
        spread = f" (interval {form(interval[0], metric.digits)} to {form(interval[1], metric.digits)})"
    return f"{plain(metric.title)} {form(stat.mean, metric.digits)}{spread}"


def marker(style: Any, group: str) -> dict[str, Any]:
    """How the points of a group look; BatchTopK, which others are measured against, is a cross."""
    return {"symbol": style.symbol, "color": style.color, "size": 11 if group == BASE or "open" in style.symbol else 9}


def scatter(rows: Sequence[Configuration], x: Metric, y: Metric, style: Any) -> dict[str, Any]:
    """The trace of one group: means over seeds with bars from the smallest to the largest."""
    across: list[Stat | None] = [row.stat(key_of(x)) for row in rows]
    up: list[Stat | None] = [row.stat(key_of(y)) for row in rows]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [stat and stat.mean for stat in across],
        "y": [stat and stat.mean for stat in up],
        "name": plain(rows[0].group),
        "legendrank": 1 if rows[0].group == BASE else 1000,
        "marker": marker(style, rows[0].group),
        "hovertext": ["<br>".join([about(row), told(row, x), told(row, y)]) for row in rows],
        "hovertemplate": "%{hovertext}<extra></extra>",
        **error_bars(across, "error_x", PALE),
        **error_bars(up, "error_y", PALE),
    }


def pareto(sweep: Sweep, x: Metric, y: Metric, look: Styles, size: tuple[int, int]) -> go.Figure:
    """All configurations in two numbers, for a paper: the front is drawn and labelled where both have a good end."""
    rows = sweep.having(x, y)
    points = [(_mean(row, x), _mean(row, y)) for row in rows]
    ranges = [span(reach(rows, metric)) for metric in (x, y)]
    figure = base_figure(
        size[1],
        {"title": {"text": plain(x.axis)}, "range": ranges[0]},
        {"title": {"text": plain(y.axis)}, "range": ranges[1]},
        {},
    )
    best = front(points, x.better, y.better) if x.better and y.better else []
    if x.better and best:
        line = {"color": MUTED, "width": 1.5, "shape": steps(x.better)}
        ends = ([points[i][0] for i in best], [points[i][1] for i in best])
        figure.add_scatter(x=ends[0], y=ends[1], mode="lines", line=line, name="front", hoverinfo="skip")
    # The base is drawn last, on top.
    for group in sorted(dict.fromkeys(row.group for row in rows), key=lambda group: group == BASE):
        figure.add_trace(scatter([row for row in rows if row.group == group], x, y, look[group]))
    shares = [tuple((v - low) / (high - low) for v, (low, high) in zip(p, ranges, strict=True)) for p in points]
    rest = [(shares[i][0], shares[i][1]) for i in range(len(points)) if i not in best]
    texts = [rows[i].label for i in best]
    places = labels.place([(shares[i][0], shares[i][1]) for i in best], texts, (size[0] - 90, size[1] - 120), 11, rest)
    shown = [(i, text, where) for i, text, where in zip(best, texts, places, strict=True) if where]
    return figure.add_scatter(
        x=[points[i][0] for i, *_ in shown],
        y=[points[i][1] for i, *_ in shown],
        text=[plain(text) for _, text, _ in shown],
        textposition=[where for *_, where in shown],
        textfont={"size": 11, "color": INK},
        mode="markers+text",
        marker=UNSEEN,
        hoverinfo="skip",
        showlegend=False,
    )


def _mean(row: Configuration, metric: Metric) -> float:
    found = row.mean(key_of(metric))
    assert found is not None
    return found
