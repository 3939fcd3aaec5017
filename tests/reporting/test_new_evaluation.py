"""An evaluation that the report was not written for: found through the registry, shown like any other."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("plotly")

from sampled_sae.evals import EVALUATIONS, Evaluation
from sampled_sae.reporting.collect import collect
from sampled_sae.reporting.report_page import page
from sampled_sae.reporting.sweep import sweeps
from sampled_sae.reporting.tables import print_evals
from sampled_sae.reporting.write import write_report
from sampled_sae.utils.measures import Metric
from tests.reporting.made_up_sweep import grid, put, write_sweep
from tests.reporting.test_report_page import explorer
from tests.reporting.test_synthetic_page import Reader


@dataclass(frozen=True)
class ColorConfig:
    shades: int = 3


class Colors(Evaluation):
    name, title, note, config, order = "colors", "Colors & <shades>", "By eye.", ColorConfig, 1
    metrics = (
        Metric("hue", "Hue <deg>", "Mean hue.", "low", ("hue",), headline=True),
        Metric("chroma", "Chroma", "Mean chroma.", None, ("more", "chroma"), digits=1),
    )

    def run(self, *_: Any) -> Iterator[Any]:
        raise NotImplementedError


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(EVALUATIONS, "colors", Colors())
    write_sweep(tmp_path / "run")
    for i, config in enumerate(grid()):
        hue = {"value": 0.5 + i / 100, "low": 0.4, "high": 0.7}
        result = {"hue": hue, "more": {"chroma": {"mean": 7.25}}}
        put(tmp_path / "run" / "saes" / str(config.name) / "evals" / "colors.json", {"result": result, "asked": {}})
    return tmp_path


def test_it_is_on_the_page(swept: Path) -> None:
    found = collect([swept / "run"])
    text = page(found, sweeps(found))
    reader = Reader(text)
    assert sum(one == "Colors & <shades>" for one in reader.texts) == 3  # evaluations, all metrics, every SAE
    assert {"Hue <deg>", "Mean hue.", "Mean chroma."} <= set(reader.texts)
    assert {"s0-hue-0", "s0-chroma-0"} <= set(reader.figures)
    axes = explorer(text)["metrics"]["hue"]
    assert axes["better"] == "low" and axes["axis"] == "Hue &lt;deg&gt; (lower is better)"
    options = [attributes["value"] for tag, attributes in reader.tags if tag == "option"]
    assert options.count("hue") == 3  # both axes and the panels
    assert [tag for tag, attributes in reader.tags if attributes.get("label") == "Colors & <shades>"] == [
        "optgroup"
    ] * 2


def test_it_is_in_tables_and_the_terminal(swept: Path) -> None:
    written = write_report([swept / "run"], swept / "out", figures=False)
    tables = {path.name: path.read_text() for path in written.tables}
    assert tables["colors.md"].startswith("| SAE | Hue \\<deg\\> ↓ | Chroma |")
    assert "hue,hue_low,hue_high,chroma" in tables["colors.csv"] and "hue,chroma" in tables["saes.csv"]
    saes = sorted((swept / "run" / "saes").iterdir())[:2]
    text = io.StringIO()
    results = {sae.name: json.loads((sae / "evals" / "colors.json").read_text())["result"] for sae in saes}
    print_evals({"colors": results}, Console(file=text, width=100))
    assert "Hue <deg>" in text.getvalue() and "(0.400 to 0.700)" in text.getvalue() and "By eye." in text.getvalue()


def test_escape_sequences_do_not_reach_the_terminal(swept: Path) -> None:
    result = {"hue": 0.5, "not_evaluable": "why\x1b]0;x\x07"}
    text = io.StringIO()
    print_evals({"colors": {"a\x1b[31mb\x9b2J": result}}, Console(file=text, width=100))
    assert "a?[31mb?2J" in text.getvalue() and not set("\x1b\x07\x9b") & set(text.getvalue())
