"""Scatter plots: Pareto front, hover texts, and labels that cover neither points nor each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sampled_sae.reporting.style import INK, MUTED, PALE, Styles, base_figure, error_bars, plain
from sampled_sae.reporting.sweep import BASE, Configuration, Sweep, key_of
from sampled_sae.utils.measures import Better, Metric, Stat, form

if TYPE_CHECKING:
    import plotly.graph_objects as go

POSITIONS = (
    *("top center", "middle right", "bottom center", "middle left"),
    *("top right", "bottom right", "top left", "bottom left"),
)
"""plotly's names, in the order of preference."""
MARK = 6
"""Half the size of a point, in pixels, with a little air."""


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
    whole = Box(0, 0, width, height)
    taken: list[Box] = []
    chosen: list[str | None] = []
    for number, text in enumerate(texts):
        for name, box in _around(*pixels[number], 0.62 * font * max(1, len(text)), 1.25 * font):
            inside = whole.left <= box.left and box.right <= whole.right and whole.low <= box.low <= box.high <= height
            in_the_way = [mark for i, mark in enumerate(marks) if i != number]
            if inside and not any(box.meets(other) for other in [*taken, *in_the_way]):
                taken.append(box)
                chosen.append(name)
                break
        else:
            chosen.append(None)
    return chosen


def labels(
    points: Sequence[tuple[float, float]],
    texts: Mapping[int, str],
    ranges: Sequence[Sequence[float]],
    size: tuple[float, float],
) -> dict[str, Any]:
    """The trace of the labels of some points, by their index, as far as there is room inside these axes."""
    shares = [[(v - low) / (high - low) for v, (low, high) in zip(point, ranges, strict=True)] for point in points]
    pairs = [(x, y) for x, y in shares]
    others = [pair for i, pair in enumerate(pairs) if i not in texts]
    positions = place([pairs[i] for i in texts], list(texts.values()), size, 11, others)
    shown = [(*points[i], texts[i], where) for i, where in zip(texts, positions, strict=True) if where]
    return {
        "type": "scatter",
        "mode": "markers+text",
        "marker": UNSEEN,
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


REFERENCE = "fvu"
"""The metric on the x-axis of the paper's figures."""
PAIRS = (("probing_5", "absorption"),)
"""Other pairs (y, x) of the paper's figures."""
UNSEEN = {"size": 10, "opacity": 0}
"""A mark that keeps its label at a distance."""


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
        "name": plain(rows[0].group),
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
        figure.add_scatter(x=ends[0], y=ends[1], mode="lines", line=line, name="Pareto front", hoverinfo="skip")
    # The base is drawn last, on top.
    for group in sorted(dict.fromkeys(row.group for row in rows), key=lambda group: group == BASE):
        figure.add_trace(scatter([row for row in rows if row.group == group], x, y, look[group]))
    texts = {i: rows[i].label for i in best}
    return figure.add_trace(labels(points, texts, ranges, (size[0] - 90, size[1] - 120)))


def means(rows: Sequence[Configuration], x: Metric, y: Metric) -> list[tuple[float, float]]:
    """The points of rows that have both metrics."""
    return [(row.mean(key_of(x)) or 0.0, row.mean(key_of(y)) or 0.0) for row in rows]
