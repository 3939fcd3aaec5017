"""The page of a study's results, from results.jsonl and the results of synthetic experiments alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sampled_sae.experiments.design import Study
from sampled_sae.experiments.study import RESULTS
from sampled_sae.reporting.study import GOAL, Results, read_rows
from sampled_sae.reporting.study_page import NOT_RUN, against, answer, fill_page, forest, tables
from sampled_sae.reporting.synthetic import load_results
from sampled_sae.reporting.write import write_figures
from sampled_sae.utils.files import make_folder, write_text

SYNTHETIC = "synthetic"
DETAILED = "tables.md"
DETAILS = ("difference-", "datasets-", "self-", "synthetic-")  # beginnings of the names of tables there
PAIRS = (("fvu", "probing_5"), ("absorption", "probing_5"), ("fvu", "autointerp"))  # metrics against each other
SHOWN = (*GOAL, "absorption_f1", "over_10_percent", "autointerp", "mmcs_seeds")  # metrics with a figure


def write_results(study: Study, out: Path, page: Path, figures: Path | None = None) -> list[Path]:
    """Write the answer and the tables of `out`/results.jsonl into a page, and figures into a folder; returns the files.

    Tables of single metrics go to `out`/tables.md. Figures are of the first setting; without a folder, the page keeps
    those that it has. Results of `sampled-sae synthetic` are read from `out`/synthetic/PRESET.json.
    """
    rows = read_rows(out / RESULTS)
    beside = [name for name, setting in study.settings.items() if setting.recipe == "paper"]
    results = Results(rows, {name: setting.model for name, setting in study.settings.items()}, beside)
    synthetic = {path.stem: load_results(path) for path in sorted((out / SYNTHETIC).glob("*.json"))}
    roles = {name: method.role for name, method in study.methods.items()}
    drawn = list(_figures(results, results.settings[0])) if figures is not None and results.settings else []
    files = [] if figures is None else write_figures(drawn, make_folder(figures))
    images = [path for path in files if path.suffix == ".png"]
    for path in set(files) - set(images):
        path.unlink()
    blocks = [("answer", answer(results, study.claims, study.needed, roles, synthetic))]
    if figures is not None:
        shown = "\n\n".join(f"![{path.stem}]({os.path.relpath(path, page.parent)})" for path in images)
        blocks.append(("figures", shown or NOT_RUN))
    made = list(tables(results, study.claims, roles, study.needed, synthetic))
    fill_page(page, [*blocks, *(table for table in made if not table.name.startswith(DETAILS))])
    write_text(out / DETAILED, "# All tables of the study\n")
    fill_page(out / DETAILED, [table for table in made if table.name.startswith(DETAILS)])
    return [page, out / DETAILED, *images]


def _figures(results: Results, setting: str) -> Iterator[tuple[str, Any]]:
    """Figures of one setting by name, those that there are results for."""
    for x, y in PAIRS:
        if (figure := against(results, setting, x, y)) is not None:
            yield f"{setting}-{x}-{y}", figure
    for metric in SHOWN:
        if (figure := forest(results, setting, metric)) is not None:
            yield f"{setting}-{metric}", figure
