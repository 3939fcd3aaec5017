"""The paper's tables: numbers by hand, files that read back, and names for all that is missing."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampled_sae.reporting.collect import collect
from sampled_sae.reporting.comparison import compare_part
from sampled_sae.reporting.pages import page_rows, text_columns
from sampled_sae.reporting.paper_tables import compared, kind_of, paper_tables, title_of
from sampled_sae.reporting.sweep import sweeps
from sampled_sae.reporting.tables import Missing, files
from sampled_sae.reporting.write import write_report
from sampled_sae.utils.measures import Column, Table
from tests.reporting.made_up_compare import COMPARISON, pair, synthetic
from tests.reporting.made_up_sweep import grid, put, write_sweep

PAIRS: list[dict[str, Any]] = COMPARISON["pairs"]

EXPLAINED = [
    {"latent": 7, "explanation": "a_b & <c>", "scores": {"detection": 1.0, "balanced": 0.5, "fuzzing": 0.5}},
    {"latent": 3, "explanation": "second", "scores": {"detection": 1.0, "balanced": 0.7, "fuzzing": None}},
    {"latent": 5, "explanation": "third", "scores": {"detection": 0.5, "balanced": 1.0, "fuzzing": 1.0}},
    {"latent": 1, "explanation": None, "scores": {"detection": None, "balanced": None, "fuzzing": None}},
]


def by_name(tables: list[Table | Missing]) -> dict[str, Any]:
    return {table.name: table for table in tables}


def made(folder: Path, **more: Path) -> dict[str, Any]:
    found = collect([folder, *more.values()])
    swept = sweeps(found)
    return by_name(paper_tables(found, swept, [""] * len(swept)))


# ---- comparisons -------------------------------------------------------------------------------------


def test_mmcs_is_from_the_base_seed_to_the_others() -> None:
    table = by_name(compared(COMPARISON, ""))["paper-mmcs"]
    assert table.rows == [
        ["BatchTopK", pytest.approx(0.3), pytest.approx(0.02**0.5), 2, 0, 0.1],
        ["Entropy (l = 100)", 0.5, None, 1, 0, 0.1],
    ]
    assert not table.bold  # one pair of seeds: no winner


def test_mmcs_is_that_of_live_latents_where_they_are_known() -> None:
    live = {
        **COMPARISON,
        "pairs": [{**pair, "live": {"a_to_b": {"mmcs": 0.2}, "b_to_a": {"mmcs": 0.2}}} for pair in PAIRS],
    }
    live["seeds"] = [{**row, "live_random": 0.15} for row in COMPARISON["seeds"]]
    table = by_name(compared(live, ""))["paper-mmcs"]
    assert table.rows[1] == ["Entropy (l = 100)", 0.2, None, 1, 0, 0.15] and "Live latents" in table.note
    everything = by_name(compared({**live, "settings": {**COMPARISON["settings"], "latents": "all"}}, ""))["paper-mmcs"]
    assert everything.rows[1][1] == 0.5 and "dead ones included" in everything.note
    one_unknown = by_name(compared({**live, "pairs": [*live["pairs"][:-1], PAIRS[-1]]}, ""))["paper-mmcs"]
    assert one_unknown.rows == everything.rows


def test_mmcs_of_batchtopk_with_each_configuration() -> None:
    table = by_name(compared(COMPARISON, ""))["paper-mmcs-scores"]
    assert table.rows == [["Entropy (l = 100)", pytest.approx(0.75), 2], ["Entropy (l = 3)", 0.1, 1]]
    assert "same seed" in table.note
    pairs = [*COMPARISON["pairs"], pair("e1", "b0", "entropy-l100", "batchtopk", (0.1, 0.1))]
    other = by_name(compared(COMPARISON | {"pairs": pairs}, ""))["paper-mmcs-scores"]
    assert "same seed" not in other.note


def test_unique_features_are_of_the_largest_pool_against_batchtopk() -> None:
    tables = by_name(compared(COMPARISON, "-2-x"))
    table = tables["paper-unique-entropy-2-x"]
    assert table.rows[:2] == [[0, "x", 9, "y", 0.0, -0.25, 0.5, 0.25], [1, "x", 9, "y", 0.01, -0.25, 0.5, 0.25]]
    assert table.columns[-1].title == "Nearest of all" and "Left out as not unique: 13 of 20" in table.note
    assert len(table.rows) == 5 and "l = 100, seed 0" in table.note and "20 here and 30 of BatchTopK" in table.note
    assert isinstance(tables["paper-unique-l2-2-x"], Missing)


def test_unique_features_where_each_has_an_equal_and_of_an_older_version() -> None:
    def table(**own: Any) -> Any:
        item = {"of": "e0", "against": "b0", "latents": 20, "others": 30, **own}
        pairs = [pair("e0", "b0", "entropy-l100", "batchtopk", (0.6, 0.8), [item])]
        return by_name(compared(COMPARISON | {"pairs": pairs}, ""))["paper-unique-entropy"]

    none = table(table=[], equals=20)
    assert none.rows == [] and "None is unique: for each of the 20, a latent of BatchTopK" in none.note
    assert all("None is unique" in files(none)[f"{none.name}.{end}"] for end in ("md", "tex"))
    old = table(table=[{"latent": 1, "overall": 0.1}])
    assert isinstance(old, Missing) and "compare again" in old.why


def test_a_page_says_what_is_not_unique_and_what_shares_start_values() -> None:
    scores = {"all": {"groups": ["a", "b"], "mmcs": [[1.0, 0.4], [0.3, None]]}}
    none = {"of": "x", "against": "<y>", "latents": 4, "others": 30, "equals": 4, "table": []}
    old = {"of": "old", "against": "older", "latents": 4, "table": [{"latent": 1, "overall": 0.1}]}
    pairs = [*COMPARISON["pairs"], {"unique": [none, old]}]
    page = compare_part(Path("c"), COMPARISON | {"scores": scores, "pairs": pairs}, 0)
    assert "off-diagonal: same seed, which share start values and so stay alike; diagonal: across seeds" in page
    assert page.count("nearest of all</th>") == 4 and page.count("Left out as not unique: 13 of 20") == 4
    assert "None is unique: for each of the 4, a latent of &lt;y&gt;" in page
    assert (
        "Tables of unique features left out (1): made by an older version" in page and "old against older" not in page
    )


@pytest.mark.parametrize("content", [{}, {"pairs": 3}, {"pairs": [None, {}], "saes": "x", "seeds": [{}, 5]}])
def test_a_comparison_that_says_nothing(content: dict[str, Any]) -> None:
    assert all(isinstance(table, Missing) for table in compared(content, ""))


def test_names_of_configurations() -> None:
    assert kind_of("squared_l2-l2.5") == kind_of("sampled:score=squared_l2,l=2.5") == ("squared_l2", 2.5) and kind_of(
        "batchtopk lr=3"
    ) == ("batchtopk", None)
    assert title_of("squared_l2-l2.5 k=4") == "Squared-l (l = 2.5, k=4)" and title_of("batchtopk") == "BatchTopK"
    assert title_of("released") == "released"


# ---- sweeps ------------------------------------------------------------------------------------------


def test_probing_shows_the_best_l_of_each_score(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    rows = sweeps(collect([tmp_path]))[0].rows
    table = made(tmp_path)["paper-probing"]
    mean = {row.label: sum(row.mean(("values", f"probing_{k}")) for k in (1, 2, 5, 10)) for row in rows}
    best_l2 = max(("sampled:score=l2,l=2", "sampled:score=l2,l=5"), key=lambda label: mean[label])
    shown = [row[1] for row in table.rows if row[0] == 1]
    assert shown == ["TopK", title_of(best_l2), shown[2], "released", "BatchTopK"]
    assert [row[0] for row in table.rows] == [k for k in (1, 2, 5, 10) for _ in shown]
    assert table.rules == {0, 5, 10, 15}
    (row,) = [row for row in rows if row.label == best_l2]
    assert table.rows[1][2:] == [row.mean(("values", "fvu")), row.mean(("values", "probing_1"))]
    for r, c in table.bold:
        of_k = [line[3] for line in table.rows if line[0] == table.rows[r][0]]
        assert c == 3 and round(table.rows[r][3], 4) == max(round(value, 4) for value in of_k)


def test_top_features_are_of_the_largest_pool(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    for name in ("l2-l2-s0", "l2-l5-s1", "l2-l5-s0"):
        path = tmp_path / "saes" / name / "evals" / "autointerp.json"
        content = json.loads(path.read_text())
        content["result"]["latents"] = EXPLAINED if name == "l2-l5-s0" else EXPLAINED[2:]
        path.write_text(json.dumps(content))
    tables = made(tmp_path)
    assert tables["paper-top-l2"].rows == [
        [1, 1.0, 3, "second", 5.0],
        [2, 1.0, 7, "a_b & <c>", 5.0],
        [3, 0.5, 5, "third", 5.0],
    ]
    assert "L2-norm (l = 5), seed 0" in tables["paper-top-l2"].note
    assert tables["paper-top-uniform"].why == "run sampled-sae eval --evals autointerp"
    assert tables["paper-top-entropy"].why == "no such SAE was trained"
    assert r"a\_b \& \textless{}c\textgreater{}" in files(tables["paper-top-l2"])["paper-top-l2.tex"]


def test_settings_are_those_of_the_files(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    rows = dict(made(tmp_path)["paper-training"].rows)
    assert rows["Base model"] == "tiny" and rows["Training tokens"] == "80" and rows["Learning rate"] == "0.001"
    assert rows["Candidate pool multiplier (l)"] == "2, 5" and rows["Seeds"] == "0, 1"
    assert rows["Dead after (tokens)"] == "10,000,000"
    assert rows["Gradient"] == "normalize" and rows["Input norm"] == "sqrt_d_in"


# ---- the synthetic experiment --------------------------------------------------------------------------


def test_the_synthetic_experiment(tmp_path: Path) -> None:
    write_sweep(tmp_path / "run")
    put(tmp_path / "synthetic" / "results.json", synthetic())
    # Its own SAEs lie below it, and are no sweep.
    shutil.copytree(tmp_path / "run" / "saes", tmp_path / "synthetic" / "saes")
    found = collect([tmp_path])
    assert len(found.synthetic) == 1 and len(found.saes) == len(grid())
    assert any("page of its own" in note for note in found.notes)
    tables = made(tmp_path)
    assert tables["paper-synthetic"].rows == [["LF", 3, 0.1, 1.0, 0.8012, None]]
    assert "Mutual coherence 0.0833" in tables["paper-synthetic"].note
    (row,) = tables["paper-synthetic-recovery"].rows
    assert row[0] == "A" and row[1] == 0.5 and 0.25 in row


def test_a_results_file_of_somebody_else_hides_nothing(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    put(tmp_path / "results.json", {"saes": 3})
    found = collect([tmp_path])
    assert not found.synthetic and len(found.saes) == len(grid())


# ---- files -------------------------------------------------------------------------------------------


def test_a_report_writes_what_it_can_and_names_the_rest(tmp_path: Path) -> None:
    write_sweep(tmp_path / "run")
    put(tmp_path / "compare" / "compare.json", COMPARISON)
    written = write_report([tmp_path / "run", tmp_path / "compare"], tmp_path / "out", figures=False)
    names = {path.name for path in written.paper}
    assert {path.name for path in (tmp_path / "out" / "tables").glob("paper-*")} == names
    assert {f"paper-mmcs.{end}" for end in ("md", "csv", "tex")} <= names
    missing = {table.name for table in written.paper_tables if isinstance(table, Missing)}
    assert {"paper-synthetic", "paper-unique-l2", "paper-top-batchtopk"} <= missing
    assert not {name.rsplit(".", 1)[0] for name in names} & missing
    again = write_report([tmp_path / "run"], tmp_path / "out", figures=False)
    assert not (tmp_path / "out" / "tables" / "paper-mmcs.md").exists()  # a table of before is taken away
    assert any(isinstance(table, Missing) and "compare.json" in table.why for table in again.paper_tables)


def test_two_models_do_not_share_a_table(tmp_path: Path) -> None:
    write_sweep(tmp_path / "a", layer=3)
    write_sweep(tmp_path / "b", layer=4)
    written = write_report([tmp_path], tmp_path / "out", figures=False)
    names = {path.name for path in written.paper}
    assert {"tiny-layer-3-paper-probing.md", "tiny-layer-4-paper-probing.md"} <= names


@given(
    st.lists(
        st.tuples(st.text(max_size=8), st.none() | st.floats(-1e3, 1e3), st.none() | st.integers(0, 9)), min_size=1
    )
)
def test_files_hold_the_table(rows: list[tuple[Any, ...]]) -> None:
    columns = [Column("a|b"), Column("x_1", 2), Column("n")]
    table = Table(columns, rows, "t", "Title & more", "Note.", frozenset({(0, 1)}))
    made = files(table)
    lines = made["t.md"].split("\n\n")[1].splitlines()
    assert len(lines) == 2 + len(rows)
    assert all(len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 4 for line in lines)
    body = made["t.tex"].split(r"\midrule")[1].split(r"\bottomrule")[0].strip().split("\n")
    assert len(body) == len(rows) and all(line.endswith(r"\\") for line in body)
    assert made["t.tex"].count(r"\begin{") == made["t.tex"].count(r"\end{") == 2
    back = list(csv.reader(io.StringIO(made["t.csv"])))
    assert back[0] == ["a|b", "x_1", "n"] and len(back) == 1 + len(rows)
    for line, row in zip(back[1:], rows, strict=True):
        assert line[1] == ("" if row[1] is None else repr(row[1])) and line[2] == (
            "" if row[2] is None else str(row[2])
        )


def test_on_a_page_text_stands_left_under_its_head() -> None:
    columns = [Column("k"), Column("Held-out name"), Column("x", 2), Column("Explanation", wide=True)]
    rows = [[1, "a<b", 0.5, None], [2, None, -1.0, "words"]]
    table = Table(columns, rows, "t", "T", "", frozenset({(1, 2)}), frozenset({0, 1}))
    assert text_columns(table) == {1, 3}
    first, second = page_rows(table)
    assert [(cell.text, cell.kind) for cell in first[1:]] == [("a<b", "left"), ("0.50", ""), ("-", "text")]
    assert [cell.kind for cell in second] == ["rule", "rule left", "best rule", "rule text"]
    assert second[2].text == "-1.00"
