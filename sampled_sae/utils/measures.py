"""Metrics, values and tables, and how numbers and text are written.

Evaluations and training declare their metrics; tables, figures, axes and explanations follow from the declaration.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

Better = Literal["low", "high"]


class Metric(NamedTuple):
    """One number of an SAE, as an evaluation or training declares it."""

    name: str  # short and unique, for file names, CSV headers and links
    title: str  # for headings and axes
    meaning: str  # one sentence
    better: Better | None  # which end is better; None where neither is
    path: tuple[str, ...]  # keys that lead to a number, or to an object with `value` (`low`, `high`) or `mean`
    digits: int = 3  # digits after the point
    headline: bool = False  # whether it is in the overview and in the figures for a paper
    unit: str = ""  # unit; empty for a share or another plain number
    null: float | None = None  # value without any information: chance, the mean, or zero ablation; None: none
    brief: str = ""  # title inside the evaluation's own table; the title by default
    evaluation: str = ""  # name of the evaluation; filled in by it

    @property
    def axis(self) -> str:
        """The title with the better direction."""
        return self.title + {"low": " (lower is better)", "high": " (higher is better)", None: ""}[self.better]


class Value(NamedTuple):
    """A number as an evaluation found it."""

    value: float
    low: float | None  # lower end of the evaluation's own interval, where it has one
    high: float | None


def find(metric: Metric, result: Any) -> Value | None:
    """The number in an evaluation's result; none where it was not measured."""
    for part in metric.path:
        result = result.get(part) if isinstance(result, dict) else None
    if not isinstance(result, dict):
        result = {"value": result}
    elif "value" not in result:
        result = {"value": result.get("mean")}
    value, low, high = (number(result.get(name)) for name in ("value", "low", "high"))
    return None if value is None else Value(value, low, high)


class Stat(NamedTuple):
    """One number over the seeds of a configuration."""

    mean: float
    low: float
    high: float


class Column(NamedTuple):
    """One column of a table."""

    title: str
    digits: int | None = None  # digits after the point; None for text, names and whole numbers
    better: Better | None = None  # which end is better, shown beside the title; None for neither
    wide: bool = False  # whether the cells hold sentences
    name: str = ""  # header in CSV; the title by default
    brief: str = ""  # header in a terminal, where line breaks are kept; the title by default
    meaning: str = ""  # one sentence, shown on pages


Cell = str | int | float | Stat | Value | None


class Table(NamedTuple):
    """A table of raw values; reporting/tables.py writes it in each format."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]  # None for a missing value; a Stat or a Value is shown with its range or interval
    name: str = ""  # file name without extension
    title: str = ""
    note: str = ""  # how the numbers were measured and what to consider when comparing them
    bold: frozenset[tuple[int, int]] = frozenset()  # cells (row, column) marked as the best
    rules: frozenset[int] = frozenset()  # rows with a horizontal line above them


HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that break a line, or change the direction of what stands around them, without being seen."""


def shown(text: object, keep: str = "") -> str:
    """Text on one line and in one direction: hidden characters become visible escapes, but for those in `keep`."""
    known = {"\n": "\\n", "\r": "\\r", "\t": "\\t"} | {sign: sign for sign in keep}
    return HIDDEN.sub(lambda found: known.get(found[0]) or f"\\u{ord(found[0]):04x}", str(text))


FORMULA = re.compile(r"[=+\-@]")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def csv_text(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A CSV file: numbers with all their digits, text on one line, nothing for None."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_in_csv(value) for value in row] for row in (heads, *rows))
    return text.getvalue()


def _in_csv(value: Any) -> Any:
    """An apostrophe keeps spreadsheets from running text that begins like a formula."""
    if not isinstance(value, str):
        return value
    line = shown(value)
    return f"'{line}" if FORMULA.match(line) and not NUMBER.fullmatch(line) else line


def listed(names: list[str], most: int = 3) -> str:
    """`a, b and c`, or `a, b and 5 more`."""
    named = names if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def unique(name: str, taken: set[str]) -> str:
    """The name, with a number behind it if it is in `taken`, where it is added."""
    found, count = name, 2
    while found in taken:
        found, count = f"{name}-{count}", count + 1
    taken.add(found)
    return found


def number(value: Any) -> float | None:
    """`value` as a finite float, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def form(value: Any, digits: int) -> str:
    """`value` with so many digits after the point, or a dash."""
    finite = number(value)
    # Adding zero turns a rounded -0.0 into 0.0.
    return "-" if finite is None else f"{round(finite, digits) + 0.0:,.{digits}f}"
