"""The picture of any two numbers: what the page's own script needs to draw it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sampled_sae.report import page_parts as parts
from sampled_sae.report import plotting
from sampled_sae.report.metrics import EVALUATIONS, Metric
from sampled_sae.report.pareto import about, marker, told
from sampled_sae.report.plotting import plain
from sampled_sae.report.rows import Configuration
from sampled_sae.report.sweep import BASE, Sweep, key_of
from sampled_sae.report.text import in_html

FIRST = (("absorption", "probing_5"), ("fvu", "autointerp"), ("fvu", "ce_recovered"), ("fvu", "alive"))
"""Pairs (x, y) to begin with, the first one that is there: the paper's own before others."""


def explore_part(sweep: Sweep, look: plotting.Styles, prefix: str) -> str:
    """Two boxes that choose the axes, the picture, and who is on the front."""
    metrics = [metric for metric in sweep.metrics if sweep.having(metric)]
    if len(metrics) < 2:
        return "<p class='note'>It takes two numbers: run <code>sampled-sae eval</code> first.</p>"
    x, y = _first(sweep, metrics)
    boxes = "".join(
        f"<label>{text} {_axis_box(metrics, chosen, axis)}</label>"
        for text, axis, chosen in (("Across", "x", x), ("Up", "y", y))
    )
    each = parts.several(list(sweep.rows), "<label><input type='checkbox' data-each> every seed</label>")
    key = parts.key_list((style.glyph, group, style.color) for group, style in look.items())
    content = parts.script_json(json.dumps(_content(sweep, metrics, look), ensure_ascii=False, allow_nan=False))
    return f"""<p class="note">Choose any two numbers. The line is the front: nothing lies on its better side.
<span class="mouse">Drag to enlarge, double-click to go back.</span></p>
<div data-explorer="{prefix}pareto"><p class="controls">{boxes}{each}</p>{key}
<div class="plot" id="{prefix}pareto" role="img" aria-label="Two numbers of each SAE"></div>
<p class="note" data-front aria-live="polite"></p><dl data-meanings></dl>
<script type="application/json">{content}</script></div>"""


def _first(sweep: Sweep, metrics: Sequence[Metric]) -> tuple[Metric, Metric]:
    by_name = {metric.name: metric for metric in metrics}
    for x, y in FIRST:
        if x in by_name and y in by_name and sweep.having(by_name[x], by_name[y]):
            return by_name[x], by_name[y]
    return metrics[0], metrics[1]


def _axis_box(metrics: Sequence[Metric], chosen: Metric, axis: str) -> str:
    groups = []
    for evaluation, title in EVALUATIONS.items():
        options = "".join(
            f"<option value='{metric.name}'{' selected' * (metric is chosen)}>{in_html(metric.title)}</option>"
            for metric in metrics
            if metric.evaluation == evaluation
        )
        groups.append(f"<optgroup label='{in_html(title)}'>{options}</optgroup>" if options else "")
    return f"<select data-axis='{axis}'>{''.join(groups)}</select>"


def _content(sweep: Sweep, metrics: Sequence[Metric], look: plotting.Styles) -> dict[str, Any]:
    each = [
        Configuration(str(run["label"]), row.group, row.l, (run,))
        for row in sweep.rows
        for run in row.runs
        if len(row.runs) > 1 or len(sweep.saes) > len(sweep.rows)
    ]
    figure = plotting.base_figure(460, {"nticks": 8}, {"nticks": 8}, {"r": 16}).update_layout(dragmode="zoom")
    return {
        "layout": figure.layout.to_plotly_json(),
        "front": plotting.MUTED,
        "bars": plotting.PALE,
        "metrics": {
            metric.name: {
                "title": metric.title,
                "axis": plain(metric.axis),
                "better": metric.better,
                "meaning": metric.meaning,
            }
            for metric in metrics
        },
        # The base is drawn last, on top.
        "groups": [
            {"name": group, "marker": marker(style, group)}
            for group, style in sorted(look.items(), key=lambda item: item[0] == BASE)
        ],
        "rows": [_point(row, metrics) for row in sweep.rows],
        "saes": [_point(row, metrics) for row in each],
    }


def _point(row: Configuration, metrics: Sequence[Metric]) -> dict[str, Any]:
    known = [(metric, stat) for metric in metrics if (stat := row.stat(key_of(metric)))]
    return {
        "label": row.label,
        "group": row.group,
        "about": about(row),
        "values": {metric.name: list(stat) for metric, stat in known},
        "told": {metric.name: told(row, metric) for metric, _ in known},
    }
