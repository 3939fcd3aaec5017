"""Figures of a study: differences with their intervals, and one metric against another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from sampled_sae.reporting.figures import INK, MUTED, base_figure, front, labels, span, steps
from sampled_sae.reporting.palette import FREE, GROUPS
from sampled_sae.reporting.study import BASE, METRICS, Compared, Results, by_seed, judged

if TYPE_CHECKING:
    import plotly.graph_objects as go

FAR = 3.0  # ratio to the base from which on a method is named beside the figure instead of being drawn
SETTINGS = 3  # settings that a method has to be in for the figure over all of them
WIDE = 10.0  # ratio of the largest to the smallest value from which on an axis is logarithmic


def forest(results: Results, setting: str, metric: str, base: str = BASE) -> go.Figure | None:
    """Paired differences to the base with their 95% intervals, of methods with several seeds; None without any.

    Metrics with a relative margin are shown as ratios, on a logarithmic axis.
    """
    how = METRICS[metric]
    ratio = how.relative or how.log
    values = {method: results.measured(setting, method, metric) for method in results.methods(setting)}
    if ratio:  # where there is nothing, there is no ratio
        values = {method: own for method, own in values.items() if own and min(own.values()) > 0}
    # A ratio is larger where the metric is, so that the axis reads like the metric.
    compared = how._replace(log=ratio, better=None if ratio else how.better)
    every = {m: found[0] for m in values if m != base and (found := judged(values[m], values.get(base, {}), compared))}
    shown = {method: it for method, it in every.items() if it.interval is not None and min(it.clusters) > 1}
    if not shown:
        return None
    side = "more" if how.better is None else "better" if how.better == "high" or not ratio else "worse"
    title = f"{how.title}: {'ratio' if ratio else 'difference'} to {base} (right: {side})"
    axis: dict[str, Any] = {"title": {"text": title}}
    if ratio:
        ends = [2.0**end for it in shown.values() for end in it.interval or ()]
        axis |= _ticks(min(*ends, 1.0), max(*ends, 1.0), math.log2)
    figure = base_figure(60 + 24 * len(shown), axis, {"autorange": "reversed"}, {"r": 16})
    half = [(it.interval[1] - it.interval[0]) / 2 for it in shown.values() if it.interval is not None]
    bars = {"type": "data", "array": half, "color": INK, "thickness": 1.5}
    marks = {"color": INK, "size": 8}
    means = [it.mean for it in shown.values()]
    figure.add_scatter(x=means, y=list(shown), mode="markers", marker=marks, error_x=bars)
    figure.add_vline(x=0, line={"color": INK, "width": 1})
    return figure


def across(results: Results, metric: str, base: str = BASE) -> go.Figure | None:
    """Ratios to the base in every setting, of methods with several seeds in at least three of them; None without any.

    Methods far above the base in some setting are left out.
    """
    how = METRICS[metric]._replace(log=True, better=None)
    found: dict[str, dict[str, float]] = {}
    for setting in results.deciding:
        values = {method: results.measured(setting, method, metric) for method in results.methods(setting)}
        for method, own in values.items():
            it = None if method == base else judged(own, values.get(base, {}), how)
            if it is not None and min(it[0].clusters) > 1:
                found.setdefault(method, {})[setting] = it[0].mean
    shown = {m: own for m, own in found.items() if len(own) >= SETTINGS and max(own.values()) < math.log2(FAR)}
    if not shown:
        return None
    ratios = [2.0**mean for own in shown.values() for mean in own.values()]
    side = "worse" if METRICS[metric].better == "low" else "more"
    title = f"{METRICS[metric].title}: ratio to {base} (right: {side})"
    axis = {"title": {"text": title}, **_ticks(min(*ratios, 1.0), max(*ratios, 1.0), math.log2)}
    figure = base_figure(120 + 30 * len(shown), axis, {"autorange": "reversed"}, {"r": 16})
    styles = cycle([*GROUPS.values(), *FREE])
    used = [setting for setting in results.deciding if any(setting in own for own in shown.values())]
    for setting, style in zip(used, styles, strict=False):
        there = {method: own[setting] for method, own in shown.items() if setting in own}
        marks = {"color": style.color, "symbol": style.symbol, "size": 9}
        figure.add_scatter(x=list(there.values()), y=list(there), mode="markers", marker=marks, name=setting)
    figure.add_vline(x=0, line={"color": INK, "width": 1})
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}, margin_t=60)
    return figure


def against(results: Results, setting: str, x: str, y: str) -> go.Figure | None:
    """One metric against another: each method's mean over seeds and their range; the base is dark, a line the front.

    Methods with a single seed are left out where the base has several. Methods whose first metric is far above the
    base's would press the others together; they are named instead.
    """
    seeds = {m: [by_seed(results.measured(setting, m, metric)) for metric in (x, y)] for m in results.methods(setting)}
    counts = {method: min(map(len, both)) for method, both in seeds.items()}
    least = 2 if counts.get(BASE, 0) > 1 else 1
    shown = {method: both for method, both in seeds.items() if counts[method] >= least}
    limit = FAR * statistics.fmean(shown[BASE][0]) if BASE in shown and METRICS[x].relative else math.inf
    far = [method for method, both in shown.items() if statistics.fmean(both[0]) > limit]
    shown = {method: both for method, both in shown.items() if method not in far}
    if len(shown) < 2:
        return None
    columns, axes, bars = [], [], []
    for number, metric in enumerate((x, y)):
        values = [both[number] for both in shown.values()]
        scale, axis = _axis(METRICS[metric], [value for own in values for value in own])
        placed = [scale(statistics.fmean(own)) for own in values]
        ends = {
            "array": [scale(max(own)) - at for own, at in zip(values, placed, strict=True)],
            "arrayminus": [at - scale(min(own)) for own, at in zip(values, placed, strict=True)],
        }
        columns.append(placed)
        axes.append(axis)
        bars.append({"type": "data", "symmetric": False, "color": MUTED, "thickness": 1, "width": 0} | ends)
    points = list(zip(*columns, strict=True))
    figure = base_figure(520, axes[0], axes[1], {"r": 16, "t": 16})
    sides = METRICS[x].better, METRICS[y].better
    if sides[0] is not None and sides[1] is not None:
        best = [points[i] for i in front(points, sides[0], sides[1])]
        line = {"color": MUTED, "width": 1.5, "shape": steps(sides[0])}
        figure.add_scatter(x=[p[0] for p in best], y=[p[1] for p in best], mode="lines", line=line)
    colors = [INK if name == BASE else MUTED for name in shown]
    marks = {"color": colors, "size": 8}
    figure.add_scatter(x=columns[0], y=columns[1], mode="markers", marker=marks, error_x=bars[0], error_y=bars[1])
    # The first labels find room more easily: that of the base, then methods with several seeds, long names first.
    order = sorted(enumerate(shown), key=lambda it: (it[1] != BASE, len(shown[it[1]][0]) < 2, -len(it[1])))
    figure.add_trace(labels(points, dict(order), [axis["range"] for axis in axes], (600, 480)))
    if far:
        figure.layout.xaxis.title.text += f"<br>above {limit:.2g}: {', '.join(far)}"
    return figure


def _axis(how: Compared, values: Sequence[float]) -> tuple[Callable[[float], float], dict[str, Any]]:
    """Where a value is on the axis of some, and plotly's settings of it; logarithmic where they differ widely."""
    title = {"text": f"{how.title} ({how.better} is better)" if how.better else how.title}
    if min(values) <= 0 or max(values) < WIDE * min(values):
        return float, {"title": title, "range": span(values)}
    ends = span([math.log10(value) for value in values])
    return math.log10, {"title": title, "range": ends, **_ticks(min(values), max(values), math.log10)}


def _ticks(low: float, high: float, scale: Callable[[float], float]) -> dict[str, Any]:
    """Ticks of a logarithmic axis at round numbers."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    fine = (1, 1.1, 1.2, 1.5, 2, 3, 5, 7, 8, 9) if high < 3 * low else (1, 2, 5) if high < 300 * low else (1,)
    if high < 1.4 * low:
        fine = (*fine, 1.05, 1.15, 8.5, 9.5)
    numbers = [digit * 10.0**power for power in powers for digit in fine]
    kept = [number for number in numbers if low / 1.3 <= number <= high * 1.3]
    return {"tickvals": [scale(number) for number in kept], "ticktext": [f"{number:g}" for number in kept]}
