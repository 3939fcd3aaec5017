"""The numbers of a sweep as tables: Markdown and LaTeX to read, CSV to go on with."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sampled_sae.report.metrics import EVALUATIONS
from sampled_sae.report.rows import Column, Configuration, Stat, best_of, form
from sampled_sae.report.sweep import Sweep, key_of
from sampled_sae.report.text import in_latex, in_markdown, shown

SETTINGS = ("l", "k", "latents", "lr", "tokens")


def columns_of(sweep: Sweep, evaluation: str) -> list[Column]:
    """The numbers of one evaluation that some SAE has."""
    return [
        Column(metric.title, key_of(metric), metric.digits, metric.better)
        for metric in sweep.metrics
        if metric.evaluation == evaluation
    ]


def evaluations_of(sweep: Sweep) -> list[str]:
    """The evaluations that some SAE has numbers of."""
    return [name for name in EVALUATIONS if columns_of(sweep, name)]


def measured(sweep: Sweep, columns: Sequence[Column]) -> list[Configuration]:
    """The rows that have one of these numbers at least."""
    return [row for row in sweep.rows if any(row.stat(column.key) for column in columns)]


def tables(sweep: Sweep) -> dict[str, str]:
    """File names and their text: a table for each evaluation, three times, and one line a SAE."""
    made = {}
    for name in evaluations_of(sweep):
        made[f"{name}.md"] = markdown(sweep, name)
        made[f"{name}.tex"] = latex(sweep, name)
        made[f"{name}.csv"] = comma_separated(sweep, name)
    made["saes.csv"] = every_sae(sweep)
    return made


def markdown(sweep: Sweep, evaluation: str) -> str:
    """A Markdown table: means over seeds, their range in brackets, the best of each column bold."""
    columns = columns_of(sweep, evaluation)
    heads = ["SAE", *(in_markdown(column.title) + _arrow(column, "↓", "↑") for column in columns)]
    lines = [heads, ["---", *["---:"] * len(columns)]]
    lines += _cells(sweep, columns, in_markdown, lambda text: f"**{text}**", lambda low, high: f" ({low} to {high})")
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def latex(sweep: Sweep, evaluation: str) -> str:
    """A LaTeX table for the package booktabs."""
    columns = columns_of(sweep, evaluation)
    heads = [
        "SAE",
        *(in_latex(column.title) + _arrow(column, r"$\downarrow$", r"$\uparrow$") for column in columns),
    ]
    lines = _cells(
        sweep,
        columns,
        in_latex,
        lambda text: rf"\textbf{{{text}}}",
        lambda low, high: rf" {{\scriptsize [{low}, {high}]}}",
    )
    body = "\n".join(" & ".join(line) + r" \\" for line in lines)
    return rf"""% Needs \usepackage{{booktabs}}. Means over seeds, the smallest and the largest in brackets.
\begin{{tabular}}{{l{"r" * len(columns)}}}
\toprule
{" & ".join(heads)} \\
\midrule
{body}
\bottomrule
\end{{tabular}}
"""


def _cells(
    sweep: Sweep,
    columns: Sequence[Column],
    escape: Callable[[object], str],
    bold: Callable[[str], str],
    spread: Callable[[str, str], str],
) -> list[list[str]]:
    rows = measured(sweep, columns)
    lines = [[escape(row.label)] for row in rows]
    for column in columns:
        stats = [row.stat(column.key) for row in rows]
        best = best_of([stat and stat.mean for stat in stats], column)
        for line, stat, mark in zip(lines, stats, best, strict=True):
            line.append(_cell(stat, column.digits, bold if mark else str, spread))
    return lines


def _cell(stat: Stat | None, digits: int, mark: Callable[[str], str], spread: Callable[[str, str], str]) -> str:
    if stat is None:
        return "-"
    low, high = form(stat.low, digits), form(stat.high, digits)
    return mark(form(stat.mean, digits)) + (spread(low, high) if low != high else "")


def _arrow(column: Column, low: str, high: str) -> str:
    return {"low": f" {low}", "high": f" {high}", None: ""}[column.best]


def comma_separated(sweep: Sweep, evaluation: str) -> str:
    """A line for each configuration: its settings, and each number with the smallest and the largest over seeds."""
    metrics = [metric for metric in sweep.metrics if metric.evaluation == evaluation]
    heads = ["configuration", "group", *SETTINGS, "seeds"]
    for metric in metrics:
        heads += [metric.name, f"{metric.name}_low", f"{metric.name}_high"]
    lines = []
    for row in measured(sweep, columns_of(sweep, evaluation)):
        line = [row.label, row.group, row.l, *(row.runs[0][name] for name in SETTINGS[1:]), len(row.runs)]
        for metric in metrics:
            line += row.stat(key_of(metric)) or [None] * 3
        lines.append(line)
    return _csv(heads, lines)


def every_sae(sweep: Sweep) -> str:
    """A line for each SAE, with all numbers as they were measured."""
    names = [metric.name for metric in sweep.metrics]
    heads = ["name", "configuration", "group", *SETTINGS, "seed", "folder", *names]
    lines = [
        [
            *(run["label"], row.label, row.group, row.l, *(run[name] for name in SETTINGS[1:]), run["seed"]),
            *(run["name"], *(run["values"].get(name) for name in names)),
        ]
        for row in sweep.rows
        for run in row.runs
    ]
    return _csv(heads, lines)


def _csv(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([[_plain(value) for value in line] for line in lines])
    return text.getvalue()


def _plain(value: Any) -> Any:
    """Whole numbers without a point, because counts are kept as floats; text on one line."""
    if isinstance(value, str):
        return shown(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value
