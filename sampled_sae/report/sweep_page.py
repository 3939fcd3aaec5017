"""The page of a sweep: one HTML file that needs no network, with a part for each model and layer."""

from __future__ import annotations

from collections.abc import Sequence

from sampled_sae.report import page_parts as parts
from sampled_sae.report import panels, plotting
from sampled_sae.report.collect import Found, Saved
from sampled_sae.report.metrics import EVALUATIONS, FVU, Metric
from sampled_sae.report.page_compare import compare_part
from sampled_sae.report.page_explore import explore_part
from sampled_sae.report.page_overview import overview_part
from sampled_sae.report.page_training import training_part
from sampled_sae.report.rows import Configuration
from sampled_sae.report.sweep import BASE, Sweep
from sampled_sae.report.sweep_tables import columns_of, evaluations_of, measured
from sampled_sae.report.text import in_html, listed

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
        title = f"<h3 class='apart'>{EVALUATIONS[name]}</h3>"
        made.append(title + parts.results_table(measured(sweep, columns), columns, EVALUATIONS[name]))
    each = [Configuration(str(run["label"]), row.group, row.l, (run,)) for row in sweep.rows for run in row.runs]
    every = "".join(
        f"<h3 class='apart'>{EVALUATIONS[name]}</h3>{parts.results_table(each, columns_of(sweep, name))}"
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
