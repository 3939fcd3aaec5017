"""The overview of a sweep: what was trained, what was measured, and who is best at what."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sampled_sae.evals import titles
from sampled_sae.evals.core import FVU
from sampled_sae.reporting import pages as parts
from sampled_sae.reporting import panels
from sampled_sae.reporting import style as plotting
from sampled_sae.reporting.collect import Found, Saved
from sampled_sae.reporting.comparison import compare_part
from sampled_sae.reporting.pages import training_part
from sampled_sae.reporting.scatter import about, marker, told
from sampled_sae.reporting.style import plain
from sampled_sae.reporting.sweep import BASE, Configuration, Sweep, key_of
from sampled_sae.reporting.tables import columns_of, evaluations_of, measured
from sampled_sae.utils.measures import Metric, form, in_html, listed


def overview_part(sweep: Sweep) -> str:
    """Facts, coverage and best values."""
    facts = "".join(f"<div><dt>{in_html(name)}</dt><dd>{in_html(value)}</dd></div>" for name, value in _facts(sweep))
    return f"<dl class='facts'>{facts}</dl>{_best(sweep)}{_coverage(sweep)}"


def _facts(sweep: Sweep) -> Iterable[tuple[str, str]]:
    seeds = sorted({len(row.runs) for row in sweep.rows})
    each = f" ({len(sweep.rows)} settings, {listed([str(count) for count in seeds])} seeds)" if seeds[-1:] > [1] else ""
    yield "Model", sweep.model or "not named"
    if sweep.layer is not None:
        yield "Layer", str(sweep.layer)
    yield "SAEs", f"{len(sweep.saes)}{each}"
    runs = [run for row in sweep.rows for run in row.runs]
    for title, name in (("Tokens", "tokens"), ("Latents", "latents"), ("K", "k"), ("Learning rate", "lr")):
        values = sorted({run[name] for run in runs if run[name] is not None})
        if values:
            yield title, listed([_count(value) for value in values], most=6)
    texts = [str(text) for sae in sweep.saes if (text := sae.metadata.get("text"))]
    if texts:
        yield "Text", listed(list(dict.fromkeys(texts)))


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 and float(value).is_integer() else f"{value:g}"


def _best(sweep: Sweep) -> str:
    """The best configuration by each headline number, with BatchTopK's beside it."""
    lines = [line for metric in sweep.metrics if metric.headline and metric.better and (line := _winner(sweep, metric))]
    if not lines or len(sweep.rows) < 2:
        return ""
    heads = ["Best by", "SAE", "value", "BatchTopK"]
    return f"<h3 class='apart'>The best</h3>{parts.table(heads, lines, 'data words', 'The best')}"


def _winner(sweep: Sweep, metric: Metric) -> str | None:
    rows = sweep.having(metric)
    if not rows:
        return None
    sign = 1 if metric.better == "low" else -1

    def value(row: Configuration) -> float:
        return sign * round(row.mean(key_of(metric)) or 0.0, metric.digits)

    top = min(map(value, rows))
    names = [row.label for row in rows if value(row) == top]
    base = next((row.mean(key_of(metric)) for row in rows if row.group == BASE), None)
    who = "all the same" if len(names) == len(rows) else listed(names)
    side = "lowest" if metric.better == "low" else "highest"
    return (
        f"<th scope='row'>{in_html(metric.title)}<small>{side}</small></th><td>{in_html(who)}</td>"
        f"<td>{form(sign * top, metric.digits)}</td><td>{form(base, metric.digits)}</td>"
    )


def _coverage(sweep: Sweep) -> str:
    """How many SAEs have each evaluation; those without are named."""
    lines = []
    for name, title in titles().items():
        missing = [sae.name for sae in sweep.saes if name not in sae.results]
        have = len(sweep.saes) - len(missing)
        lacking = "-" if not missing else "all" if not have else listed(missing, most=6)
        lines.append(
            f"<th scope='row'>{in_html(title)}</th><td>{have} of {len(sweep.saes)}</td><td>{in_html(lacking)}</td>"
        )
    heads = ["Measured", "SAEs", "missing"]
    return f"<h3 class='apart'>What was measured</h3>{parts.table(heads, lines, 'data words', 'What was measured')}"


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
    for evaluation, title in titles().items():
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


CROSS = plotting.Style("#000000", "x", "✖")


def styles(sweep: Sweep) -> plotting.Styles:
    """As everywhere, but BatchTopK is the paper's black cross."""
    look = plotting.styles(sweep.rows)
    return look | ({BASE: CROSS} if BASE in look else {})


def page(found: Found, made: Sequence[Sweep]) -> str:
    """The whole page as text."""
    title = f"Sweep: {made[0].title}" if len(made) == 1 else "Sweeps" if made else "Comparison"
    names = listed([f"<b>{in_html(sweep.title)}</b>" for sweep in made], most=6)
    whose = f" of {names}" if made else ""
    counts = [f"{len(found.saes)} SAE{'s' * (len(found.saes) != 1)}{whose}"]
    counts += [f"{len(found.runs)} training run{'s' * (len(found.runs) != 1)}"] if found.runs else []
    counts += [f"{len(found.comparisons)} comparison{'s' * (len(found.comparisons) != 1)}"] if found.comparisons else []
    summary = "; ".join(counts) + "."
    main = [_notes(found.notes, "Left out"), _choice(made)]
    main += [_article(sweep, number, len(made) > 1) for number, sweep in enumerate(made)]
    main += [compare_part(folder, content, number) for number, (folder, content) in enumerate(found.comparisons)]
    return parts.document(title, summary, "\n".join(main), ("page.js", "explore.js"))


def _choice(made: Sequence[Sweep]) -> str:
    """Numbers of different models or layers do not compare, so that one is shown at a time."""
    if len(made) < 2:
        return ""
    box = parts.select("sweep", [(str(i), f"{sweep.title} ({len(sweep.saes)})") for i, sweep in enumerate(made)])
    return f"""<p class="controls"><label>Model and layer {box}</label></p>
<p class="note">These SAEs are not of one model and layer; their numbers do not compare: each has its own part.</p>"""


def _article(sweep: Sweep, number: int, several: bool) -> str:
    look, prefix = styles(sweep), f"s{number}-"
    head = f"<h2 class='part'>{in_html(sweep.title)}</h2>" if several else ""
    return f"""<article data-scope data-chosen-by="sweep" data-value="{number}">{head}
<section><h2>Overview</h2>{_notes(sweep.notes, "To know before comparing")}{overview_part(sweep)}</section>
<section><h2>Two numbers at once</h2>{explore_part(sweep, look, prefix)}</section>
<section><h2>What each score gives for its reconstruction</h2>{_against_fvu(sweep, look, prefix)}</section>
<section><h2>How often latents fire</h2>{_density(sweep, look, prefix)}</section>
<section><h2>The training</h2>{_training(sweep, look, prefix)}</section>
<section><h2>All numbers</h2>{_tables(sweep)}</section>
<section><h2>What the numbers mean</h2>{parts.definitions((m.title, m.meaning) for m in sweep.metrics)}</section>
<section><h2>The configurations</h2>{_settings(sweep)}</section>
</article>"""


def _notes(notes: Sequence[str], title: str) -> str:
    if not notes:
        return ""
    lines = "".join(f"<li>{in_html(note)}</li>" for note in notes)
    return f"<aside class='notes'><h3>{in_html(title)}</h3><ul>{lines}</ul></aside>"


def _against_fvu(sweep: Sweep, look: plotting.Styles, prefix: str) -> str:
    shown = [metric for metric in sweep.metrics if metric.evaluation != "training" and metric.name != "fvu"]
    shown = [metric for metric in shown if sweep.having(FVU, metric)]
    if not shown:
        return "<p class='note'>No SAE has an FVU and another number: run <code>sampled-sae eval</code> first.</p>"
    wanted = [metric for name in ("probing_5", "over_10_percent") for metric in shown if metric.name == name]
    first = (wanted or shown)[0]
    blocks = []
    for metric in shown:
        pictures = "".join(
            parts.figure_block(f"{prefix}{metric.name}-{i}", figure, in_html(title))
            for i, (title, figure) in enumerate(panels.singles(panels.against(sweep, FVU, metric, look)))
        )
        hidden = "" if metric is first else " hidden"
        meaning = f"<p class='note'>{in_html(metric.meaning)}{_side(metric)}</p>"
        chosen = f"data-chosen-by='{prefix}metric' data-value='{metric.name}'"
        blocks.append(f"<div {chosen}{hidden}>{meaning}<div class='pair'>{pictures}</div></div>")
    text = "A panel for each score, with its own axes; the number beside a point is its l, as far as there is room."
    cross = " The cross is BatchTopK." if BASE in look else ""
    bars = parts.several(list(sweep.rows), " Bars reach from the smallest to the largest seed.")
    select = parts.select(f"{prefix}metric", [(metric.name, metric.title) for metric in shown], first.name)
    key = parts.key_list((style.glyph, group, style.color) for group, style in look.items())
    return f"""<p class="note">{text}{cross}{bars}</p>{key}
<p class="controls"><label>Against FVU {select}</label></p>{"".join(blocks)}"""


def _side(metric: Metric) -> str:
    return {"low": " Lower is better.", "high": " Higher is better.", None: ""}[metric.better]


def _density(sweep: Sweep, look: plotting.Styles, prefix: str) -> str:
    drawn = panels.densities(sweep, look)
    silent = [row.label for row in sweep.rows if _measured_but_silent(row)]
    note = f" No latent fires in {listed(silent)}." if silent else ""
    if not drawn:
        why = note or "The densities are missing: no SAE here has a core evaluation."
        return f"<p class='note'>{in_html(why)}</p>"
    shade = panels.shades(sweep.rows)
    key = [("━", f"l = {l:g}", color) for l, color in shade.items()]
    key += [("┅", BASE, look[BASE].color)] if BASE in look else []
    pictures = "".join(
        parts.figure_block(f"{prefix}density-{i}", figure, in_html(title))
        for i, (title, figure) in enumerate(panels.singles(drawn))
    )
    text = (
        "Share of all latents in each bin of density, on held-out text without tokens of high norm; latents that never "
        "fire are in no bin."
    )
    means = parts.several(list(sweep.rows), " Means over seeds.")
    return (
        f"""<p class="note">{text}{means}{in_html(note)}</p>{parts.key_list(key)}<div class="pair">{pictures}</div>"""
    )


def _measured_but_silent(row: Configuration) -> bool:
    return row.mean(("values", "alive")) == 0


def _training(sweep: Sweep, look: plotting.Styles, prefix: str) -> str:
    missing = "The curves are missing: these SAEs came without the log of their run."
    return training_part(list(sweep.rows), look, sweep.log, "", prefix, missing)


def _tables(sweep: Sweep) -> str:
    if not sweep.metrics:
        return "<p class='note'>No SAE here has any number yet: run <code>sampled-sae eval</code> first.</p>"
    note = "A click on a head sorts; the best of each column is marked." + parts.several(
        list(sweep.rows), " Means over seeds, with the smallest and the largest below."
    )
    made = []
    for name in evaluations_of(sweep):
        columns = columns_of(sweep, name)
        title = f"<h3 class='apart'>{titles()[name]}</h3>"
        made.append(title + parts.results_table(measured(sweep, columns), columns, titles()[name]))
    each = [Configuration(str(run["label"]), row.group, row.l, (run,)) for row in sweep.rows for run in row.runs]
    every = "".join(
        f"<h3 class='apart'>{titles()[name]}</h3>{parts.results_table(each, columns_of(sweep, name))}"
        for name in evaluations_of(sweep)
    )
    singly = parts.several(list(sweep.rows), f"<details><summary>Every SAE</summary>{every}</details>")
    return f'<p class="note">{note}</p>{"".join(made)}{singly}'


def _settings(sweep: Sweep) -> str:
    """All settings as they stand in the files: of each run, then of each SAE."""
    runs = {sae.run.folder: sae.run for sae in sweep.saes if sae.run}
    made = [
        parts.folded(f"The run in {folder.name}", {**run.record, "config": _without_saes(run.record)})
        for folder, run in runs.items()
    ]
    saes = "".join(parts.folded(sae.name, _known(sae)) for sae in sweep.saes)
    return "".join(made) + f"<details><summary>Each SAE ({len(sweep.saes)})</summary>{saes}</details>"


def _without_saes(record: dict[str, object]) -> object:
    config = record.get("config")
    return {name: value for name, value in config.items() if name != "saes"} if isinstance(config, dict) else config


def _known(sae: Saved) -> dict[str, object]:
    asked = {name: content["asked"] for name, content in sae.results.items() if "asked" in content}
    return {"folder": str(sae.folder), "config": sae.config, "metadata": sae.metadata, "evaluations": asked}
