"""Tables of evaluations in a terminal: one for each, a row for each SAE."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sampled_sae.evals.session import names_of
from sampled_sae.files import read_json
from sampled_sae.report.metrics import EVALUATIONS, METRICS, Metric, Value, find

Results = dict[str, dict[Path, Path]]
"""For each evaluation the result's file of each SAE's folder."""

Contents = dict[Path, dict[str, Any]]
"""The result of each SAE's folder."""

SHOWN = {
    "core": ("fvu", "fvu_all", "l0", "cosine", "ce_recovered", "kl_recovered", "alive", "over_10_percent"),
    "absorption": ("absorption", "absorption_full", "absorption_splits", "absorption_letters"),
}
"""Numbers that fit side by side; of other evaluations all."""
SKEWED = 1.5
"""How many times longer one side of an interval is where half the width would mislead."""
NOTES = {
    "core": "By threshold, without tokens of high norm where it does not say all; 95% intervals over contexts.",
    "probing": "Test accuracy: mean over classes, then datasets.",
    "absorption": "Mean over the usable letters.",
    "autointerp": "Means over latents; explanations lie beside the results, in explanations.json.",
}


def print_evals(results: Results, console: Console | None = None) -> None:
    """A table for each evaluation."""
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 240)
    for number, (evaluation, files) in enumerate(results.items()):
        contents = {folder: read_json(path)["result"] for folder, path in files.items()}
        console.print(*[""] * (number > 0), *tables(evaluation, contents, console), sep="\n")
        console.print(Text(NOTES.get(evaluation, "")))
        for reason in {str(c["not_evaluable"]) for c in contents.values() if c.get("not_evaluable")}:
            console.print(Text(f"Not evaluable: {reason}"))


def tables(evaluation: str, contents: Contents, console: Console) -> list[Table]:
    """Each number with its interval where it has one, a dash where there is none; as many tables as the terminal's
    width takes, because cut numbers are none."""
    wanted = SHOWN.get(evaluation)
    columns = [m for m in METRICS if m.evaluation == evaluation and (wanted is None or m.name in wanted)]
    columns = [m for m in columns if any(find(m, content) for content in contents.values())]
    made: list[list[Metric]] = [[]]
    for metric in columns:
        wider = _table(evaluation, contents, [*made[-1], metric])
        if made[-1] and Measurement.get(console, console.options.update(width=10_000), wider).maximum > console.width:
            made.append([])
        made[-1].append(metric)
    return [_table(evaluation, contents, part) for part in made]


def _table(evaluation: str, contents: Contents, columns: list[Metric]) -> Table:
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
    """A number, one with half the width of its interval or with both ends of a skewed one, or a dash."""
    if value is None:
        return "-"
    shown = f"{value.value:.3g}"
    if value.low is None or value.high is None:
        return shown
    low, high = f"{value.low:.3g}", f"{value.high:.3g}"
    exact, written = (value.low, value.value, value.high), (float(low), float(shown), float(high))
    if low != high and _skewed(*exact) and _skewed(*written):
        return f"{shown} ({low} to {high})"
    return f"{shown} ± {(value.high - value.low) / 2:.1g}"


def _skewed(low: float, middle: float, high: float) -> bool:
    sides = sorted((middle - low, high - middle))
    return sides[1] > SKEWED * sides[0]
