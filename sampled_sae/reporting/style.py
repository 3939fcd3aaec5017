"""Colors, symbols and axes of all figures.

Colors are written for a light page; the page swaps them by `DARK` where the reader prefers a dark one.
"""

from __future__ import annotations

import html
import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sampled_sae.reporting.sweep import Configuration
from sampled_sae.utils.measures import Stat, form, shown

if TYPE_CHECKING:
    import plotly.graph_objects as go

INK, MUTED, GRID, PAPER = "#1c2024", "#6b7076", "#e3e3de", "#fdfdfb"
PALE = "#b9bec2"  # for bars and lines that many others cross
SCALE = ["#f3f5f6", "#5ab4e6"]  # pale enough for ink on it
# From a little to much, for lines and points.
SHADES = ["#9cc4e4", "#74acd8", "#4f93c8", "#3279b0", "#1f6096", "#13497a", "#0a345d"]
DARK_SHADES = ["#33506b", "#3c668c", "#4a7fae", "#5d98ca", "#7bb0de", "#a0c8ec", "#cbe2f8"]
DARK = {
    INK: "#e8e8e4",
    MUTED: "#9ba1a8",
    GRID: "#2e3338",
    PAPER: "#16191c",
    PALE: "#4e565e",
    "#000000": "#ffffff",
    "#a89a00": "#f0e442",  # Okabe and Ito's yellow is too pale for a white page
    "#0072b2": "#2b8fd0",
    SCALE[0]: "#20252a",
    SCALE[1]: "#1b5f8c",
    **dict(zip(SHADES, DARK_SHADES, strict=True)),
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
DASHES = ["solid", "9px,4px", "2px,3px", "9px,3px,2px,3px", "16px,4px", "16px,3px,2px,3px,2px,3px"]
LABEL_WIDTH = 20  # letters a line


class Style(NamedTuple):
    """How one group looks in every figure: color, plotly's symbol, and a letter that looks like it."""

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
    """Text escaped for plotly, whose labels may contain HTML."""
    return html.escape(shown(text), quote=False)


def wrapped(text: str) -> str:
    """A label in at most two short lines, so that a phone has room for the figure."""
    return "<br>".join(map(plain, textwrap.wrap(text, LABEL_WIDTH, max_lines=2, placeholder="…")))


def described(label: str, stat: Stat | None) -> str:
    """The hover text of a point: label, mean and, where seeds differ, their range."""
    if stat is None:
        return f"{plain(label)}: no value"
    spread = f"<br>seeds {form(stat.low, 3)} to {form(stat.high, 3)}" if stat.low < stat.high else ""
    return f"<b>{plain(label)}</b><br>{form(stat.mean, 3)}{spread}"


def base_figure(height: int, x: dict[str, Any], y: dict[str, Any], margin: dict[str, int]) -> go.Figure:
    """An empty figure with our fonts, colors and axes; `x` and `y` are plotly's settings of both axes."""
    import plotly.graph_objects as go

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
    # Whole at once: plotly's own updates take most of a page's time.
    return go.Figure(layout={**layout, "xaxis": _merged(axis, x), "yaxis": _merged(axis, y)})


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
    known = [stat for stat in stats if stat]
    lowest, best = min((s.low for s in known), default=0.0), max((s.high for s in known), default=0.0)
    return [max(lowest, min(0.0, best - 1)) - 0.03, 1.0]


def error_bars(stats: list[Stat | None], name: str, color: str = MUTED) -> dict[str, Any]:
    """Bars from the smallest to the largest over the seeds, or nothing where all have one."""
    if not any(stat and stat.low < stat.high for stat in stats):
        return {}
    up = [stat and stat.high - stat.mean for stat in stats]
    down = [stat and stat.mean - stat.low for stat in stats]
    look = {"thickness": 1, "width": 0, "color": color}
    return {name: {"type": "data", "symmetric": False, "array": up, "arrayminus": down, **look}}
