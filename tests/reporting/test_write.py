"""Figures for a paper."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

pytest.importorskip("plotly")

from sampled_sae.reporting import write as sweep_figures
from sampled_sae.reporting.collect import collect
from sampled_sae.reporting.palette import GROUPS
from sampled_sae.reporting.report_page import styles
from sampled_sae.reporting.sweep import sweeps
from sampled_sae.reporting.write import paper_figures, write_figures, write_report
from sampled_sae.utils.errors import UserError
from tests.reporting.made_up_sweep import grid, write_run, write_sweep

CHROME = any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome"))


def test_the_papers_figures_are_there(tmp_path: Path) -> None:
    sweep = sweeps(collect([write_sweep(tmp_path)]))[0]
    figures = dict(paper_figures(sweep, styles(sweep.rows)))
    for name in ("probing_5", "absorption", "autointerp_balanced"):
        assert {f"pareto-{name}-fvu", f"panels-{name}-fvu"} <= set(figures)
    assert {"panels-over_10_percent-fvu", "pareto-probing_5-absorption", "density", "training-churn"} <= set(figures)
    assert "pareto-over_10_percent-fvu" not in figures  # it has no better end
    for figure in figures.values():
        named = [trace.name for trace in figure.data if trace.showlegend is not False and trace.name]
        assert len(named) == len(set(named))
    bars = figures["pareto-probing_5-fvu"].data[1].error_y
    assert max(bars.array) > 0
    titles = [note.text for note in figures["panels-probing_5-fvu"].layout.annotations]
    assert titles == ["sampled:score=l2", "sampled:score=uniform", "other methods"]


def test_only_curves_of_a_run_without_evaluations(tmp_path: Path) -> None:
    sweep = sweeps(collect([write_run(tmp_path, grid(), finished=False)]))[0]
    assert {name for name, _ in paper_figures(sweep, styles(sweep.rows))} == {
        *("training-loss", "training-fve", "training-dead", "training-churn")
    }


def test_groups_differ_by_symbol_too() -> None:
    """Who cannot tell the colors apart has the symbols."""
    symbols = [style.symbol for style in GROUPS.values()]
    assert len(set(symbols)) == len(symbols)


@pytest.mark.skipif(importlib.util.find_spec("kaleido") is None or not CHROME, reason="needs kaleido and a Chrome")
def test_files_are_written(tmp_path: Path) -> None:
    sweep = sweeps(collect([write_sweep(tmp_path / "run", seeds=(0,))]))[0]
    first = next(paper_figures(sweep, styles(sweep.rows)))
    paths = write_figures([first], tmp_path / "figures")
    assert first[1].layout.paper_bgcolor == "white"  # readable on a dark page, too
    assert [path.suffix for path in paths] == [".png", ".pdf"]
    assert paths[0].read_bytes().startswith(b"\x89PNG") and paths[1].read_bytes().startswith(b"%PDF")


def test_without_kaleido_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "kaleido" else real(name))
    written = write_report([write_sweep(tmp_path / "run", seeds=(0,))], tmp_path / "out")
    assert written.figures == [] and not (tmp_path / "out" / "figures").exists()
    (note,) = written.notes
    assert "kaleido is missing; pip install" in note and written.page.exists()


def test_without_a_browser_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import plotly.io

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("\n\nKaleido requires Google Chrome to be installed.\n\nMore lines.")

    monkeypatch.setattr(plotly.io, "write_images", fails)
    monkeypatch.setattr(sweep_figures, "missing_for_figures", lambda: None)
    with pytest.raises(UserError, match=r"kaleido could not draw them \(Kaleido requires Google Chrome") as error:
        sweep = sweeps(collect([write_sweep(tmp_path / "run", seeds=(0,))]))[0]
        write_figures([next(paper_figures(sweep, styles(sweep.rows)))], tmp_path / "figures")
    assert "\n" not in str(error.value)
