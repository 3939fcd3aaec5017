"""The synthetic experiment's tables in a terminal."""

from __future__ import annotations

import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sampled_sae.report.rows import Column, Configuration, best_of, form
from sampled_sae.report.synthetic_results import buckets, columns, configurations, data_line, summary

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
