"""LaTeX: any text in a cell, and tables that fit on the line. pdfLaTeX, XeLaTeX and LuaLaTeX take them."""

from __future__ import annotations

import csv
import io
import re
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sampled_sae.utils.measures import form, in_html, in_markdown, number, shown

PACKAGES = r"% Needs \usepackage{array,booktabs,graphicx}."
SIGNS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    '"': r"\texttt{\symbol{34}}",
    # At the start of a row these would belong to the end of the row before.
    "[": "{[}",
    "*": "{*}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\u00a0": "~",
    "±": r"$\pm$",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "·": r"$\cdot$",
    "\N{MINUS SIGN}": "$-$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "←": r"$\leftarrow$",
    "→": r"$\rightarrow$",
    "↵": r"$\hookleftarrow$",
    "␣": r"\textvisiblespace{}",
    "…": r"\ldots{}",
    "\N{EN DASH}": "--",
    "\N{EM DASH}": "---",
    "\N{LEFT SINGLE QUOTATION MARK}": "`",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "“": "``",
    "”": "''",
}
ACCENTS = set("\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327")
"""Those of pdfLaTeX's standard fonts."""
PLAIN = "¡¿£§©€ÆæØøßŒœŁł"
"""Other letters that pdfLaTeX takes as they are."""
OTHER = r"""% \unicodeletter: the letter itself with XeLaTeX and LuaLaTeX, if the font has it; with pdfLaTeX its number.
\providecommand{\unicodeletter}[1]{%
  \ifdefined\Umathcode\symbol{\string"#1}\else{\scriptsize\ttfamily U+#1}\fi\allowbreak}
"""
BREAK = r"\allowbreak{}"
WORD = 20
"""Signs without a space after which a line may end."""


def in_latex(text: object) -> str:
    """For a cell or a caption."""
    line = shown(text)
    if re.fullmatch(r"-[\d.,]*", line):
        return "$-$" + line[1:] if line[1:] else "--"
    made, since = "", 0
    for before, sign, after in zip(" " + line, line, line[1:] + " ", strict=False):
        since = 0 if sign == " " else since + 1
        if since > WORD:
            made, since = made + BREAK, 1
        made += _sign(before, sign, after)
    return made


def _sign(before: str, sign: str, after: str) -> str:
    if sign == before == " ":
        return "\\ "
    if sign == before and sign in "-,":  # two of these would be drawn as another sign
        return "{}" + sign
    if sign == "'" and before.isalpha() and after.isalpha():  # an apostrophe, no quotation mark
        return sign
    return SIGNS.get(sign) or _letter(sign)


def _letter(sign: str) -> str:
    parts = unicodedata.normalize("NFD", sign)
    european = ord(sign) < 0x180 and parts[0].isascii() and set(parts[1:]) <= ACCENTS
    return sign if sign in PLAIN or european else rf"\unicodeletter{{{ord(sign):04X}}}"


def head_lines(title: str, width: int = 9, after: str = "") -> list[str]:
    """The head of a column in lines, `after` (LaTeX) behind the last one."""
    lines = [
        in_latex(line) for line in textwrap.wrap(title, width, break_long_words=False, break_on_hyphens=False)
    ] or [""]
    return [*lines[:-1], lines[-1] + after]


def row_of(cells: Sequence[str]) -> str:
    """A row of a table."""
    return " & ".join(cells) + r" \\"


def tabular(columns: str, heads: Sequence[Sequence[str]], rows: Sequence[str]) -> str:
    """A table in small print, shrunk where it is wider than the line; heads end on the same line."""
    height = max(map(len, heads))
    above = [row_of(line) for line in zip(*([""] * (height - len(lines)) + [*lines] for lines in heads), strict=True)]
    lines = [
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{\small\setlength{\tabcolsep}{4pt}%",
        rf"\begin{{tabular}}{{{columns}}}",
        *(r"\toprule", *above, r"\midrule", *rows, r"\bottomrule"),
        r"\end{tabular}}",
    ]
    return "\n".join(lines)


def text_file(remark: str, text: str) -> str:
    """A file with what it needs at its head."""
    before = " ".join([PACKAGES, *([remark] if remark else [])]) + "\n"
    return before + (OTHER if r"\unicodeletter" in text else "") + text + "\n"


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
