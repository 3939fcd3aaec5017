"""Tables of evaluations in a terminal: one for each, a row for each SAE."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sampled_sae.evals.session import names_of
from sampled_sae.files import read_json
from sampled_sae.report.metrics import EVALUATIONS, METRICS, Metric, Value, find

Results = dict[str, dict[Path, Path]]
"""For each evaluation the result's file of each SAE's folder."""

SHOWN = {
    "core": ("fvu", "fvu_all", "l0", "cosine", "ce_recovered", "kl_recovered", "alive", "over_10_percent"),
    "absorption": ("absorption", "absorption_full", "absorption_splits", "absorption_letters"),
}
"""Numbers that fit side by side; of other evaluations all."""
NOTES = {
    "core": "By threshold, without tokens of high norm where it does not say all; 95% intervals over contexts.",
    "probing": "Test accuracy: mean over classes, then datasets.",
    "absorption": "Mean over the usable letters.",
    "autointerp": "Means over latents; explanations lie beside the results, in explanations.json.",
}


def print_evals(results: Results, console: Console | None = None) -> None:
    """A table for each evaluation."""
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 160)
    for number, (evaluation, files) in enumerate(results.items()):
        contents = {folder: read_json(path)["result"] for folder, path in files.items()}
        console.print(*[""] * (number > 0), table(evaluation, contents), sep="\n")
        console.print(Text(NOTES.get(evaluation, "")))
        for reason in {str(c["not_evaluable"]) for c in contents.values() if c.get("not_evaluable")}:
            console.print(Text(f"Not evaluable: {reason}"))


def table(evaluation: str, contents: dict[Path, dict[str, Any]]) -> Table:
    """Each number with half the width of its interval, a dash where there is none."""
    wanted = SHOWN.get(evaluation)
    columns = [m for m in METRICS if m.evaluation == evaluation and (wanted is None or m.name in wanted)]
    columns = [m for m in columns if any(find(m, content) for content in contents.values())]
    made = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title_style="bold")
    made.add_column(EVALUATIONS.get(evaluation, evaluation), no_wrap=True)
    for metric in columns:
        made.add_column(_short(metric), justify="right", no_wrap=True)
    for name, content in zip(names_of(list(contents)), contents.values(), strict=True):
        made.add_row(Text(name), *(form(find(metric, content)) for metric in columns))
    return made


def _short(metric: Metric) -> Text:
    """The title without what the table's head says already."""
    return Text(metric.title.removeprefix("Probing accuracy, ").replace("Interpretability (", "").rstrip(")"))


def form(value: Value | None) -> str:
    """A number, one with its interval, or a dash."""
    if value is None:
        return "-"
    if value.low is None or value.high is None:
        return f"{value.value:.3g}"
    return f"{value.value:.3g} ± {(value.high - value.low) / 2:.1g}"
