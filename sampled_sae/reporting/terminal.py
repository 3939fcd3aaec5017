"""The synthetic experiment's tables in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sampled_sae.evals import registry
from sampled_sae.evals.session import names_of
from sampled_sae.reporting.sweep import Column, Configuration, best_of
from sampled_sae.reporting.synthetic import buckets, columns, configurations, data_line, summary
from sampled_sae.utils.files import read_json
from sampled_sae.utils.measures import Metric, Value, find, form

PLAIN_WIDTH = 100  # columns, where the output is a file or a pipe


def print_results(results: dict[str, Any], console: Console | None = None) -> None:
    """Print the data's statistics, a row for each configuration (means over seeds) and a summary."""
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    rows = configurations(results)
    console.print(Text("Data", style="bold"), _data_table(results), Text(data_line(results)), "", sep="\n")
    console.print(Text("Results", style="bold"), _results_table(rows, columns(results)), _note(rows), "", sep="\n")
    console.print(_safe(summary(results, lambda label: f"'{label}'")))


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)


def _safe(text: Any) -> Text:
    """Text without markup, and without characters that could steer the terminal."""
    return Text("".join(c if c.isprintable() else "?" for c in str(text)))


def _data_table(results: dict[str, Any]) -> Table:
    table = _table()
    table.add_column("bucket", no_wrap=True)
    for title in ("features", "p", "sigma", "mean |a|", "std |a|"):
        table.add_column(title, justify="right", no_wrap=True, min_width=7)
    for part in buckets(results):
        numbers = [("features", 0), ("p", 3), ("sigma", 2), ("mean_activation", 3), ("std_activation", 3)]
        table.add_row(_safe(part["name"]), *(form(part.get(key), digits) for key, digits in numbers))
    return table


def _results_table(rows: list[Configuration], shown: list[Column]) -> Table:
    table = _table()
    table.add_column("\nSAE", overflow="fold", min_width=10)
    cells = []
    for column in (column for column in shown if column.brief):
        # The star has its place in every row, so that the digits stay in line.
        head = "\n".join(f"{line} " for line in column.brief.split("\n"))
        table.add_column(Text(head), justify="right", no_wrap=True)
        means = [row.mean(column.key) for row in rows]
        marks = best_of(means, column)
        cells.append([_cell(form(mean, column.digits), mark) for mean, mark in zip(means, marks, strict=True)])
    for i, row in enumerate(rows):
        table.add_row(_safe(row.label), *(column[i] for column in cells))
    return table


def _cell(text: str, best: bool) -> Text:
    return Text(f"{text}*", style="bold green") if best else Text(f"{text} ")


def _note(rows: list[Configuration]) -> Text:
    seeds = max((len(row.runs) for row in rows), default=0)
    over = f"; means over up to {seeds} seeds" if seeds > 1 else ""
    return Text(f"* best of its column; L0 by threshold; buckets: share of true features recovered{over}")


Results = dict[str, dict[Path, Path]]
"""For each evaluation the result's file of each SAE's folder."""
Contents = dict[Path, dict[str, Any]]
"""The result of each SAE's folder."""
SKEWED = 1.5
"""How many times longer one side of an interval is where half the width would mislead."""


def print_evals(results: Results, console: Console | None = None) -> None:
    """A table for each evaluation."""
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 240)
    for number, (evaluation, files) in enumerate(results.items()):
        contents = {folder: read_json(path)["result"] for folder, path in files.items()}
        console.print(*[""] * (number > 0), *tables(evaluation, contents, console), sep="\n")
        console.print(Text(registry()[evaluation].note if evaluation in registry() else ""))
        for reason in {str(c["not_evaluable"]) for c in contents.values() if c.get("not_evaluable")}:
            console.print(Text(f"Not evaluable: {reason}"))


def tables(evaluation: str, contents: Contents, console: Console) -> list[Table]:
    """Each number with its interval where it has one, a dash where there is none; as many tables as the terminal's
    width takes, because cut numbers are none."""
    known = registry().get(evaluation)
    metrics = known.metrics if known else ()
    columns = [m for m in metrics if not (known and known.columns) or m.name in known.columns]
    columns = [m for m in columns if any(find(m, content) for content in contents.values())]
    made: list[list[Metric]] = [[]]
    for metric in columns:
        wider = _eval_table(evaluation, contents, [*made[-1], metric])
        if made[-1] and Measurement.get(console, console.options.update(width=10_000), wider).maximum > console.width:
            made.append([])
        made[-1].append(metric)
    return [_eval_table(evaluation, contents, part) for part in made]


def _eval_table(evaluation: str, contents: Contents, columns: list[Metric]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title_style="bold")
    made.add_column(registry()[evaluation].title if evaluation in registry() else evaluation, no_wrap=True)
    for metric in columns:
        made.add_column(Text(metric.brief or metric.title), justify="right", no_wrap=True)
    for name, content in zip(names_of(list(contents)), contents.values(), strict=True):
        made.add_row(Text(name), *(form_value(find(metric, content)) for metric in columns))
    return made


def form_value(value: Value | None) -> str:
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
