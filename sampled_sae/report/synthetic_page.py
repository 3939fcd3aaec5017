"""The page of the synthetic experiment: a folder of results in, one HTML file that needs no network out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sampled_sae.files import write_text
from sampled_sae.report import page_parts as parts
from sampled_sae.report import plotting
from sampled_sae.report import synthetic_figures as figures
from sampled_sae.report import synthetic_results as numbers
from sampled_sae.report.page_training import training_part
from sampled_sae.report.rows import Configuration, form
from sampled_sae.report.synthetic_results import buckets
from sampled_sae.report.text import in_html
from sampled_sae.report.training_log import Log, read_log


def write_page(folder: Path) -> Path:
    """Read results.json and log.jsonl in `folder`, write index.html there and return its path."""
    results = numbers.load_results(folder / "results.json")
    page = folder / "index.html"
    write_text(page, _page(results, *read_log(folder / "log.jsonl")))
    return page


def _page(results: dict[str, Any], log: Log, log_note: str) -> str:
    rows = numbers.configurations(results)
    look = plotting.styles(rows)
    summary = numbers.summary(results, lambda label: f"<b>{in_html(label)}</b>")
    main = f"""<section><h2>The data</h2>{_data(results)}</section>
<section><h2>The results</h2>{_pictures(rows, look, results)}{_against_l(rows, look)}</section>
<section><h2>The training</h2>{training_part(rows, look, log, log_note)}</section>
<section><h2>All numbers</h2>{_numbers(rows, results)}</section>
<section><h2>The configurations</h2>{_settings(results)}</section>"""
    return parts.document(f"Synthetic experiment: {results.get('preset')}", summary, main)


def _data(results: dict[str, Any]) -> str:
    lines = [
        f"<th scope='row'>{in_html(str(part['name']))}</th><td>{form(part.get('features'), 0)}</td>"
        f"<td>{form(part.get('p'), 3)}</td><td>{form(part.get('sigma'), 2)}</td>"
        f"<td>{form(part.get('mean_activation'), 3)} ± {form(part.get('std_activation'), 3)}</td>"
        for part in buckets(results)
    ]
    heads = ["Bucket", "Features", "Firing probability", "Sigma", "Mean active magnitude\u00a0±\u00a0std"]
    text = """<p>Each sample is a sparse sum of known features and a little noise. A feature fires with low or
high frequency (LF, HF) and with low or high amplitude (LA, HA), which makes four buckets.</p>"""
    return f"{text}{parts.table(heads, lines, 'data')}<p class='note'>{numbers.data_line(results)}</p>"


def _pictures(rows: list[Configuration], look: plotting.Styles, results: dict[str, Any]) -> str:
    ranked = numbers.ranked(rows)
    fve = "Best by threshold on top; an arrow to the left marks a value below the axis."
    fve += parts.several(rows, " Dots are means over seeds; thin lines reach from the smallest to the largest.")
    recovery = "Share of each bucket, in the same order." + parts.several(rows, " Means over seeds.")
    kinds = parts.key_list((glyph, name, plotting.MUTED) for name, *_, glyph in figures.FVE_KINDS)
    names = [str(part["name"]) for part in buckets(results)]
    return (
        parts.key_list(("■", group, style.color) for group, style in look.items())
        + parts.figure_block("fve", figures.fve_dots(ranked, look), "Variance explained", fve, kinds)
        + parts.figure_block("recovery", figures.recovery_map(ranked, names), "True features recovered", recovery)
    )


def _against_l(rows: list[Configuration], look: plotting.Styles) -> str:
    scored = [row for row in rows if row.l is not None and row.l > 0]
    if not scored:
        return "<p class='note'>No SAE here has a constant scored pool, so there is no FVE against l.</p>"
    base = next((row for row in rows if row.group == "batchtopk"), None)
    kinds = [("own pools", "fve_heldout"), ("by threshold", "fve_heldout_threshold")]
    limits = plotting.fve_range(row.stat(key) for row in [*scored, base] if row for _, key in kinds)
    caption = "Held-out samples." + parts.several(rows, " Thin lines reach from the smallest to the largest seed.")
    marks = [(look[group].glyph, group, look[group].color) for group in dict.fromkeys(row.group for row in scored)]
    marks += [("- -", base.label, look[base.group].color)] if base else []
    pair = "".join(
        parts.figure_block(
            f"l-{i}", figures.fve_against_l(scored, base, look, key, limits), f"FVE against l, {name}", caption
        )
        for i, (name, key) in enumerate(kinds)
    )
    return f"{parts.key_list(marks)}<div class='pair'>{pair}</div>"


def _numbers(rows: list[Configuration], results: dict[str, Any]) -> str:
    columns = numbers.columns(results)
    runs = [Configuration(str(run["name"]), row.group, row.l, (run,)) for row in rows for run in row.runs]
    meanings = (line.split(": ", 1) for line in numbers.MEANINGS.strip().splitlines())
    defined = parts.definitions((term, text) for term, text in meanings)
    note = "A click on a head sorts; the best of each column is marked." + parts.several(
        rows, " Means over seeds, with the smallest and the largest below."
    )
    every = f"<details><summary>Every run</summary>{parts.results_table(runs, columns)}</details>"
    return f"""<p class="note">{note}</p>{parts.results_table(rows, columns)}{parts.several(rows, every)}
<h3 class="apart">What the numbers mean</h3>{defined}"""


def _settings(results: dict[str, Any]) -> str:
    """All settings, as they stand in the file: of the experiment, then of each run."""
    shared = {key: value for key, value in results.items() if key not in ("saes", "data")}
    shared["data"] = (results.get("data") or {}).get("config")
    runs = "".join(parts.folded(str(run["name"]), run.get("config")) for run in results["saes"])
    each = f"<details><summary>Each run ({len(results['saes'])})</summary>{runs}</details>"
    return parts.folded("The experiment", shared) + each
