"""LaTeX: what a cell may hold, and that all tables compile where there is a LaTeX."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampled_sae.reporting.tables import head_lines, in_latex, latex, tabular, text_file
from sampled_sae.reporting.write import write_report
from sampled_sae.utils.measures import Column, Table
from tests.reporting.made_up_compare import COMPARISON, synthetic
from tests.reporting.made_up_sweep import put, write_sweep

ASCII = "".join(map(chr, range(32, 127)))
HOSTILE = [
    *("50% of _x_ & #1 {a} $b$ ~c^2 \\input{x} \\\\", "[0pt] starts", "* starts", "-- and --- and ,, and '' and ``"),
    *(
        "?` !` <<a>> |x| \"q\" 'q'",
        "über Ġtoken Ċ łódź naïve Đ ą «q» ‰ €",
        "↵ → ± … \N{EN DASH} “x” ␣",
        "漢字 🦀 עברית \u200b e\u0301",
    ),
    *("a\nb\tc\u202ed", "x" * 300, "漢" * 80, "  two  spaces  ", "", "-", "-1.5", "]{}[", "%", ASCII, ASCII[::-1]),
]


def plain(text: str) -> str:
    """What is left of LaTeX without its commands and escapes."""
    text = re.sub(r"\\unicodeletter\{[0-9A-F]+\}|\\texttt\{\\symbol\{34\}\}|\\[a-z]+\{\}|\{[\[*]?\}", "", text)
    return re.sub(r"\\[&%$#_{} ]|\$(-|\\[a-z]+)\$", "", text)


@given(st.text() | st.text(ASCII))
def test_any_text_is_text(text: str) -> None:
    made = in_latex(text)
    assert not set(plain(made)) & set('\\&%$#_{}^[*<>|"\n\t')
    assert "~" not in plain(made) or "\u00a0" in text
    assert all(sign.isascii() or sign.isalpha() or sign in "¡¿£§©€" for sign in made)


def test_signs_that_latex_would_draw_as_others() -> None:
    assert in_latex("--") == "-{}-" and in_latex("a  b") == r"a \ b" and in_latex("[*") == "{[}{*}"
    assert in_latex("'it's'") == r"\textquotesingle{}it's\textquotesingle{}"
    assert in_latex("Ġé") == "Ġé" and in_latex("ą漢") == r"\unicodeletter{0105}\unicodeletter{6F22}"
    assert in_latex("-0.5") == "$-$0.5" and in_latex("-") == "--" and in_latex("-x") == "-x"
    assert in_latex("x" * 41).count(r"\allowbreak{}") == 2


def test_heads_end_on_the_same_line() -> None:
    assert head_lines("CE recovered", after=r" $\uparrow$") == ["CE", r"recovered $\uparrow$"]
    lines = tabular(Table([Column("SAE"), Column("some numbers", 0)], [["x", 1]])).splitlines()
    assert lines[2:5] == [r"\toprule", r" & some \\", r"SAE & numbers \\"]


def test_other_letters_bring_their_command() -> None:
    assert r"\providecommand{\unicodeletter}" in text_file("", in_latex("漢"))
    assert "unicodeletter" not in text_file("", in_latex("é"))


def hostile_table() -> Table:
    columns = [Column("N_1"), Column("50% & x", 2), Column("Explanation", wide=True), Column("Other one", wide=True)]
    rows = [[text, -0.25, text, text] for text in HOSTILE]
    return Table(columns, rows, "hostile", "".join(HOSTILE), "漢 & 50%", frozenset({(0, 0)}), frozenset({1, 2}))


@pytest.mark.parametrize(
    ("engine", "fonts"), [("pdflatex", ""), ("pdflatex", r"\usepackage[T1]{fontenc}"), ("lualatex", "")]
)
def test_all_tables_compile_and_fit(engine: str, fonts: str, tmp_path: Path) -> None:
    if shutil.which(engine) is None or subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True).returncode:
        pytest.skip(f"no {engine} with booktabs")
    write_sweep(tmp_path / "run")
    put(tmp_path / "compare" / "compare.json", COMPARISON)
    put(tmp_path / "synthetic" / "results.json", synthetic())
    folders = [tmp_path / name for name in ("run", "compare", "synthetic")]
    written = write_report(folders, tmp_path / "out", figures=False)
    files = [path for path in [*written.tables, *written.paper] if path.suffix == ".tex"]
    (tmp_path / "hostile.tex").write_text(latex(hostile_table()), "utf-8")
    inputs = "\n".join(f"\\input{{{path}}}\\clearpage" for path in [*files, tmp_path / "hostile.tex"])
    document = rf"\documentclass{{article}}\usepackage{{array,booktabs,graphicx}}{fonts}\begin{{document}}"
    (tmp_path / "all.tex").write_text(f"{document}\n{inputs}\n\\end{{document}}\n", "utf-8")
    done = subprocess.run(
        [engine, "-interaction=nonstopmode", "-halt-on-error", "all.tex"],
        cwd=tmp_path,
        env=os.environ | {"max_print_line": "10000"},
        capture_output=True,
        timeout=300,
    )
    said = done.stdout.decode("utf-8", "replace")
    assert done.returncode == 0, said[-3000:]
    ours, _, _ = said.partition("hostile.tex")
    assert "Overfull" not in ours, re.findall("Overfull.*", ours)
    assert len(files) > 10 and (tmp_path / "all.pdf").exists()
