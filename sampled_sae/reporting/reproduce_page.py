"""The front page of a reproduction: how far it is, where everything lies, and the paper's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sampled_sae.reporting import pages as parts
from sampled_sae.reporting.paper_tables_format import Missing, PaperTable, html_rows
from sampled_sae.reporting.write import Written
from sampled_sae.utils.files import read_json, write_text
from sampled_sae.utils.measures import in_html
from sampled_sae.utils.progress import clock

PLACES = {
    "synthetic": "synthetic/index.html",
    **{name: "evals/table.csv" for name in ("core", "probing", "absorption", "autointerp")},
    "compare": "compare/pairs.csv",
    "report": "report/index.html",
}
"""Where the results of each stage can be seen."""


def write_front(out: Path, written: Written) -> Path:
    """Write `out`/index.html out of reproduce.json and what the report made."""
    record = read_json(out / "reproduce.json")
    scale, settings = record.get("scale"), record.get("settings") or {}
    made = [table for table in written.paper_tables if isinstance(table, PaperTable)]
    missing = [table for table in written.paper_tables if isinstance(table, Missing)]
    main = f"""<section><h2>Where things are</h2>{_stages(record, out)}</section>
<section><h2>The paper's tables, with the numbers of this run</h2>
<p class="note">Numbers of the paper itself are not among them. Each is a file in <code>report/tables</code> too, in
Markdown, CSV and LaTeX.</p>{"".join(map(_table, made))}{_missing(missing)}</section>
<section><h2>Settings</h2>{parts.folded("All settings of this scale", settings)}</section>"""
    about = f"{settings.get('model')}, layer {settings.get('layer')}, {settings.get('text')}"
    links = [f"<a href='{place}'>{name}</a>" for name, place in _pages(out)]
    summary = f"Scale <b>{in_html(scale)}</b>: {in_html(about)}. Pages: {', '.join(links)}."
    page = out / "index.html"
    write_text(page, parts.document("The paper, from end to end", summary, main))
    return page


def _pages(out: Path) -> list[tuple[str, str]]:
    found = [("the sweep of SAEs", PLACES["report"]), ("the synthetic experiment", PLACES["synthetic"])]
    return [(name, place) for name, place in found if (out / place).exists()]


def _stages(record: dict[str, Any], out: Path) -> str:
    """A line for each stage that was begun; the others are named as not run."""
    lines = []
    entries = record.get("stages") or {}
    for name in ("synthetic", "train", *(name for name in PLACES if name != "synthetic")):
        entry = entries.get(name)
        seconds = "-" if entry is None else clock(entry.get("seconds") or 0.0)
        state = "not run" if entry is None else "finished" if entry.get("finished") else "not finished"
        if name == "report":
            state, seconds = "this page", "-"
        place = PLACES.get(name, "train")
        link = f"<a href='{place}'>{place}</a>" if state != "not run" and (out / place).exists() else "-"
        first = f"<th scope='row'>{in_html(name)}</th><td class='left'>{state}</td>"
        lines.append(f"{first}<td>{seconds}</td><td class='left'>{link}</td>")
    return parts.table(["Stage", "State", "Time", "Results"], lines, "paper", "Stages", {1, 3})


def _table(table: PaperTable) -> str:
    heads, lines, left = html_rows(table)
    shown = parts.table(heads, lines, "paper", table.title, left)
    return f"<h3 class='apart'>{in_html(table.title)}</h3>{shown}<p class='note'>{in_html(table.note)}</p>"


def _missing(missing: list[Missing]) -> str:
    if not missing:
        return ""
    lines = "".join(f"<li>{in_html(item.title)}: {in_html(item.why)} ({in_html(item.name)})</li>" for item in missing)
    return f"<aside class='notes'><h3>Not made</h3><ul>{lines}</ul></aside>"
