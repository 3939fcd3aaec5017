"""Tables of evaluations in a terminal: intervals as they are, and nothing cut."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from sampled_sae.reporting.tables import form_value as form
from sampled_sae.reporting.tables import print_evals, safe
from sampled_sae.utils.measures import Value
from tests.reporting.made_up_sweep import write_sweep


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "-"),
        (Value(0.5, None, None), "0.5"),
        (Value(0.5, 0.4, 0.6), "0.5 ± 0.1"),
        (Value(0.5, 0.45, 0.57), "0.5 ± 0.06"),
        (Value(0.5, 0.45, 0.6), "0.5 (0.45 to 0.6)"),
        (Value(0.0, 0.0, 0.00146), "0 (0 to 0.00146)"),
        (Value(0.5, 0.52, 0.6), "0.5 (0.52 to 0.6)"),
        # The skew is only one of rounding, or lies in digits that are not written.
        (Value(0.1330, 0.1316, 0.1347), "0.133 ± 0.002"),
        (Value(0.13301, 0.13299, 0.13306), "0.133 ± 4e-05"),
        (Value(0.5, 0.5, 0.5), "0.5 ± 0"),
    ],
)
def test_an_interval_that_is_skewed_shows_its_ends(value: Value | None, written: str) -> None:
    assert form(value) == written


def test_a_space_that_does_not_break_is_a_space() -> None:
    assert safe("k\u00a0=\u00a01").plain == "k = 1"


@pytest.mark.parametrize("width", [60, 80, 160])
def test_no_number_is_cut(width: int, tmp_path: Path) -> None:
    saes = sorted((write_sweep(tmp_path) / "saes").iterdir())[:3]
    names = ("core", "autointerp")
    results = {
        name: {sae.name: json.loads((sae / "evals" / f"{name}.json").read_text())["result"] for sae in saes}
        for name in names
    }
    text = io.StringIO()
    print_evals(results, Console(file=text, width=width))
    lines = text.getvalue().splitlines()
    assert "…" not in text.getvalue() and max(map(len, lines)) <= width
    for head in ("FVU", "KL recovered", "Over 10%", "fuzzing"):
        assert any(head in line for line in lines)
    assert sum(line.startswith(saes[0].name) for line in lines) > (2 if width < 160 else 1)
    assert all(sae.name in text.getvalue() for sae in saes)


def test_tables_in_a_terminal_need_neither_plotly_nor_jinja2() -> None:
    code = (
        "import sys; sys.modules.update(plotly=None, jinja2=None, kaleido=None)\n"
        "from sampled_sae.reporting.comparison import print_comparison\n"
        "from sampled_sae.reporting.synthetic import print_results\n"
        "from sampled_sae.reporting.write import write_tables\n"
        "import sampled_sae.browser.write, sampled_sae.reporting.write\n"
    )
    # torch is imported first: it may use jinja2 itself.
    done = subprocess.run([sys.executable, "-c", f"import torch\n{code}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
