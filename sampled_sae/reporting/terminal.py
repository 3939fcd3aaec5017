"""A Table in a terminal, and the results of evaluations."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich import table as rich
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from sampled_sae.evals import registry
from sampled_sae.reporting.tables import columns_only, text_of
from sampled_sae.utils.measures import Cell, Column, Table, Value

NAME_WIDTH = 10  # letters that the first column keeps in a narrow terminal
SKEWED = 1.5  # how many times longer one side of an interval is where half its width would mislead


def console_of(width: int) -> Console:
    """The terminal; `width` columns where the output is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else width)


def safe(text: object, style: str = "") -> Text:
    """Text without markup, and without characters that control the terminal; line breaks are kept."""
    plain = str(text).replace("\u00a0", " ")
    return Text("".join(c if c.isprintable() or c == "\n" else "?" for c in plain), style)


def drawn(table: Table, dense: bool = False) -> rich.Table:
    """The table as rich draws it: numbers are never wrapped, text folds; the best of a column has a star."""
    made = rich.Table(box=None, pad_edge=False, padding=(0, 1 if dense else 2, 0, 0), header_style="bold")
    height = max(column.brief.count("\n") for column in table.columns)
    starred = {c for c, column in enumerate(table.columns) if table.bold and column.digits is not None}
    for c, column in enumerate(table.columns):
        text = c == 0 or column.wide or (column.digits is None and any(isinstance(row[c], str) for row in table.rows))
        head = column.brief or column.title
        head = "\n" * (height - head.count("\n")) + head
        if c in starred:
            head = "\n".join(f"{line} " for line in head.split("\n"))
        width = min(NAME_WIDTH, max((len(_text(row[0], column)) for row in table.rows), default=0)) if c == 0 else None
        made.add_column(
            safe(head), justify="left" if text else "right", no_wrap=not text, overflow="fold", min_width=width
        )
    for r, row in enumerate(table.rows):
        texts = [_text(cell, column).replace("\n", "?") for cell, column in zip(row, table.columns, strict=True)]
        # A blank in place of the star keeps the digits aligned.
        ends = ["*" if (r, c) in table.bold else " " * (c in starred) for c in range(len(row))]
        style = {"*": "bold green"}
        made.add_row(*(safe(text + end, style.get(end, "")) for text, end in zip(texts, ends, strict=True)))
    return made


def _text(cell: Cell, column: Column) -> str:
    return form_value(cell, column.digits) if isinstance(cell, Value) else text_of(cell, column)


def fits(table: rich.Table, console: Console) -> bool:
    """Whether the table needs no more than the width of the terminal."""
    return Measurement.get(console, console.options.update_width(100_000), table).maximum <= console.width


def fitted(table: Table, console: Console) -> list[rich.Table]:
    """As many tables as it takes to show all columns, each with the first one."""
    parts: list[list[int]] = [[0]]
    for c in range(1, len(table.columns)):
        if len(parts[-1]) > 1 and not fits(drawn(columns_only(table, [*parts[-1], c])), console):
            parts.append([0])
        parts[-1].append(c)
    return [drawn(columns_only(table, part)) for part in parts]


def form_value(value: Value | None, digits: int | None = None) -> str:
    """A number, one with half the width of its interval or with both ends of a skewed one, or a dash."""
    if value is None:
        return "-"
    form = ".3g" if digits is None else f".{digits}f"
    written = f"{value.value:{form}}"
    if value.low is None or value.high is None:
        return written
    low, high = f"{value.low:{form}}", f"{value.high:{form}}"
    exact, rounded = (value.low, value.value, value.high), (float(low), float(written), float(high))
    if low != high and _skewed(*exact) and _skewed(*rounded):
        return f"{written} ({low} to {high})"
    return f"{written} ± {(value.high - value.low) / 2:.1g}"


def _skewed(low: float, middle: float, high: float) -> bool:
    sides = sorted((middle - low, high - middle))
    return sides[1] > SKEWED * sides[0]


def print_evals(results: Mapping[str, Mapping[str, Any]], console: Console | None = None) -> None:
    """A table for each evaluation, of the results by the SAEs' names, with its note."""
    console = console or console_of(240)
    for count, (name, contents) in enumerate(results.items()):
        table = registry()[name].table(contents)
        console.print(*[""] * (count > 0), *fitted(table, console), sep="\n")
        console.print(safe(table.note))
