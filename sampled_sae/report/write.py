"""A report's folder: the page, the tables and the figures, out of folders of runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sampled_sae.errors import UserError
from sampled_sae.files import make_folder, read_json, write_json, write_text
from sampled_sae.report.collect import Found, collect
from sampled_sae.report.paper_tables import paper_tables
from sampled_sae.report.paper_tables_format import Missing, PaperTable, files
from sampled_sae.report.sweep import Sweep, sweeps
from sampled_sae.report.sweep_figures import missing_for_figures, paper_figures, write_figures
from sampled_sae.report.sweep_page import page, styles
from sampled_sae.report.sweep_tables import tables

LIST = "files.json"
"""What the report wrote, so that the next one can take away what it no longer makes."""


class Written(NamedTuple):
    """What became of a report."""

    page: Path
    tables: list[Path]
    figures: list[Path]
    notes: list[str]
    """What is missing, one line each."""
    sweeps: list[Sweep]
    paper: list[Path]
    """The paper's tables, three files each."""
    paper_tables: list[PaperTable | Missing]
    """The same, and those for which something is missing."""


def write_report(
    folders: Sequence[Path], out: Path, model: str | None = None, layer: int | None = None, figures: bool = True
) -> Written:
    """Collect what is in `folders`, for one model or layer if asked for, and write the report into `out`."""
    found = _only(collect(folders), model, layer)
    made, notes = sweeps(found), list(found.notes)
    make_folder(out)
    index = out / "index.html"
    write_text(index, page(found, made))
    tabled: list[Path] = []
    for sweep, name in zip(made, _names(made), strict=True):
        make_folder(out / "tables")
        for file, text in tables(sweep).items():
            tabled.append(out / "tables" / (name + file))
            write_text(tabled[-1], text)
    paper = paper_tables(found, made, _names(made))
    filled = [out / "tables" / file for table in paper if isinstance(table, PaperTable) for file in files(table)]
    texts = [text for table in paper if isinstance(table, PaperTable) for text in files(table).values()]
    for path, text in zip(filled, texts, strict=True):
        make_folder(path.parent)
        write_text(path, text)
    drawn: list[Path] = []
    lacking = missing_for_figures() if figures else None
    if figures and lacking is None:
        listed = [
            (name + file, figure)
            for sweep, name in zip(made, _names(made), strict=True)
            for file, figure in paper_figures(sweep, styles(sweep))
        ]
        try:
            drawn = write_figures(listed, out / "figures")
        except UserError as error:
            lacking = str(error)
    _tidy(out, [index, *tabled, *filled, *drawn])
    return Written(index, tabled, drawn, [*notes, *([lacking] if lacking else [])], made, filled, paper)


def _only(found: Found, model: str | None, layer: int | None) -> Found:
    """The SAEs of one model or layer."""
    if model is None and layer is None:
        return found
    kept = [
        sae
        for sae in found.saes
        if (model is None or sae.metadata.get("model_name") == model)
        and (layer is None or sae.metadata.get("layer") == layer)
    ]
    if not kept:
        there = sorted({(str(sae.metadata.get("model_name")), str(sae.metadata.get("layer"))) for sae in found.saes})
        asked = " and ".join(
            f"{name} = {value!r}" for name, value in (("model", model), ("layer", layer)) if value is not None
        )
        names = "; ".join(f"{name}, layer {number}" for name, number in there) or "none"
        raise UserError(f"{asked}: no SAE of that; there are {names}")
    runs = [run for run in found.runs if any(sae.run is run for sae in kept)]
    return replace(found, saes=kept, runs=runs)


def _names(made: Sequence[Sweep]) -> list[str]:
    """What the files of each sweep begin with: nothing where there is one."""
    if len(made) == 1:
        return [""]
    names: list[str] = []
    for sweep in made:
        base = re.sub(r"[^a-z0-9.]+", "-", sweep.title.lower()).strip("-.") or "sweep"
        name, count = f"{base}-", 2
        while name in names:
            name, count = f"{base}-{count}-", count + 1
        names.append(name)
    return names


def _tidy(out: Path, written: Sequence[Path]) -> None:
    """Take away the files of an earlier report that this one did not make: they would be taken for new ones."""
    names = [str(path.relative_to(out)) for path in written]
    record = out / LIST
    before = read_json(record) if record.exists() else []
    for name in before if isinstance(before, list) else []:
        # Only what lies where reports write, whatever the list says.
        if isinstance(name, str) and name not in names and re.fullmatch(r"(tables|figures)/[^/\\]+", name):
            (out / name).unlink(missing_ok=True)
    write_json(record, names)
