"""Figures with a panel per score: a metric against FVU with points labeled by l, firing densities, training curves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sampled_sae.reporting import figures
from sampled_sae.reporting.collect import Log
from sampled_sae.reporting.figures import DASHES, Styles, about, base_figure, means, plain, reach, scatter, span
from sampled_sae.reporting.palette import GRID, INK, SHADES
from sampled_sae.reporting.sweep import BASE, Configuration, Sweep, field, group_title, key_of
from sampled_sae.utils.measures import Metric, Stat

if TYPE_CHECKING:
    import plotly.graph_objects as go

OTHERS = "other methods"
SMALLEST = (250.0, 190.0)  # pixels inside the axes of the smallest panel: on a phone, and in a sheet
HEIGHT = 290
Trace = dict[str, Any]


class Panel(NamedTuple):
    """One of several figures side by side."""

    title: str
    traces: list[Trace]
    x: dict[str, Any]  # plotly's settings of the x-axis
    y: dict[str, Any]


def grouped(rows: Sequence[Configuration]) -> dict[str, list[Configuration]]:
    """The rows of each panel: one a score with multipliers, one for all else; BatchTopK is in none."""
    scores: dict[str, list[Configuration]] = {}
    others: list[Configuration] = []
    for row in rows:
        if row.l is not None:
            scores.setdefault(row.group, []).append(row)
        elif row.group != BASE:
            others.append(row)
    found = {group_title(name): sorted(group, key=lambda row: row.l or 0.0) for name, group in scores.items()}
    return found | ({OTHERS: others} if others else {})


def against(sweep: Sweep, x: Metric, y: Metric, look: Styles) -> list[Panel]:
    """`y` against `x`, a panel for each score, each with axes that fit it and with BatchTopK to measure by."""
    rows = sweep.having(x, y)
    base = [row for row in rows if row.group == BASE]
    panels = []
    for title, members in (grouped(rows) or {BASE: []}).items():
        ranges = [span(reach([*members, *base], metric), 0.14) for metric in (x, y)]
        traces = [_thread(members, x, y)] if title != OTHERS else []
        for group in dict.fromkeys(row.group for row in members):
            traces.append(scatter([row for row in members if row.group == group], x, y, look[group]))
        if base:
            traces.append(scatter(base, x, y, look[BASE]))
        titles = (figures.axis_title(x.axis), figures.axis_title(y.title))
        axes = [{"title": {"text": title}, "range": r, "nticks": 6} for title, r in zip(titles, ranges, strict=True)]
        # l beside each point, or the label where there is no l.
        texts = {i: f"{row.l:g}" if row.l is not None else row.label for i, row in enumerate(members)}
        traces.append(figures.labels(means([*members, *base], x, y), texts, ranges, SMALLEST))
        panels.append(Panel(title, traces, *axes))
    return panels


def _thread(rows: Sequence[Configuration], x: Metric, y: Metric) -> Trace:
    """A thin line from l to l, where each l is there once."""
    once = len({row.l for row in rows}) == len(rows)
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [row.mean(key_of(x)) for row in rows] if once else [],
        "y": [row.mean(key_of(y)) for row in rows] if once else [],
        "line": {"color": GRID, "width": 1.5},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def densities(sweep: Sweep, look: Styles) -> list[Panel]:
    """How many latents fire how often: a line for each configuration, the darker the larger its l; axes are shared."""
    rows = [row for row in sweep.rows if any(run["density"] for run in row.runs)]
    if not rows:
        return []
    shade = shades(rows)
    base = [_histogram(row, row.label, look[BASE].color, "3px,3px") for row in rows if row.group == BASE]
    drawn: dict[str, list[Trace]] = {}
    for title, members in (grouped(rows) or {BASE: []}).items():
        seen: Counter[str] = Counter()
        drawn[title] = []
        for row in members:
            own = row.label, look[row.group].color, DASHES[seen[row.group] % len(DASHES)]
            drawn[title].append(_histogram(row, *(own if row.l is None else (f"l = {row.l:g}", shade[row.l], "solid"))))
            seen[row.group] += 1
    traces = [trace for traces in [*drawn.values(), base] for trace in traces]
    steps = [pair for trace in traces for pair in zip(trace["x"], trace["y"], strict=True)]
    lowest = min(math.log10(edge) for edge, share in steps if share)
    decades = range(math.floor(lowest), 1)
    x = {
        "type": "log",
        "title": {"text": "share of tokens on which a latent fires"},
        "range": [lowest - 0.1, 0.05],
        "tickvals": [10.0**i for i in decades],
        "ticktext": [f"{10.0 ** (i + 2):.{max(0, -i - 2)}f}%" for i in decades],
    }
    highest = max(share for _, share in steps)
    y = {"title": {"text": "share of latents"}, "range": [0, 1.06 * highest], "nticks": 6}
    return [Panel(title, [*traces, *base], x, y) for title, traces in drawn.items()]


def shades(rows: Sequence[Configuration]) -> dict[float, str]:
    """A color for each multiplier, by rank."""
    known = sorted({row.l for row in rows if row.l is not None})
    last = max(1, len(known) - 1)
    return {l: SHADES[round(i * (len(SHADES) - 1) / last)] for i, l in enumerate(known)}


def _histogram(row: Configuration, name: str, color: str, dashes: str) -> Trace:
    """The mean over seeds, as steps."""
    known = [run["density"] for run in row.runs if run["density"]]
    same = [one for one in known if one["edges"] == known[0]["edges"]]
    shares = [sum(values) / len(same) for values in zip(*(one["shares"] for one in same), strict=True)]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [10.0**edge for edge in known[0]["edges"]],
        "y": [*shares, shares[-1]],
        "line": {"color": color, "width": 1.6, "dash": dashes, "shape": "hv"},
        "name": plain(name),
        "legendgroup": plain(name),
        "hovertemplate": f"{about(row)}<br>fires on %{{x:.1e}} of the tokens or more:<br>"
        "%{y:.3f} of the latents<extra></extra>",
    }


def singles(panels: Sequence[Panel]) -> list[tuple[str, go.Figure]]:
    """Each panel as a figure of its own, for a page that lays them out itself."""
    return [(one.title, base_figure(HEIGHT, one.x, one.y, {"r": 12}).add_traces(one.traces)) for one in panels]


def sheet(panels: Sequence[Panel], width: int) -> go.Figure:
    """All panels in one figure with one legend, for a paper."""
    from plotly.subplots import make_subplots

    columns = {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
    rows = -(-len(panels) // columns)
    height = 70 + 250 * rows
    figure = make_subplots(
        rows,
        columns,
        subplot_titles=[plain(panel.title) for panel in panels],
        horizontal_spacing=0.2 / columns,
        vertical_spacing=0.3 / rows if rows > 1 else 0.1,
    )
    named: set[str] = set()
    for number, panel in enumerate(panels):
        row, column = number // columns + 1, number % columns + 1
        for trace in panel.traces:
            new = "name" in trace and trace["name"] not in named
            named |= {trace["name"]} if new else set()
            figure.add_trace({**trace, "showlegend": new}, row, column)
        look = base_figure(height, panel.x, panel.y, {}).layout.to_plotly_json()
        # Only the outer panels name their axes.
        inner_x, inner_y = ({"title": None} if i else {} for i in (number + columns < len(panels), column > 1))
        figure.update_xaxes(look.pop("xaxis") | inner_x, row=row, col=column)
        figure.update_yaxes(look.pop("yaxis") | inner_y, row=row, col=column)
        figure.update_layout(look)
    figure.update_annotations(font={"size": 13, "color": INK})
    return figure.update_layout(width=width, height=height)


MAX_POINTS = 200  # of one curve: more cannot be distinguished on a screen


def dash(index: int) -> tuple[str, float]:
    """Dash pattern and width of the line of a group's n-th configuration."""
    return DASHES[index % len(DASHES)], 2.2 if index < len(DASHES) else 1.0


def curves(rows: Sequence[Configuration], look: Styles, log: Log, key: str) -> go.Figure:
    """One number of the log against the step: a line a configuration, and a hidden band over its seeds."""
    groups = list(look)
    lines = [(row, _points(row, log, key)) for row in rows]
    y: dict[str, Any] = {"rangemode": "tozero"}
    if key == "loss":
        y = {"type": "log", "tickformat": "~g"} | log_ticks([stat.mean for _, points in lines for _, stat in points])
    if key == "fve":
        y = {"range": figures.fve_range(stat for _, points in lines for _, stat in points)}
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
