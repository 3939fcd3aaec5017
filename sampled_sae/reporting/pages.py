"""What every page is made of: the document, figures, legends, tables, folded settings."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from sampled_sae.reporting import style as plotting
from sampled_sae.reporting.collect import Log
from sampled_sae.reporting.panels import curves, dash
from sampled_sae.reporting.sweep import Column, Configuration, Stat, best_of
from sampled_sae.utils.measures import form, in_html, shown

# The browser itself then refuses anything from the network.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def document(title: str, summary: str, main: str, scripts: Sequence[str] = ("page.js",)) -> str:
    """A whole page out of text for the title, and HTML for the summary and all below it."""
    css, *code = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", *scripts))
    return f"""<!doctype html>
<html lang="en"><head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{in_html(title)}</title>
<link rel="icon" href="data:,">
<style>
{css}</style>
</head><body>
<header><h1>{in_html(title)}</h1><p class="summary">{summary}</p></header>
<main>
<noscript><p>The pictures and the sorting need JavaScript; every final number is in the tables.</p></noscript>
{main}
</main>
<script>{get_plotlyjs()}</script>
<script>const DARK = {script_json(json.dumps(plotting.DARK))};
{"".join(code)}</script>
</body></html>
"""


def script_json(text: str) -> str:
    """JSON that cannot end the script block it stands in."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def figure_block(name: str, figure: go.Figure, title: str, caption: str = "", key: str = "") -> str:
    """A figure with its caption (HTML); `name` is its id."""
    said = f"<p>{caption}</p>" if caption else ""
    head = f"<figcaption><h3>{title}</h3>{said}</figcaption>"
    if not figure.data:
        return f"<figure>{head}<p class='note'>There are no such numbers.</p></figure>"
    return f"""<figure>{head}{key}
<div class="plot" id="{name}" role="img" aria-label="{title}"></div>
<script type="application/json" data-figure="{name}">{script_json(figure.to_json())}</script></figure>
"""


def key_list(items: Iterable[tuple[str, str, str]]) -> str:
    """A legend out of (mark, text, colour)."""
    lines = [f"<li><span {colour(color)}>{mark}</span>{in_html(text)}</li>" for mark, text, color in items]
    return f"<ul class='key'>{''.join(lines)}</ul>"


def colour(light: str) -> str:
    """The style attribute of a mark in a colour, or in its dark twin."""
    return f"style='color: {light}; color: light-dark({light}, {plotting.DARK.get(light, light)})'"


def picker(rows: list[Configuration], look: plotting.Styles, name: str = "group") -> str:
    """Buttons that choose a group, and for each group a legend that shows once it is chosen."""
    buttons = [f"<label><input type='radio' name='{name}' value='-1' checked>all</label>"]
    legends = []
    for i, (group, style) in enumerate(look.items()):
        mark = f"<span {colour(style.color)}>■</span>"
        buttons.append(f"<label><input type='radio' name='{name}' value='{i}'>{mark}{in_html(group)}</label>")
        labels = [row.label for row in rows if row.group == group]
        items = key_list((dash_mark(place), label, style.color) for place, label in enumerate(labels))
        legends.append(f"<div data-group='{i}' hidden>{items}</div>")
    return f"<fieldset class='picker'><legend>Show</legend>{''.join(buttons)}</fieldset>{''.join(legends)}"


def dash_mark(place: int) -> str:
    """A short line with the dashes of a group's n-th configuration."""
    pattern, width = dash(place)
    line = f"<path d='M0 5H38' stroke='currentColor' stroke-width='{width}' stroke-dasharray='{pattern}'/>"
    return f"<svg width='38' height='10' aria-hidden='true'>{line}</svg>"


def select(name: str, options: Iterable[tuple[str, str]], chosen: str | None = None) -> str:
    """A box that shows one of the elements with data-chosen-by=`name`, out of (value, text)."""
    lines = (
        f"<option value='{in_html(value)}'{' selected' * (value == chosen)}>{in_html(text)}</option>"
        for value, text in options
    )
    return f"<select data-choose='{in_html(name)}'>{''.join(lines)}</select>"


def table(
    heads: Sequence[str], lines: Iterable[str], kind: str = "", label: str = "Table", left: Collection[int] = ()
) -> str:
    """A table out of its heads (HTML) and the cells of each line (HTML), in a box that scrolls by itself; the heads of
    the columns `left` stand left."""
    head = "".join(f"<th scope='col'{' class=left' * (c in left)}>{text}</th>" for c, text in enumerate(heads))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"""<div class="scroll {kind}" tabindex="0" role="region" aria-label="{in_html(label)}"><table>
<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"""


def results_table(rows: list[Configuration], columns: Sequence[Column], label: str = "Results") -> str:
    """A sortable table, a line for each row; the best of each column is marked."""
    lines = [f"<th scope='row'>{in_html(row.label)}</th>" for row in rows]
    for column in columns:
        stats = [row.stat(column.key) for row in rows]
        marks = best_of([stat and stat.mean for stat in stats], column)
        for i, (stat, best) in enumerate(zip(stats, marks, strict=True)):
            lines[i] += cell(stat, column.digits, best)
    # A hyphen that does not break: the heads are narrow.
    heads = [name.replace("-", "\u2011") for name in ["SAE", *(column.title for column in columns)]]
    return table([f"<button>{in_html(head)}</button>" for head in heads], lines, label=label)


def cell(stat: Stat | None, digits: int, best: bool) -> str:
    """A number of a table, with the range over seeds below it."""
    if stat is None:
        return "<td data-value=''>-</td>"
    low, high = form(stat.low, digits), form(stat.high, digits)
    spread = f"<small>{low} to {high}</small>" if low != high else ""
    return f"<td data-value='{stat.mean!r}'{' class=best' * best}>{form(stat.mean, digits)}{spread}</td>"


def several(rows: list[Configuration], text: str) -> str:
    """`text`, where some configuration has more than one seed."""
    return text if any(len(row.runs) > 1 for row in rows) else ""


def definitions(items: Iterable[tuple[str, str]]) -> str:
    """Terms and what they mean."""
    return f"<dl>{''.join(f'<dt>{in_html(term)}</dt><dd>{in_html(text)}</dd>' for term, text in items)}</dl>"


def folded(title: str, content: Any) -> str:
    """Settings as they stand in their file, behind a line that opens them."""
    text = in_html_lines(json.dumps(content, indent=2, ensure_ascii=False))
    return f"<details><summary>{in_html(title)}</summary><pre>{text}</pre></details>"


def in_html_lines(text: str) -> str:
    """Text of several lines for HTML."""
    return "\n".join(in_html(line) for line in shown(text, keep="\n").split("\n"))


CURVES = [
    ("loss", "Loss", "Mean loss a sample, on a logarithmic scale."),
    ("fve", "FVE", "Of the training batches, with the SAE's own pools."),
    ("dead", "Dead latents", "Share of latents silent for longer than the setting dead_after."),
    ("churn", "Pool churn", "Share of the candidate pool that was not in the pool of the step before."),
]


def training_part(
    rows: list[Configuration], look: plotting.Styles, log: Log, note: str, prefix: str = "", missing: str = ""
) -> str:
    """The four curves and the buttons that pick a group; ids begin with `prefix`. `missing`: why there are none."""
    if not any(run["name"] in log for row in rows for run in row.runs):
        why = note or missing or "The curves are missing: the log says nothing of these SAEs."
        return f"<p class='note'>{in_html(why)}</p>"
    plots = "".join(
        figure_block(f"{prefix}curve-{key}", curves(rows, look, log, key), title, caption)
        for key, title, caption in CURVES
    )
    spread = several(
        rows, " Lines are means over seeds; the bands of a picked group reach from the smallest to the largest."
    )
    return f"""<p class="note">Pick a group to tell its lines apart.{spread} {in_html(note)}</p>
{picker(rows, look, f"{prefix}group")}<div class="pair">{plots}</div>"""
