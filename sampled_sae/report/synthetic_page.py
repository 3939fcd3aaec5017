"""The page of the synthetic experiment: a folder of results in, one HTML file that needs no network out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from sampled_sae.files import write_text
from sampled_sae.report import synthetic_figures as figures
from sampled_sae.report import synthetic_results as numbers
from sampled_sae.report.synthetic_results import Column, Configuration, best_of, buckets, form

CURVES = [
    ("loss", "Loss", "Mean loss a sample, on a logarithmic scale."),
    ("fve", "FVE", "Of the training batches, with the SAE's own pools."),
    ("dead", "Dead latents", "Share of latents silent for longer than the setting dead_after."),
    ("churn", "Pool churn", "Share of the candidate pool that was not in the pool of the step before."),
]


def write_page(folder: Path) -> Path:
    """Read results.json and log.jsonl in `folder`, write index.html there and return its path."""
    results = numbers.load_results(folder / "results.json")
    page = folder / "index.html"
    write_text(page, _page(results, *_read_log(folder / "log.jsonl")))
    return page


def _read_log(path: Path) -> tuple[figures.Log, str]:
    """The log's lines by run, and a sentence on what is missing in it."""
    log: figures.Log = {}
    damaged = 0
    if not path.exists():
        return log, f"The curves are missing: there is no {path.name} in the folder."
    for text in filter(str.strip, path.read_text(encoding="utf-8", errors="replace").split("\n")):
        try:
            line = json.loads(text)
            log.setdefault(str(line["sae"]), []).append(line)
        except (json.JSONDecodeError, TypeError, KeyError):
            damaged += 1  # a run that was stopped may leave half a line
    return log, f"Unreadable lines of {path.name} that were left out: {damaged}." if damaged else ""


def _page(results: dict[str, Any], log: figures.Log, log_note: str) -> str:
    rows = numbers.configurations(results)
    look = figures.styles(rows)
    title = escape(f"Synthetic experiment: {results.get('preset')}")
    summary = numbers.summary(results, lambda label: f"<b>{escape(label)}</b>")
    css, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # The browser itself then refuses anything from the network.
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en"><head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{css}</style>
</head><body>
<header><h1>{title}</h1><p class="summary">{summary}</p></header>
<main>
<noscript><p>The pictures and the sorting need JavaScript; every final number is in the tables.</p></noscript>
<section><h2>The data</h2>{_data(results)}</section>
<section><h2>The results</h2>{_pictures(rows, look, results)}{_against_l(rows, look)}</section>
<section><h2>The training</h2>{_training(rows, look, log, log_note)}</section>
<section><h2>All numbers</h2>{_numbers(rows, results)}</section>
<section><h2>The configurations</h2>{_settings(results)}</section>
</main>
<script>{get_plotlyjs()}</script>
<script>const DARK = {_script_json(json.dumps(figures.DARK))};
{script}</script>
</body></html>
"""


def _script_json(text: str) -> str:
    """JSON that cannot end the script block it stands in."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _figure(name: str, figure: figures.go.Figure, title: str, caption: str, key: str = "") -> str:
    head = f"<figcaption><h3>{title}</h3><p>{caption}</p></figcaption>"
    if not figure.data:
        return f"<figure>{head}<p class='note'>There are no such numbers.</p></figure>"
    return f"""<figure>{head}{key}
<div class="plot" id="{name}" role="img" aria-label="{title}"></div>
<script type="application/json" data-figure="{name}">{_script_json(figure.to_json())}</script></figure>
"""


def _key(items: Iterable[tuple[str, str, figures.Style | None]]) -> str:
    """A legend out of (mark, text, style): the mark has the style's colour."""
    lines = [f"<li><span {_colour(style)}>{mark}</span>{escape(text)}</li>" for mark, text, style in items]
    return f"<ul class='key'>{''.join(lines)}</ul>"


def _colour(style: figures.Style | None) -> str:
    light = style.color if style else figures.MUTED
    return f"style='color: {light}; color: light-dark({light}, {figures.DARK.get(light, light)})'"


def _table(heads: list[str], lines: list[str], kind: str = "") -> str:
    head = "".join(f"<th scope='col'>{text}</th>" for text in heads)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"""<div class="scroll {kind}" tabindex="0" role="region" aria-label="Table"><table>
<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"""


def _data(results: dict[str, Any]) -> str:
    lines = [
        f"<th scope='row'>{escape(str(part['name']))}</th><td>{form(part.get('features'), 0)}</td>"
        f"<td>{form(part.get('p'), 3)}</td><td>{form(part.get('sigma'), 2)}</td>"
        f"<td>{form(part.get('mean_activation'), 3)} ± {form(part.get('std_activation'), 3)}</td>"
        for part in buckets(results)
    ]
    heads = ["Bucket", "Features", "Firing probability", "Sigma", "Mean active magnitude\u00a0±\u00a0std"]
    text = """<p>Each sample is a sparse sum of known features and a little noise. A feature fires with low or
high frequency (LF, HF) and with low or high amplitude (LA, HA), which makes four buckets.</p>"""
    return f"{text}{_table(heads, lines, 'data')}<p class='note'>{numbers.data_line(results)}</p>"


def _several(rows: list[Configuration], text: str) -> str:
    """`text`, where some configuration has more than one seed."""
    return text if any(len(row.runs) > 1 for row in rows) else ""


def _pictures(rows: list[Configuration], look: figures.Styles, results: dict[str, Any]) -> str:
    ranked = numbers.ranked(rows)
    fve = "Best by threshold on top; an arrow to the left marks a value below the axis."
    fve += _several(rows, " Dots are means over seeds; thin lines reach from the smallest to the largest.")
    recovery = "Share of each bucket, in the same order." + _several(rows, " Means over seeds.")
    kinds = _key((glyph, name, None) for name, *_, glyph in figures.FVE_KINDS)
    names = [str(part["name"]) for part in buckets(results)]
    return (
        _key(("■", group, style) for group, style in look.items())
        + _figure("fve", figures.fve_dots(ranked, look), "Variance explained", fve, kinds)
        + _figure("recovery", figures.recovery_map(ranked, names), "True features recovered", recovery)
    )


def _against_l(rows: list[Configuration], look: figures.Styles) -> str:
    scored = [row for row in rows if row.l is not None and row.l > 0]
    if not scored:
        return "<p class='note'>No SAE here has a constant scored pool, so there is no FVE against l.</p>"
    base = next((row for row in rows if row.group == "batchtopk"), None)
    kinds = [("own pools", "fve_heldout"), ("by threshold", "fve_heldout_threshold")]
    limits = figures.fve_range(row.stat(key) for row in [*scored, base] if row for _, key in kinds)
    caption = "Held-out samples." + _several(rows, " Thin lines reach from the smallest to the largest seed.")
    marks = [(look[group].glyph, group, look[group]) for group in dict.fromkeys(row.group for row in scored)]
    marks += [("- -", base.label, look[base.group])] if base else []
    pair = "".join(
        _figure(f"l-{i}", figures.fve_against_l(scored, base, look, key, limits), f"FVE against l, {name}", caption)
        for i, (name, key) in enumerate(kinds)
    )
    return f"{_key(marks)}<div class='pair'>{pair}</div>"


def _training(rows: list[Configuration], look: figures.Styles, log: figures.Log, note: str) -> str:
    if not any(run["name"] in log for row in rows for run in row.runs):
        return f"<p class='note'>{escape(note or 'The curves are missing: the log says nothing of these SAEs.')}</p>"
    plots = "".join(
        _figure(f"curve-{key}", figures.curves(rows, look, log, key), title, caption) for key, title, caption in CURVES
    )
    spread = _several(
        rows, " Lines are means over seeds; the bands of a picked group reach from the smallest to the largest."
    )
    return f"""<p class="note">Pick a group to tell its lines apart.{spread} {escape(note)}</p>
{_picker(rows, look)}<div class="pair">{plots}</div>"""


def _picker(rows: list[Configuration], look: figures.Styles) -> str:
    """Buttons that choose a group, and for each group a legend that shows once it is chosen."""
    buttons = ["<label><input type='radio' name='group' value='-1' checked>all</label>"]
    legends = []
    for i, (group, style) in enumerate(look.items()):
        mark = f"<span {_colour(style)}>■</span>"
        buttons.append(f"<label><input type='radio' name='group' value='{i}'>{mark}{escape(group)}</label>")
        labels = [row.label for row in rows if row.group == group]
        items = _key((_dash(place), label, style) for place, label in enumerate(labels))
        legends.append(f"<div data-group='{i}' hidden>{items}</div>")
    return f"<fieldset class='picker'><legend>Show</legend>{''.join(buttons)}</fieldset>{''.join(legends)}"


def _dash(place: int) -> str:
    dash, width = figures.dash(place)
    line = f"<path d='M0 5H38' stroke='currentColor' stroke-width='{width}' stroke-dasharray='{dash}'/>"
    return f"<svg width='38' height='10' aria-hidden='true'>{line}</svg>"


def _numbers(rows: list[Configuration], results: dict[str, Any]) -> str:
    columns = numbers.columns(results)
    runs = [Configuration(str(run["name"]), row.group, row.l, (run,)) for row in rows for run in row.runs]
    meanings = [line.split(": ", 1) for line in numbers.MEANINGS.strip().splitlines()]
    defined = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in meanings)
    note = "A click on a head sorts; the best of each column is marked." + _several(
        rows, " Means over seeds, with the smallest and the largest below."
    )
    every = f"<details><summary>Every run</summary>{_results_table(runs, columns)}</details>"
    return f"""<p class="note">{note}</p>{_results_table(rows, columns)}{_several(rows, every)}
<h3 class="apart">What the numbers mean</h3><dl>{defined}</dl>"""


def _results_table(rows: list[Configuration], columns: list[Column]) -> str:
    lines = [f"<th scope='row'>{escape(row.label)}</th>" for row in rows]
    for column in columns:
        stats = [row.stat(column.key) for row in rows]
        marks = best_of([stat and stat.mean for stat in stats], column)
        for i, (stat, best) in enumerate(zip(stats, marks, strict=True)):
            lines[i] += _cell(stat, column.digits, best)
    # A hyphen that does not break: the heads are narrow.
    heads = [name.replace("-", "\u2011") for name in ["SAE", *(column.title for column in columns)]]
    return _table([f"<button>{escape(head)}</button>" for head in heads], lines)


def _cell(stat: numbers.Stat | None, digits: int, best: bool) -> str:
    if stat is None:
        return "<td data-value=''>-</td>"
    low, high = form(stat.low, digits), form(stat.high, digits)
    spread = f"<small>{low} to {high}</small>" if low != high else ""
    return f"<td data-value='{stat.mean!r}'{' class=best' * best}>{form(stat.mean, digits)}{spread}</td>"


def _settings(results: dict[str, Any]) -> str:
    """All settings, as they stand in the file: of the experiment, then of each run."""
    shared = {key: value for key, value in results.items() if key not in ("saes", "data")}
    shared["data"] = (results.get("data") or {}).get("config")
    runs = "".join(_folded(str(run["name"]), run.get("config")) for run in results["saes"])
    each = f"<details><summary>Each run ({len(results['saes'])})</summary>{runs}</details>"
    return _folded("The experiment", shared) + each


def _folded(title: str, content: Any) -> str:
    text = escape(json.dumps(content, indent=2, ensure_ascii=False))
    return f"<details><summary>{escape(title)}</summary><pre>{text}</pre></details>"
