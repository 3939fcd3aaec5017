"""A Table as CSV, Markdown, LaTeX and in a terminal.

The LaTeX compiles with pdfLaTeX, XeLaTeX and LuaLaTeX.
"""

from __future__ import annotations

import re
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich import table as rich
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from sampled_sae.evals import registry
from sampled_sae.utils.measures import Cell, Column, Table, Value, csv_text, form, number, shown


class Missing(NamedTuple):
    """A table that could not be made."""

    name: str
    title: str
    why: str  # what it would take


# ---- cells ---------------------------------------------------------------------------------------------


def text_of(cell: Cell, column: Column) -> str:
    """A cell as text: a number with the column's digits, a dash for None."""
    value = cell[0] if isinstance(cell, tuple) else cell
    if value is None or isinstance(value, str):
        return value or ("-" if value is None else "")
    if column.digits is not None:
        return form(value, column.digits)
    finite = number(value)
    return f"{value}" if finite is None else f"{finite:g}" if abs(finite) < 1e5 else f"{finite:.0f}"


def range_of(cell: Cell, column: Column) -> tuple[str, str] | None:
    """Both ends of a cell's range as text; None where there is none or they are equal as written."""
    if not isinstance(cell, tuple) or cell.low is None or cell.high is None:
        return None
    low, high = form(cell.low, column.digits or 0), form(cell.high, column.digits or 0)
    return (low, high) if low != high else None


def columns_only(table: Table, kept: Sequence[int]) -> Table:
    """The table with these columns alone."""
    bold = frozenset((r, kept.index(c)) for r, c in table.bold if c in kept)
    rows = [[row[c] for c in kept] for row in table.rows]
    return table._replace(columns=[table.columns[c] for c in kept], rows=rows, bold=bold)


# ---- CSV -----------------------------------------------------------------------------------------------


def comma_separated(table: Table) -> str:
    """All digits of all values; a column with ranges becomes three: NAME, NAME_low and NAME_high."""
    names = [column.name or column.title for column in table.columns]
    ranged = [any(isinstance(row[c], tuple) for row in table.rows) for c in range(len(names))]
    ends = ("", "_low", "_high")
    heads = [name + end for name, three in zip(names, ranged, strict=True) for end in (ends if three else ends[:1])]
    parts = [
        [cell if isinstance(cell, tuple) else (cell, *[None] * 2 * ranged[c]) for c, cell in enumerate(row)]
        for row in table.rows
    ]
    return csv_text(heads, ([value for part in row for value in part] for row in parts))


# ---- Markdown ------------------------------------------------------------------------------------------


def in_markdown(text: object) -> str:
    """For a cell of a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>|~$#&])", r"\\\1", shown(text))


def markdown(table: Table) -> str:
    """A Markdown table with ranges in brackets and the best in bold, between its title and its note."""
    arrows = {"low": " ↓", "high": " ↑", None: ""}
    lines = [[in_markdown(column.title) + arrows[column.better] for column in table.columns]]
    lines.append(["---:" if column.digits is not None else "---" for column in table.columns])
    lines += [[_markdown_cell(table, r, c) for c in range(len(row))] for r, row in enumerate(table.rows)]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    title = [f"**{in_markdown(table.title)}**"] if table.title else []
    return "\n\n".join([*title, body, *([in_markdown(table.note)] if table.note else [])]) + "\n"


def _markdown_cell(table: Table, r: int, c: int) -> str:
    cell, column = table.rows[r][c], table.columns[c]
    text, ends = in_markdown(text_of(cell, column)), range_of(cell, column)
    return (f"**{text}**" if (r, c) in table.bold else text) + (f" ({' to '.join(ends)})" if ends else "")


# ---- LaTeX ---------------------------------------------------------------------------------------------

MOST = 6  # columns of numbers side by side in a table without a caption
PACKAGES = r"% Needs \usepackage{array,booktabs,graphicx}."
TEXT_SIGNS = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
TEXT_SIGNS |= {"'": "quotesingle", "`": "asciigrave", "␣": "visiblespace"}
MATH_SIGNS = {"±": "pm", "\N{MULTIPLICATION SIGN}": "times", "·": "cdot", "≤": "leq", "≥": "geq"}
MATH_SIGNS |= {"←": "leftarrow", "→": "rightarrow", "↵": "hookleftarrow"}
SIGNS = {
    **{sign: rf"\text{name}{{}}" for sign, name in TEXT_SIGNS.items()},
    **{sign: rf"$\{name}$" for sign, name in MATH_SIGNS.items()},
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{sign: f"{{{sign}}}" for sign in "[*"},  # at the start of a row these would belong to the end of the row before
    **{'"': r"\texttt{\symbol{34}}", "…": r"\ldots{}", "\u00a0": "~", "\N{MINUS SIGN}": "$-$"},
    **{"\N{EN DASH}": "--", "\N{EM DASH}": "---", "“": "``", "”": "''"},
    **{"\N{LEFT SINGLE QUOTATION MARK}": "`", "\N{RIGHT SINGLE QUOTATION MARK}": "'"},
}
# Those in pdfLaTeX's standard fonts.
ACCENTS = set("\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327")
PLAIN = "¡¿£§©€ÆæØøßŒœŁł"  # other letters that pdfLaTeX takes as they are
OTHER = r"""% \unicodeletter: the letter itself with XeLaTeX and LuaLaTeX, if the font has it; with pdfLaTeX its number.
\providecommand{\unicodeletter}[1]{%
  \ifdefined\Umathcode\symbol{\string"#1}\else{\scriptsize\ttfamily U+#1}\fi\allowbreak}
"""
BREAK = r"\allowbreak{}"
WORD = 20  # signs without a space after which a line may end


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
    """A column header in lines, with `after` (LaTeX) at the end of the last one."""
    lines = textwrap.wrap(title, width, break_long_words=False, break_on_hyphens=False) or [""]
    return [*map(in_latex, lines[:-1]), in_latex(lines[-1]) + after]


def latex(table: Table) -> str:
    """A LaTeX table with its caption; without a title, tabulars of a few columns each, one below the other."""
    if not table.title:
        text = "\n\n\\medskip\n".join(r"\noindent" + tabular(block) for block in _blocks(table))
        return text_file("Means over seeds, the smallest and the largest in brackets.", text)
    caption = rf"\caption{{{in_latex(table.title)}. {in_latex(table.note)}}}"
    label = rf"\label{{tab:{table.name.replace('_', '-')}}}\smallskip"
    lines = [r"\begin{table}", r"\centering", caption, label, "", tabular(table), r"\end{table}"]
    return text_file("", "\n".join(lines))


def _blocks(table: Table) -> Iterator[Table]:
    """Tables of the first column and at most `MOST` others, as equal as possible."""
    others = range(1, len(table.columns))
    size = -(-len(others) // -(-len(others) // MOST))
    for start in range(0, len(others), size):
        yield columns_only(table, [0, *others[start : start + size]])


def tabular(table: Table) -> str:
    """A table in small print, shrunk where it is wider than the line; headers end on the same line."""
    wide = sum(column.wide for column in table.columns)
    heads = [_head(column, wide) for column in table.columns]
    height = max(map(len, heads))
    above = [_row(line) for line in zip(*([""] * (height - len(lines)) + lines for lines in heads), strict=True)]
    lines = [
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{\small\setlength{\tabcolsep}{4pt}%",
        rf"\begin{{tabular}}{{{''.join(_kind(column, wide) for column in table.columns)}}}",
        *(r"\toprule", *above, r"\midrule", *_body(table), r"\bottomrule"),
        r"\end{tabular}}",
    ]
    return "\n".join(lines)


def _head(column: Column, wide: int) -> list[str]:
    arrow = {"low": r" $\downarrow$", "high": r" $\uparrow$", None: ""}[column.better]
    return head_lines(column.title, 22 if column.wide or (column.digits is None and not wide) else 9, arrow)


def _kind(column: Column, wide: int) -> str:
    """The column's kind; sentences share six tenths of the line."""
    if column.wide:
        return rf">{{\raggedright\arraybackslash}}p{{{0.6 / wide:.2f}\linewidth}}"
    return "l" if column.digits is None else "r"


def _body(table: Table) -> Iterator[str]:
    for r, row in enumerate(table.rows):
        if r in table.rules and r > 0:
            yield r"\midrule"
        texts = [in_latex(text_of(cell, column)) for cell, column in zip(row, table.columns, strict=True)]
        yield _row([rf"\textbf{{{text}}}" if (r, c) in table.bold else text for c, text in enumerate(texts)])
        ends = [range_of(cell, column) for cell, column in zip(row, table.columns, strict=True)]
        if any(ends):
            yield _row([rf"\scriptsize [{', '.join(map(in_latex, pair))}]" if pair else "" for pair in ends])
            yield r"\addlinespace[2pt]"


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def text_file(remark: str, text: str) -> str:
    """A file that begins with the packages and commands it needs."""
    before = " ".join([PACKAGES, *([remark] if remark else [])]) + "\n"
    return before + (OTHER if r"\unicodeletter" in text else "") + text + "\n"


def files(table: Table) -> dict[str, str]:
    """File names and their text."""
    writers: dict[str, Callable[[Table], str]] = {"md": markdown, "csv": comma_separated, "tex": latex}
    return {f"{table.name}.{end}": write(table) for end, write in writers.items()}


# ---- the terminal --------------------------------------------------------------------------------------

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
    how = ".3g" if digits is None else f".{digits}f"
    written = f"{value.value:{how}}"
    if value.low is None or value.high is None:
        return written
    low, high = f"{value.low:{how}}", f"{value.high:{how}}"
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
