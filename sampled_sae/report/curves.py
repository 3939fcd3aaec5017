"""The log of a training as pictures: a line for each configuration."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go

from sampled_sae.report.plotting import DASHES, Styles, base_figure, fve_range, plain
from sampled_sae.report.rows import Configuration, Stat, field
from sampled_sae.report.training_log import Log

MAX_POINTS = 200  # of one curve: more cannot be told apart on a screen


def dash(place: int) -> tuple[str, float]:
    """Dash pattern and width of the line of a group's n-th configuration."""
    return DASHES[place % len(DASHES)], 2.2 if place < len(DASHES) else 1.0


def curves(rows: list[Configuration], look: Styles, log: Log, key: str) -> go.Figure:
    """One number of the log against the step: a line a configuration, and a hidden band over its seeds."""
    groups = list(look)
    lines = [(row, _points(row, log, key)) for row in rows]
    y: dict[str, Any] = {"rangemode": "tozero"}
    if key == "loss":
        y = {"type": "log", "tickformat": "~g"} | log_ticks([stat.mean for _, points in lines for _, stat in points])
    if key == "fve":
        y = {"range": fve_range(stat for _, points in lines for _, stat in points)}
    x = {"title": {"text": "step"}, "nticks": 6, "tickformat": ",", "rangemode": "tozero"}
    figure = base_figure(280, x, y, {"r": 12}).update_layout(dragmode="zoom")
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


def log_ticks(values: list[float]) -> dict[str, Any]:
    """Ticks of a logarithmic axis; where the values span less than a decade plotly would draw one or none."""
    above = [value for value in values if value > 0]
    if not above or max(above) / min(above) >= 10:
        return {"dtick": "D2"}
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    decades = range(math.floor(math.log10(min(above))), math.floor(math.log10(max(above))) + 1)
    return {"tickvals": [float(f"{step}e{decade}") for decade in decades for step in steps]}


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
