"""What `sampled-sae compare` found, on the page: seeds, configurations, features that only one of two SAEs has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from sampled_sae.reporting import pages as parts
from sampled_sae.reporting.compare_terminal import OLD_UNIQUE, matrix_caption, unique_note
from sampled_sae.reporting.style import INK, SCALE, base_figure, plain, wrapped
from sampled_sae.reporting.sweep import Stat
from sampled_sae.utils.measures import form, in_html, number, shown

ROW = 34
"""Pixels a row of a matrix."""


def compare_part(folder: Path, content: dict[str, Any], number_: int) -> str:
    """One compare.json."""
    inner = [_seeds(_list(content, "seeds"))]
    scores = content.get("scores") if isinstance(content.get("scores"), dict) else {}
    for name, title in (("all", "MMCS between configurations"), ("live", "The same, live latents only")):
        figure = _matrix(scores.get(name) if isinstance(scores, dict) else None)
        if figure is not None:
            caption = f"From the row's latents to the column's ({matrix_caption(content)})."
            inner.append(parts.figure_block(f"compare-{number_}-{name}", figure, title, caption))
    inner += [_unique(content), _top(_list(content, "saes")), _skipped(_list(content, "skipped"))]
    if not any(inner):
        inner = ["<p class='note'>The file holds no comparison.</p>"]
    meaning = """<p class="note">MMCS is the mean over latents of the largest cosine of a latent's decoder row with any
of the other SAE's; random is what random directions would give.</p>"""
    return f"<section><h2>Comparison ({in_html(folder.name)})</h2>{meaning}{''.join(inner)}</section>"


def _list(content: Any, name: str) -> list[dict[str, Any]]:
    found = content.get(name) if isinstance(content, dict) else None
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _seeds(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    heads = ["Configuration", "Seeds", "MMCS", "random", "MMCS, live", "random, live", "one-to-one", "same feature"]
    lines = []
    for row in rows:
        cells = [_spread(row.get("mmcs")), _plain(row.get("random")), _spread(row.get("live"))]
        cells += [_plain(row.get("live_random")), _spread(row.get("matched")), _spread(row.get("shared"))]
        count = len(row["seeds"]) if isinstance(row.get("seeds"), list) else 0
        name = f"<th scope='row'>{in_html(row.get('group'))}</th>"
        lines.append(f"{name}<td data-value='{count}'>{count}</td>" + "".join(cells))
    table = parts.table([f"<button>{head}</button>" for head in heads], lines, label="Across seeds")
    return f"<h3 class='apart'>Across seeds</h3>{table}"


def _spread(value: Any) -> str:
    """Mean over pairs, with the smallest and the largest below."""
    numbers = [number(value.get(name)) for name in ("mean", "low", "high")] if isinstance(value, dict) else [None]
    known = [one for one in numbers if one is not None]
    return parts.cell(Stat(*known) if len(known) == 3 else None, 3, False)


def _plain(value: Any) -> str:
    found = number(value)
    return parts.cell(None if found is None else Stat(found, found, found), 3, False)


def _matrix(table: Any) -> go.Figure | None:
    if not isinstance(table, dict) or not isinstance(table.get("groups"), list) or len(table["groups"]) < 2:
        return None
    names, values = [shown(name) for name in table["groups"]], table.get("mmcs")
    if not isinstance(values, list) or len(values) != len(names) or not all(isinstance(row, list) for row in values):
        return None
    z = [[number(value) for value in row] for row in values]
    ticks = {"tickvals": list(range(len(names))), "showgrid": False, "fixedrange": True}
    x = {**ticks, "ticktext": [wrapped(name) for name in names], "side": "top", "tickangle": -45}
    y = {**ticks, "ticktext": [wrapped(name) for name in names], "range": [len(names) - 0.5, -0.5]}
    figure = base_figure(120 + ROW * len(names), x, y, {})
    few = len(names) <= 12
    return figure.add_heatmap(
        z=z,
        text=[[form(value, 2) for value in row] for row in z],
        customdata=[[f"{plain(a)} to {plain(b)}" for b in names] for a in names],
        texttemplate="%{text}" if few else "",
        hovertemplate="%{customdata}<br>%{text}<extra></extra>",
        textfont={"color": INK, "size": 11},
        colorscale=[[i, color] for i, color in enumerate(SCALE)],
        zmin=0,
        zmax=1,
        showscale=False,
        xgap=2,
        ygap=2,
    )


UNIQUE_HEADS = (
    *("latent", "explanation", "score", "best match", "its explanation"),
    *("overall", "decoder", "text", "nearest of all"),
)
UNIQUE_NAMES = (
    *("latent", "explanation", "score", "match", "match_explanation"),
    *("overall", "decoder", "text", "nearest"),
)


def _unique(content: dict[str, Any]) -> str:
    """Latents of one SAE that have no equal in the other, and whose best match there is poor."""
    settings = content.get("settings")
    threshold = number(settings.get("threshold")) if isinstance(settings, dict) else None
    made, old = [], 0
    for item in (item for pair in _list(content, "pairs") for item in _list(pair, "unique")):
        rows, equals, latents = _list(item, "table"), item.get("equals"), item.get("latents")
        if not isinstance(equals, int) or not isinstance(latents, int) or threshold is None:
            old += bool(rows)
        elif rows or equals:
            title = f"{item.get('of')} against {item.get('against')}"
            note = unique_note(equals, latents, str(item.get("against")), threshold)
            made.append(_words(title, UNIQUE_HEADS, UNIQUE_NAMES, rows, note))
    again = f"<p class='note'>Tables of unique features left out ({old}): {OLD_UNIQUE}.</p>" if old else ""
    return _fold("Features that only one of two SAEs has", made) + again


def _top(saes: Sequence[dict[str, Any]]) -> str:
    made = [
        _words(str(sae.get("name")), ("latent", "score", "explanation"), ("latent", "score", "explanation"), rows)
        for sae in saes
        if (rows := _list(sae, "top_features"))
    ]
    return _fold("Best explained features", made)


def _words(
    title: str, heads: Iterable[str], names: Sequence[str], rows: Sequence[dict[str, Any]], note: str = ""
) -> str:
    """A folded table of features, none where there are no rows, with a note below."""
    lines = []
    for row in rows:
        cells = [row.get(name) for name in names]
        texts = [form(cell, 3) if isinstance(cell, float) else "-" if cell is None else in_html(cell) for cell in cells]
        kinds = [" class='text'" if isinstance(cell, str) else "" for cell in cells]
        first = f"<th scope='row'>{texts[0]}</th>"
        lines.append(first + "".join(f"<td{k}>{t}</td>" for k, t in zip(kinds[1:], texts[1:], strict=True)))
    left = {place for place, name in enumerate(names) if "explanation" in name}
    table = parts.table(list(heads), lines, "paper", title, left) if lines else ""
    below = f"<p class='note'>{in_html(note)}</p>" if note else ""
    return f"<details><summary>{in_html(title)}</summary>{table}{below}</details>"


def _fold(title: str, made: Sequence[str]) -> str:
    return f"<details><summary>{title} ({len(made)})</summary>{''.join(made)}</details>" if made else ""


def _skipped(skipped: Sequence[dict[str, Any]]) -> str:
    """What could not be compared, each reason once."""
    reasons: dict[str, int] = {}
    for item in skipped:
        line = f"{item.get('what')}: {item.get('reason')}"
        reasons[line] = reasons.get(line, 0) + 1
    lines = "".join(f"<li>{in_html(line)} ({count})</li>" for line, count in reasons.items())
    return f"<details><summary>Not compared ({len(skipped)})</summary><ul>{lines}</ul></details>" if lines else ""
