"""Figures: what all of them share; scatter plots with the Pareto front and labels that fit."""

from __future__ import annotations

import html
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sampled_sae.reporting.palette import FREE, GRID, GROUPS, INK, MUTED, PALE, PAPER, SCALE, Style
from sampled_sae.reporting.sweep import BASE, Configuration, Sweep, group_title, key_of
from sampled_sae.utils.measures import Better, Metric, Stat, form, shown

if TYPE_CHECKING:
    import plotly.graph_objects as go

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
DASHES = ["solid", "9px,4px", "2px,3px", "9px,3px,2px,3px", "16px,4px", "16px,3px,2px,3px,2px,3px"]
LABEL_WIDTH, AXIS_WIDTH = 20, 44  # letters per line of a label and of the title of an axis


Styles = dict[str, Style]


def styles(rows: Iterable[Configuration]) -> Styles:
    """A style for each group, in the order of the file; a user's own groups take the free ones in turn."""
    groups = dict.fromkeys(row.group for row in rows)
    free = itertools.cycle([*FREE, *(style for group, style in GROUPS.items() if group not in groups)])
    return {group: GROUPS.get(group) or next(free) for group in groups}


def plain(text: str) -> str:
    """Text escaped for plotly, whose labels may contain HTML."""
    return html.escape(shown(text), quote=False)


def wrapped(text: str) -> str:
    """A label in at most two short lines, so that a phone has room for the figure; a method breaks at a comma."""
    words = re.sub(r"([:,])(?=\S)", "\\1\0 ", text)  # a zero marks a space that is not in the text
    lines = textwrap.wrap(words, LABEL_WIDTH + 2 * words.count("\0"), max_lines=2, placeholder="…")
    return "<br>".join(plain(line.replace("\0 ", "").replace("\0", "")) for line in lines)


def axis_title(text: str) -> str:
    """Title of an axis; a long one in lines that are shorter than a small figure is high or wide."""
    if len(text) <= AXIS_WIDTH:
        return plain(text)
    together = re.sub(r"\([^()]*\)", lambda found: found[0].replace(" ", "\0"), text)
    return "<br>".join(plain(line.replace("\0", " ")) for line in textwrap.wrap(together, AXIS_WIDTH))


def described(label: str, stat: Stat | None) -> str:
    """The hover text of a point: label, mean and, where seeds differ, their range."""
    if stat is None:
        return f"{plain(label)}: no value"
    spread = f"<br>seeds {form(stat.low, 3)} to {form(stat.high, 3)}" if stat.low < stat.high else ""
    return f"<b>{plain(label)}</b><br>{form(stat.mean, 3)}{spread}"


def base_figure(height: int, x: dict[str, Any], y: dict[str, Any], margin: dict[str, int]) -> go.Figure:
    """An empty figure with our fonts, colors and axes; `x` and `y` are plotly's settings of both axes."""
    import plotly.graph_objects as go

    font = {"color": MUTED, "size": 12}
    axis: dict[str, Any] = {"tickfont": font, "title": {"font": font, "standoff": 8}, "ticks": "", "automargin": True}
    axis |= {"gridcolor": GRID, "linecolor": GRID, "zeroline": False, "ticklabelstandoff": 4}
    # Whole at once: plotly's own updates take most of a page's time.
    layout = {
        "template": "none",
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8, **margin},
        **dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)"),
        "font": {"family": FONT, "color": INK, "size": 13},
        "hoverlabel": {"bgcolor": PAPER, "bordercolor": MUTED, "font": {"color": INK, "size": 13}},
        **{"hovermode": "closest", "showlegend": False, "dragmode": False},
        **{"xaxis": _merged(axis, x), "yaxis": _merged(axis, y)},
    }
    return go.Figure(layout=layout)


def heatmap(
    height: int,
    x: dict[str, Any],
    y: dict[str, Any],
    z: Sequence[Sequence[float | None]],
    hover: Sequence[Sequence[str]],
    ink: str | None = INK,
    size: int = 13,
) -> go.Figure:
    """Shares from 0 to 1 as colors, with two digits in each cell unless `ink` is None."""
    return base_figure(height, {"fixedrange": True, **x}, {"fixedrange": True, **y}, {}).add_heatmap(
        z=z,
        text=[[form(value, 2) for value in row] for row in z],
        customdata=hover,
        texttemplate="%{text}" if ink else "",
        hovertemplate="%{customdata}<extra></extra>",
        textfont={"color": ink or INK, "size": size},
        colorscale=[[i, color] for i, color in enumerate(SCALE)],
        zmin=0,
        zmax=1,
        showscale=False,
        xgap=3,
        ygap=3,
    )


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Both, also inside of what both have; the new one wins."""
    both = {name: _merged(old[name], value) for name, value in new.items() if isinstance(value, dict) and name in old}
    return old | new | both


def fve_range(stats: Iterable[Stat | None]) -> list[float]:
    """An axis up to 1. Values far below zero are left out, so that the others remain readable."""
    known = [stat for stat in stats if stat] or [Stat(0.0, 0.0, 0.0)]
    lowest, best = min(stat.low for stat in known), max(stat.high for stat in known)
    return [max(lowest, min(0.0, best - 1)) - 0.03, 1.0]


def error_bars(stats: list[Stat | None], name: str, color: str = MUTED) -> dict[str, Any]:
    """Bars from the smallest to the largest over the seeds, or nothing where all have one."""
    if not any(stat and stat.low < stat.high for stat in stats):
        return {}
    up = [stat and stat.high - stat.mean for stat in stats]
    down = [stat and stat.mean - stat.low for stat in stats]
    look = {"thickness": 1, "width": 0, "color": color}
    return {name: {"type": "data", "symmetric": False, "array": up, "arrayminus": down, **look}}


# ---- scatter plots -----------------------------------------------------------------------------------

POSITIONS = (  # plotly's names, in the order of preference
    *("top center", "middle right", "bottom center", "middle left"),
    *("top right", "bottom right", "top left", "bottom left"),
)
MARK = 6  # half the size of a point, in pixels, with a little air


class Box(NamedTuple):
    """In pixels, y upwards."""

    left: float
    low: float
    right: float
    high: float

    def meets(self, other: Box) -> bool:
        return self.left < other.right and other.left < self.right and self.low < other.high and other.low < self.high


def place(
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    size: tuple[float, float],
    font: float = 11,
    others: Sequence[tuple[float, float]] = (),
) -> list[str | None]:
    """Points in shares of the figure ([0, 1] each way) -> for each text its position, or none.

    `size` is the figure's in pixels; in a larger one nothing comes nearer. `others` are points without a label, which
    no label may cover either.
    """
    width, height = size
    pixels = [(x * width, y * height) for x, y in [*points, *others]]
    marks = [Box(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in pixels]
    taken: list[Box] = []
    chosen: list[str | None] = []
    for number, text in enumerate(texts):
        blocked = [*taken, *marks[:number], *marks[number + 1 :]]
        chosen.append(None)
        for name, box in _around(*pixels[number], 0.62 * font * max(1, len(text)), 1.25 * font):
            inside = box.left >= 0 and box.right <= width and box.low >= 0 and box.high <= height
            if inside and not any(map(box.meets, blocked)):
                taken.append(box)
                chosen[-1] = name
                break
    return chosen


def labels(
    points: Sequence[tuple[float, float]],
    texts: Mapping[int, str],
    ranges: Sequence[Sequence[float]],
    size: tuple[float, float],
) -> dict[str, Any]:
    """The trace of the labels of some points, by their index, as far as there is room inside these axes."""
    (left, right), (low, high) = ranges
    shares = [((x - left) / (right - left), (y - low) / (high - low)) for x, y in points]
    others = [share for i, share in enumerate(shares) if i not in texts]
    positions = place([shares[i] for i in texts], list(texts.values()), size, 11, others)
    shown = [(*points[i], texts[i], where) for i, where in zip(texts, positions, strict=True) if where]
    return {
        "type": "scatter",
        "mode": "markers+text",
        "marker": {"size": 10, "opacity": 0},  # keeps the label at a distance
        "x": [x for x, *_ in shown],
        "y": [y for _, y, *_ in shown],
        "text": [plain(text) for *_, text, _ in shown],
        "textposition": [where for *_, where in shown],
        "textfont": {"size": 11, "color": INK},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _around(x: float, y: float, width: float, height: float) -> Iterator[tuple[str, Box]]:
    """The boxes of a text of this size around a point."""
    for name in POSITIONS:
        up, side = name.split()
        low = {"top": y + MARK, "middle": y - height / 2, "bottom": y - MARK - height}[up]
        left = {"left": x - MARK - width, "center": x - width / 2, "right": x + MARK}[side]
        if up != "middle" and side != "center":
            # plotly puts corner labels beside the point, not away from it.
            left += MARK if side == "left" else -MARK
        yield name, Box(left, low, left + width, low + height)


REFERENCE = "fvu"  # the metric on the x-axis of the paper's figures
PAIRS = (("probing_5", "absorption"),)  # other pairs (y, x) of the paper's figures


def front(points: Sequence[tuple[float, float]], x_better: Better, y_better: Better) -> list[int]:
    """Indices of the Pareto front, by x: no other point is as good in both metrics and better in one."""
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


def means(rows: Sequence[Configuration], x: Metric, y: Metric) -> list[tuple[float, float]]:
    """The points of rows that have both metrics."""
    return [(row.mean(key_of(x)) or 0.0, row.mean(key_of(y)) or 0.0) for row in rows]


def about(row: Configuration) -> str:
    """The settings of a row, for hover texts (plotly's HTML)."""
    run = row.runs[0]
    seeds = [str(one["seed"]) for one in row.runs if one["seed"] is not None]
    words = [
        f"K = {run['k']:g}" if run["k"] is not None else "",
        f"lr {run['lr']:g}" if run["lr"] is not None else "",
        f"seed{'s' * (len(seeds) > 1)} {plain(', '.join(seeds))}" if seeds else "",
    ]
    return f"<b>{plain(row.label)}</b><br>" + ", ".join(filter(None, words))


def value_text(row: Configuration, metric: Metric) -> str:
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
        "name": plain(group_title(rows[0].group)),
        "legendrank": 1 if rows[0].group == BASE else 1000,
        "marker": marker(style, rows[0].group),
        "hovertext": ["<br>".join([about(row), value_text(row, x), value_text(row, y)]) for row in rows],
        "hovertemplate": "%{hovertext}<extra></extra>",
        **error_bars(across, "error_x", PALE),
        **error_bars(up, "error_y", PALE),
    }


def pareto(sweep: Sweep, x: Metric, y: Metric, look: Styles, size: tuple[int, int]) -> go.Figure:
    """All configurations in two metrics, for a paper; the Pareto front is drawn where both have a better end."""
    rows = sweep.having(x, y)
    points = means(rows, x, y)
    ranges = [span(reach(rows, metric)) for metric in (x, y)]
    axes = [{"title": {"text": axis_title(m.axis)}, "range": ends} for m, ends in zip((x, y), ranges, strict=True)]
    figure = base_figure(size[1], axes[0], axes[1], {})
    best: list[int] = []
    if x.better and y.better:
        best = front(points, x.better, y.better)
        across, up = zip(*(points[i] for i in best), strict=True)
        line = {"color": MUTED, "width": 1.5, "shape": steps(x.better)}
        figure.add_scatter(x=across, y=up, mode="lines", line=line, name="Pareto front", hoverinfo="skip")
    # The base is drawn last, on top.
    for group in sorted(dict.fromkeys(row.group for row in rows), key=lambda group: group == BASE):
        figure.add_trace(scatter([row for row in rows if row.group == group], x, y, look[group]))
    texts = {i: rows[i].label for i in best}
    return figure.add_trace(labels(points, texts, ranges, (size[0] - 90, size[1] - 120)))
