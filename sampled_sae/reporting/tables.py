"""A Table as CSV, Markdown and LaTeX; the tables of a sweep; tables and SAEBench files of evaluations.

The LaTeX compiles with pdfLaTeX, XeLaTeX and LuaLaTeX.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sampled_sae.config import read_file
from sampled_sae.evals.results import names_of, read_result, result_path
from sampled_sae.reporting.collect import Kind, kinds, part, saelens_fields
from sampled_sae.reporting.sweep import Configuration, Sweep, key_of
from sampled_sae.utils.files import make_folder, remove_leftovers, write_json, write_text
from sampled_sae.utils.measures import Cell, Column, Table, csv_text, find, form, number, shown


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


# ---- sweeps and evaluations -----------------------------------------------------------------------------

SETTINGS = ("l", "k", "latents", "lr", "tokens")


def sweep_files(sweep: Sweep) -> dict[str, str]:
    """File names and their text: a table for each evaluation in three formats, and saes.csv with a row per SAE."""
    made: dict[str, str] = {}
    for kind in sweep.kinds:
        table = sweep.table(kind)
        made |= {f"{kind.name}.md": markdown(table), f"{kind.name}.tex": latex(table)}
        made[f"{kind.name}.csv"] = comma_separated(_with_settings(sweep, kind))
    return made | {"saes.csv": comma_separated(_every_sae(sweep))}


def _with_settings(sweep: Sweep, kind: Kind) -> Table:
    """A row per configuration: its settings, then each number with its range over seeds."""
    columns = [*map(Column, ("configuration", "group", *SETTINGS, "seeds"))]
    columns += [Column(metric.title, metric.digits, name=metric.name) for metric in kind.metrics]
    rows = [
        [row.label, row.group, *_settings(row, row.runs[0]), len(row.runs), *map(row.stat, map(key_of, kind.metrics))]
        for row in sweep.measured(kind)
    ]
    return Table(columns, rows)


def _every_sae(sweep: Sweep) -> Table:
    """A row per SAE, with all numbers as they were measured."""
    names = [metric.name for metric in sweep.metrics]
    rows = [
        [run["label"], row.label, row.group, *_settings(row, run), run["seed"], run["name"]]
        + [run["values"].get(name) for name in names]
        for row in sweep.rows
        for run in row.runs
    ]
    return Table([*map(Column, ("name", "configuration", "group", *SETTINGS, "seed", "folder", *names))], rows)


def _settings(row: Configuration, run: dict[str, Any]) -> list[float | None]:
    """Whole numbers without a point: counts are read as floats."""
    values = [row.l, *(run[name] for name in SETTINGS[1:])]
    return [int(value) if value is not None and float(value).is_integer() else value for value in values]


TABLE = "table.csv"
HEAD = ("sae", "folder", "model", "layer", "seed", "evaluation", "metric", "value", "low", "high")


def write_tables(folders: Sequence[Path], out: Path) -> Path:
    """Write `out`/table.csv, a row for each number of each SAE, and `out`/saebench/KIND/..._eval_results.json.

    All results in the SAEs' folders are included, not only the latest. Returns the path of the table.
    """
    rows: list[list[Any]] = []
    for kind in kinds():
        for name, folder in zip(names_of(folders), folders, strict=True):
            content = read_result(folder, kind.name)
            if content is None:
                continue
            written = result_path(folder, kind.name).stat().st_mtime
            _write_saebench(content, folder, name, out / "saebench", int(written * 1000))
            seed = part(content, "sae").get("seed")
            about = (name, str(folder), content.get("model"), content.get("layer"), seed, kind.name)
            found = [(metric.name, find(metric, content["result"])) for metric in kind.metrics]
            rows += [[*about, metric, *value] for metric, value in found if value is not None]
    remove_leftovers(make_folder(out), TABLE)
    write_text(out / TABLE, comma_separated(Table([*map(Column, HEAD)], rows)))
    return out / TABLE


def _write_saebench(content: dict[str, Any], folder: Path, name: str, out: Path, milliseconds: int) -> None:
    """The file where SAEBench's tools look for it, with what they read of the SAE."""
    layout = part(content, "saebench")
    if not layout:  # of an older evaluation
        return
    own, sae = folder / "sampled_sae.json", saelens_fields(folder)
    training = part(read_file(own, "sae") if own.exists() else {}, "metadata", "training")
    tokens = training.get("steps", 0) * training.get("batch_size", 0)
    kind, label = str(layout["eval_type_id"]), name.replace("/", "_")
    filled = {
        **layout,
        "eval_id": f"{kind}_{label}",
        "datetime_epoch_millis": milliseconds,
        "sae_bench_commit_hash": content.get("git_commit") or "",
        "sae_lens_id": folder.name,
        "sae_lens_release_id": "sampled_sae",
        "sae_lens_version": part(sae, "metadata").get("sae_lens_version"),
        "sae_cfg_dict": {**sae, **({"training_tokens": tokens} if tokens else {})},
    }
    make_folder(out / kind)
    path = out / kind / f"sampled_sae_{label}_eval_results.json"
    remove_leftovers(path.parent, path.name)
    write_json(path, filled)
