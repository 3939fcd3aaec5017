"""Numbers of SAEs as tables and pictures need them: a row for each configuration, over its seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Key = str | tuple[str, str]  # a field of a run, or a field inside a field, as ("recovery", "LF+HA")


class Stat(NamedTuple):
    """One number over the seeds of a configuration."""

    mean: float
    low: float
    high: float


class Column(NamedTuple):
    """One column of numbers: where it is found, how it is written, and which end of it is the good one."""

    title: str
    key: Key
    digits: int
    best: Literal["high", "low"] | None = None
    brief: str = ""  # its head in a terminal, which leaves out columns without one


@dataclass(frozen=True)
class Configuration:
    """The runs that differ only in their seed."""

    label: str
    group: str
    l: float | None
    runs: tuple[dict[str, Any], ...]

    def stat(self, key: Key) -> Stat | None:
        """Mean, smallest and largest over the runs that have the number; None where none has it."""
        values = [value for run in self.runs if (value := field(run, key)) is not None]
        return Stat(sum(values) / len(values), min(values), max(values)) if values else None

    def mean(self, key: Key) -> float | None:
        """The mean over the runs, or None."""
        stat = self.stat(key)
        return stat.mean if stat else None


def number(value: Any) -> float | None:
    """`value` as a finite float, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def field(record: Any, key: Key) -> float | None:
    """The number under `key`, or None."""
    for part in (key,) if isinstance(key, str) else key:
        record = record.get(part) if isinstance(record, dict) else None
    return number(record)


def form(value: Any, digits: int) -> str:
    """`value` with so many digits after the point, or a dash."""
    finite = number(value)
    # Adding zero turns a rounded -0.0 into 0.0.
    return "-" if finite is None else f"{round(finite, digits) + 0.0:,.{digits}f}"


def best_of(values: Sequence[float | None], column: Column) -> list[bool]:
    """Which values are the best as written; none where the column is no contest or all are equal."""
    written = [None if value is None else round(value, column.digits) for value in values]
    known = [value for value in written if value is not None]
    if column.best is None or len(set(known)) < 2:
        return [False] * len(values)
    best = max(known) if column.best == "high" else min(known)
    return [value == best for value in written]
