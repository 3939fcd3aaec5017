"""The page of a study's results, from results.jsonl and the results of synthetic experiments alone."""

from __future__ import annotations

from pathlib import Path

from sampled_sae.experiments.design import Study
from sampled_sae.experiments.study import RESULTS
from sampled_sae.reporting.study import METRICS, Results, read_rows
from sampled_sae.reporting.study_page import answer, fill_page, forest, tables
from sampled_sae.reporting.synthetic import load_results
from sampled_sae.reporting.write import write_figures
from sampled_sae.utils.files import make_folder

SYNTHETIC = "synthetic"


def write_results(study: Study, out: Path, page: Path, figures: Path | None = None) -> list[Path]:
    """Write the answer and the tables of `out`/results.jsonl into a page, and figures into a folder; returns the files.

    Results of `sampled-sae synthetic` are read from `out`/synthetic/PRESET.json.
    """
    rows = read_rows(out / RESULTS)
    beside = [name for name, setting in study.settings.items() if setting.recipe == "paper"]
    results = Results(rows, {name: setting.model for name, setting in study.settings.items()}, beside)
    synthetic = {path.stem: load_results(path) for path in sorted((out / SYNTHETIC).glob("*.json"))}
    roles = {name: method.role for name, method in study.methods.items()}
    made = tables(results, study.claims, roles, study.needed, synthetic)
    fill_page(page, [("answer", answer(results, study.claims, study.needed, roles, synthetic)), *made])
    if figures is None:
        return [page]
    drawn = [
        (f"{setting}-{metric}", figure)
        for setting in results.settings
        for metric in METRICS
        if (figure := forest(results, setting, metric)) is not None
    ]
    return [page, *(path for path in write_figures(drawn, make_folder(figures)) if path.suffix == ".png")]
