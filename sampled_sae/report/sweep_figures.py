"""The figures of a sweep for a paper: which ones there are, and their PNG and PDF files."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from sampled_sae.errors import UserError
from sampled_sae.files import make_folder
from sampled_sae.report import panels, pareto
from sampled_sae.report.curves import curves
from sampled_sae.report.metrics import FVU
from sampled_sae.report.page_training import CURVES
from sampled_sae.report.plotting import INK, MUTED, Styles, plain
from sampled_sae.report.sweep import Sweep

FORMATS = ("png", "pdf")
WIDTH, SMALL = 760, (560, 430)
"""Pixels of a sheet's width, and of a single picture."""
SCALE = 3
"""PNG pixels a pixel: 300 a printed inch at the width of a column."""
PAPER_FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"


def paper_figures(sweep: Sweep, look: Styles) -> Iterator[tuple[str, go.Figure]]:
    """File names without their ends, and figures."""
    headline = [metric for metric in sweep.metrics if metric.headline and metric.name != FVU.name]
    for metric in headline:
        if sweep.having(FVU, metric):
            if metric.better:
                yield f"pareto-{metric.name}-fvu", _paper(pareto.pareto(sweep, FVU, metric, look, SMALL), *SMALL)
            yield f"panels-{metric.name}-fvu", _sheet(panels.against(sweep, FVU, metric, look))
    for y_name, x_name in pareto.PAIRS:
        x, y = sweep.metric(x_name), sweep.metric(y_name)
        if x and y and sweep.having(x, y):
            yield f"pareto-{y_name}-{x_name}", _paper(pareto.pareto(sweep, x, y, look, SMALL), *SMALL)
    drawn = panels.densities(sweep, look)
    if drawn:
        yield "density", _sheet(drawn)
    for key, title, _ in CURVES:
        figure = curves(list(sweep.rows), look, sweep.log, key)
        if figure.data:
            yield f"training-{key}", _curves(figure, look, title)


def _sheet(drawn: Sequence[panels.Panel]) -> go.Figure:
    figure = panels.sheet(drawn, WIDTH)
    return _paper(figure, WIDTH, figure.layout.height + 30, top=34)


def _curves(figure: go.Figure, look: Styles, title: str) -> go.Figure:
    """Lines in the colours of their groups: single configurations cannot be told apart on paper."""
    named: set[str] = set()
    groups = list(look)
    for trace in figure.data:
        group = plain(groups[trace.meta["group"]])
        trace.update(showlegend=group not in named and not trace.meta["band"], name=group, legendgroup=group)
        if not trace.meta["band"]:
            named.add(group)
    figure.update_yaxes(title={"text": title})
    return _paper(figure, *SMALL)


def _paper(figure: go.Figure, width: int, height: int, top: int = 14) -> go.Figure:
    """White paper, a legend below, a font that every printer has."""
    legend: dict[str, Any] = {"orientation": "h", "x": 0, "xanchor": "left", "y": 0, "yanchor": "bottom"}
    legend |= {"yref": "container", "font": {"size": 12, "color": INK}, "itemsizing": "constant"}
    axis = {"tickfont": {"color": INK, "size": 12}, "linecolor": MUTED, "showline": True}
    figure.update_xaxes(axis).update_yaxes(axis)
    figure.for_each_xaxis(lambda side: side.title.update(font={"size": 13, "color": INK}))
    figure.for_each_yaxis(lambda side: side.title.update(font={"size": 13, "color": INK}))
    return figure.update_layout(
        paper_bgcolor="white",
        plot_bgcolor="white",
        font={"family": PAPER_FONT, "color": INK},
        showlegend=True,
        legend=legend,
        width=width,
        height=height,
        margin={"l": 12, "r": 16, "t": top, "b": 90},
    )


def missing_for_figures() -> str | None:
    """Why pictures cannot be written as files here, in one line; none if they can, as far as one sees before."""
    for name in ("plotly", "kaleido"):
        if importlib.util.find_spec(name) is None:
            return f"no PNG and PDF: {name} is missing; pip install 'sampled-sae[report]'"
    return None


def write_figures(figures: Sequence[tuple[str, go.Figure]], folder: Path) -> list[Path]:
    """Write each figure in all formats; all of them through one browser, which takes a second to start."""
    import plotly.io

    if not figures:
        return []
    if not hasattr(plotly.io, "write_images"):
        raise UserError("no PNG and PDF: plotly is too old; pip install 'sampled-sae[report]'")
    make_folder(folder)
    files = [(figure, folder / f"{name}.{end}") for name, figure in figures for end in FORMATS]
    try:
        plotly.io.write_images(
            [figure for figure, _ in files],
            [path for _, path in files],
            width=[figure.layout.width for figure, _ in files],
            height=[figure.layout.height for figure, _ in files],
            scale=[SCALE if path.suffix == ".png" else 1 for _, path in files],
        )
    except (RuntimeError, OSError, ValueError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"no PNG and PDF: kaleido could not draw them ({first})") from error
    return [path for _, path in files]
