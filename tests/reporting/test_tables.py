"""Tables of a sweep, read back."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

from sampled_sae.method import presets
from sampled_sae.reporting.collect import collect
from sampled_sae.reporting.pages import render
from sampled_sae.reporting.sweep import Sweep, sweeps
from sampled_sae.reporting.tables import comma_separated, in_markdown
from sampled_sae.reporting.write import sweep_files
from sampled_sae.utils.measures import Column, Stat, Table, listed, shown
from tests.reporting.made_up_sweep import K, M, core, grid, write_sae, write_sweep

NOTHING = {"seeds": Table([], []), "figures": [], "unique": [], "old": "", "top": [], "skipped": {}}
HOSTILE = ["<script>alert(1)</script>", "a\"b'c", "\u202eevil", "line\nbreak", "🦀|pipe", "$x_1^2$ & 50% #{}~\\"]


def made(folder: Path) -> Sweep:
    return sweeps(collect([write_sweep(folder)]))[0]


def test_a_file_of_each_kind_for_each_evaluation(tmp_path: Path) -> None:
    names = set(sweep_files(made(tmp_path)))
    kinds = {
        f"{name}.{end}"
        for name in ("core", "probing", "absorption", "autointerp", "training")
        for end in ("md", "tex", "csv")
    }
    assert names == kinds | {"saes.csv"}


def test_csv_gives_the_numbers_back(tmp_path: Path) -> None:
    sweep = made(tmp_path)
    lines = list(csv.DictReader(io.StringIO(sweep_files(sweep)["saes.csv"])))
    runs = {run["name"]: run for row in sweep.rows for run in row.runs}
    assert len(lines) == len(grid()) == len(runs)
    for line in lines:
        values = runs[line["folder"]]["values"]
        assert all(float(line[name]) == value for name, value in values.items())
        assert int(line["k"]) == K and int(line["latents"]) == M and float(line["lr"]) == 1e-3
    means = list(csv.DictReader(io.StringIO(sweep_files(sweep)["core.csv"])))
    assert [line["configuration"] for line in means] == [row.label for row in sweep.rows]
    for line, row in zip(means, sweep.rows, strict=True):
        stat = row.stat(("values", "fvu"))
        assert (float(line["fvu"]), float(line["fvu_low"]), float(line["fvu_high"])) == stat
        assert int(line["seeds"]) == 2


def test_markdown_marks_the_best_with_its_range(tmp_path: Path) -> None:
    head, rule, *lines = sweep_files(made(tmp_path))["core.md"].splitlines()
    assert head.startswith("| SAE | FVU ↓ |") and "CE recovered ↑" in head and "| L0 |" in head
    assert rule.count("---:") == head.count("|") - 2
    (best,) = [line for line in lines if "**0.102** (0.100 to 0.104)" in line]
    assert best.startswith("| batchtopk |")
    assert all(line.count("|") == head.count("|") for line in lines)


def test_latex_stacks_tables_of_a_few_columns(tmp_path: Path) -> None:
    sweep = made(tmp_path)
    text = sweep_files(sweep)["core.tex"]
    blocks = text.split(r"\medskip")
    assert len(blocks) > 1 and sum(len(kinds) for kinds in re.findall(r"tabular}{l(r+)}", text)) == len(
        sweep.kinds[0].metrics
    )
    for block in blocks:
        columns = re.search(r"tabular}{(lr+)}", block)
        assert columns is not None and len(columns[1]) <= 7
        body = block.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
        rows = [line for line in body if not line.startswith(r"\addlinespace")]
        assert all(line.endswith(r"\\") and line.count("&") == len(columns[1]) - 1 for line in rows)
        assert sum(not line.startswith(" &") for line in rows) == len(sweep.rows)
    assert r"batchtopk & \textbf{0.102} &" in text and r" & \scriptsize [0.100, 0.104] &" in text
    assert r"FVU $\downarrow$" in text
    assert text.startswith(r"% Needs \usepackage{array,booktabs,graphicx}. Means over seeds")


def test_an_sae_without_a_number_gets_a_dash(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    (config,) = presets.named([presets.sampled(M, K, "entropy", 3)], 0)
    write_sae(tmp_path / "saes" / "entropy-l3-s0", config, core=core(None))
    sweep = sweeps(collect([tmp_path]))[0]
    (line,) = [line for line in sweep_files(sweep)["core.md"].splitlines() if "entropy" in line]
    assert line.split("|")[2].strip() == "-"
    assert "entropy" not in sweep_files(sweep)["probing.md"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_in_their_cells(name: str) -> None:
    assert "\n" not in in_markdown(name) and re.search(r"(?<!\\)[|<>`]", in_markdown(name)) is None
    plain, hostile = (render("comparison.html", name=one, count=0, **NOTHING) for one in ("x", name))
    before, after = plain.split("Comparison (x)")
    inside = hostile.removeprefix(before).removesuffix(after)
    assert inside.startswith("Comparison (") and not set(inside) & set("<>\"'\n\u202e")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+x", "'+x"),
        ("-x", "'-x"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "\\t=1"),
        ("\r=1", "\\r=1"),
        ("-1.5", "-1.5"),
        ("+2e-3", "+2e-3"),
        ("a=b", "a=b"),
    ],
)
def test_a_spreadsheet_runs_no_cell(text: str, written: str) -> None:
    table = Table([Column("=a"), Column("x", 2), Column("y", 2, name="n")], [[text, -1.5, Stat(-1.0, -2.0, 3.0)]])
    assert [*csv.reader(io.StringIO(comma_separated(table)))] == [
        ["'=a", "x", "n", "n_low", "n_high"],
        [written, "-1.5", "-1.0", "-2.0", "3.0"],
    ]


def test_hidden_characters_are_shown() -> None:
    assert shown("a\u202eb\nc\x00") == "a\\u202eb\\nc\\u0000"
    assert shown("🦀 über 漢字 עברית 👩‍🔬") == "🦀 über 漢字 עברית 👩‍🔬"
    assert shown("a\nb", keep="\n") == "a\nb"


def test_lists_of_names() -> None:
    assert listed(["a"]) == "a" and listed(["a", "b"]) == "a and b" and listed(["a", "b", "c"]) == "a, b and c"
    assert listed(["a", "b", "c", "d"]) == "a, b and 2 more"
