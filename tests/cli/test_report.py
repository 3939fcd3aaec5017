"""`sampled-sae report` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("plotly")

from sampled_sae.cli import parse
from sampled_sae.cli.evaluate import Report
from sampled_sae.utils.errors import UserError
from tests.reporting.made_up_sweep import put, write_sweep


def test_flags_become_settings(tmp_path: Path) -> None:
    asked = parse(Report, ["a", "b", "--out", "c", "--layer", "3", "--no-figures"], "sampled-sae report")
    assert asked == Report((Path("a"), Path("b")), Path("c"), None, 3, False)


def test_it_says_what_it_made_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path / "run")
    bad = tmp_path / "run" / "saes" / "topk-s0" / "evals" / "core.json"
    put(bad, '{"result"')
    Report((tmp_path / "run",), tmp_path / "out", figures=False).run()
    said = capsys.readouterr()
    assert str(tmp_path / "out" / "index.html") in said.out and "14 SAEs" in said.out
    assert f"Tables: {tmp_path / 'out' / 'tables'} (16 files)" in said.out
    assert str(bad) in said.err and len(said.err.strip().splitlines()) == 1
    assert (tmp_path / "out" / "tables" / "core.tex").exists()


def test_several_models_get_files_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path / "a", model="Org/Model", layer=3, seeds=(0,))
    write_sweep(tmp_path / "b", model="Org/Model", layer=4, seeds=(0,))
    Report((tmp_path / "a", tmp_path / "b"), tmp_path / "out", figures=False).run()
    names = {path.name for path in (tmp_path / "out" / "tables").iterdir()}
    assert {"org-model-layer-3-core.md", "org-model-layer-4-core.md"} <= names
    assert "Org/Model, layer 3: 7 SAEs" in capsys.readouterr().out


def test_an_empty_folder_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no run, no SAE and no comparison"):
        Report((tmp_path / "empty",), tmp_path / "out").run()
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    write_sweep(tmp_path / "run", seeds=(0,))
    put(tmp_path / "file", "x")
    with pytest.raises(UserError, match="cannot write there"):
        Report((tmp_path / "run",), tmp_path / "file" / "out", figures=False).run()
