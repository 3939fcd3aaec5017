"""A table of the paper filled with our numbers, and the same as Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sampled_sae.report.latex import head_lines, in_latex, row_of, tabular, text_file
from sampled_sae.report.rows import form, number
from sampled_sae.report.text import in_html, in_markdown, shown


class Head(NamedTuple):
    """One column."""

    title: str
    digits: int | None = None
    """Digits after the point; none for text, names and whole numbers."""
    wide: bool = False
    """Whether it holds sentences."""


class PaperTable(NamedTuple):
    """One table."""

    name: str
    """Of its files, without an ending."""
    title: str
    """What it shows."""
    note: str
    """How its numbers came about, and what to know before one compares them with the paper's."""
    heads: Sequence[Head]
    rows: Sequence[Sequence[Any]]
    """Raw values, none where there is no number."""
    bold: frozenset[tuple[int, int]] = frozenset()
    """Cells (row, column) that are marked as the best."""
    rules: frozenset[int] = frozenset()
    """Rows that a line stands above."""


class Missing(NamedTuple):
    """A table that could not be made."""

    name: str
    title: str
    why: str
    """What it would take."""


def files(table: PaperTable) -> dict[str, str]:
    """Names of files and their text."""
    return {
        f"{table.name}.md": markdown(table),
        f"{table.name}.csv": comma_separated(table),
        f"{table.name}.tex": latex(table),
    }


def cells(table: PaperTable, escape: Callable[[object], str], bold: Callable[[str], str]) -> list[list[str]]:
    """The values as text, numbers with their digits."""
    return [
        [
            (bold if (r, c) in table.bold else str)(escape(_written(value, head)))
            for c, (value, head) in enumerate(zip(row, table.heads, strict=True))
        ]
        for r, row in enumerate(table.rows)
    ]


def _written(value: Any, head: Head) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if head.digits is not None:
        return form(value, head.digits)
    found = number(value)
    return f"{value}" if found is None else f"{found:g}" if abs(found) < 1e5 else f"{found:.0f}"


def markdown(table: PaperTable) -> str:
    """A title, a Markdown table, and how it was made."""
    lines = [[in_markdown(head.title) for head in table.heads]]
    lines.append(["---:" if head.digits is not None else "---" for head in table.heads])
    lines += cells(table, in_markdown, lambda text: f"**{text}**")
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{in_markdown(table.title)}**\n\n{body}\n\n{in_markdown(table.note)}\n"


def latex(table: PaperTable) -> str:
    """A LaTeX table with its caption."""
    wide = sum(head.wide for head in table.heads)
    kinds = "".join(_kind(head, wide) for head in table.heads)
    body = []
    for number_, line in enumerate(cells(table, in_latex, lambda text: rf"\textbf{{{text}}}")):
        body += [r"\midrule"] * (number_ in table.rules and number_ > 0)
        body.append(row_of(line))
    heads = [
        head_lines(head.title, 22 if head.wide or (head.digits is None and not wide) else 9) for head in table.heads
    ]
    caption = rf"\caption{{{in_latex(table.title)}. {in_latex(table.note)}}}"
    label = rf"\label{{tab:{table.name.replace('_', '-')}}}\smallskip"
    lines = [r"\begin{table}", r"\centering", caption, label, "", tabular(kinds, heads, body), r"\end{table}"]
    return text_file("", "\n".join(lines))


def _kind(head: Head, wide: int) -> str:
    """The column's kind; sentences share six tenths of the line."""
    if head.wide:
        return rf">{{\raggedright\arraybackslash}}p{{{0.6 / wide:.2f}\linewidth}}"
    return "l" if head.digits is None else "r"


def comma_separated(table: PaperTable) -> str:
    """The values with all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([head.title for head in table.heads])
    writer.writerows([[shown(value) if isinstance(value, str) else value for value in row] for row in table.rows])
    return text.getvalue()


def html_rows(table: PaperTable) -> tuple[list[str], list[str], set[int]]:
    """Heads and rows of cells for a page, and the columns of text, which stand left."""
    made = cells(table, in_html, lambda text: f"<b>{text}</b>")
    left = {c for c, head in enumerate(table.heads) if head.wide or any(isinstance(row[c], str) for row in table.rows)}
    kinds = ["text" if head.wide else "left" if c in left else "" for c, head in enumerate(table.heads)]
    lines = []
    for number_, row in enumerate(made):
        rule = " rule" * (number_ in table.rules and number_ > 0)
        rest = [f"<td class='{kind}{rule}'>{cell}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True)]
        lines.append(f"<th scope='row' class='{rule}'>{row[0]}</th>{''.join(rest)}")
    # A hyphen that does not break: the heads are narrow.
    return [in_html(head.title.replace("-", "\u2011")) for head in table.heads], lines, left


def best(values: Sequence[float | None], digits: int) -> set[int]:
    """Places of the largest value as written; nobody where all are equal or there is one alone."""
    written = [None if value is None else round(value, digits) for value in values]
    known = [value for value in written if value is not None]
    if len(set(known)) < 2:
        return set()
    return {place for place, value in enumerate(written) if value == max(known)}
