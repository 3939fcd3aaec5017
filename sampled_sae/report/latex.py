"""LaTeX: any text in a cell, and tables that fit on the line. pdfLaTeX, XeLaTeX and LuaLaTeX take them."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Sequence

from sampled_sae.report.text import shown

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
