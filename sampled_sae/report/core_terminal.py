"""The core evaluation's table in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

COLUMNS = {
    "FVU": ("normal", "fvu"),
    "FVU, all tokens": ("measured", "fvu"),
    "L0": ("normal", "l0"),
    "cosine": ("normal", "cosine"),
    "CE recovered": ("loss", "ce_recovered"),
    "KL recovered": ("loss", "kl_recovered"),
    "alive": ("density", "alive"),
    "over 10%": ("density", "over_10_percent"),
}


def print_core(results: dict[Path, dict[str, Any]], console: Console | None = None) -> None:
    """A row for each SAE: its folder's name, and each number with half the width of its interval."""
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("SAE", no_wrap=True)
    for title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for folder, content in results.items():
        cells = [form(_find(content["result"], path)) for path in COLUMNS.values()]
        table.add_row(Text(folder.name), *cells)
    console.print(table)
    console.print("By threshold, without tokens of high norm where it does not say all; 95% intervals over contexts.")


def _find(result: dict[str, Any], path: tuple[str, str]) -> Any:
    part = result.get(path[0])
    return None if part is None else part[path[1]]


def form(value: Any) -> str:
    """A number, or one with its interval, or a dash where there is none."""
    if isinstance(value, dict):
        number, low, high = value["value"], value["low"], value["high"]
        if number is None or low is None or high is None:
            return form(number)
        return f"{number:.3g} ± {(high - low) / 2:.1g}"
    return "-" if value is None else f"{value:.3g}"
