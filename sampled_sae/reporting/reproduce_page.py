"""The front page of a reproduction: state of the stages, links to the results, and the paper's tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sampled_sae.config import read_file
from sampled_sae.evals import registry
from sampled_sae.reporting.pages import render
from sampled_sae.reporting.tables import Missing
from sampled_sae.reporting.write import Written
from sampled_sae.utils.files import write_text
from sampled_sae.utils.measures import Table
from sampled_sae.utils.progress import clock

PAGES = {"SAE sweep": "report/index.html", "synthetic experiment": "synthetic/index.html"}


def paths() -> dict[str, str]:
    """Where the results of each stage are."""
    evals = dict.fromkeys(registry(), "evals/table.csv")
    return {"synthetic": "synthetic/index.html", "train": "train", **evals} | {
        "compare": "compare/pairs.csv",
        "report": "report/index.html",
    }


def write_front(out: Path, written: Written) -> Path:
    """Write `out`/index.html from reproduce.json and the tables of the report."""
    record = read_file(out / "reproduce.json", "reproduce")
    settings = record.get("settings") or {}
    text = render(
        "reproduce.html",
        title="Reproduction of the paper",
        scale=record.get("scale"),
        about=f"{settings.get('model')}, layer {settings.get('layer')}, {settings.get('text')}",
        pages=[(name, path) for name, path in PAGES.items() if (out / path).exists()],
        stages=[*_stages(record.get("stages") or {}, out)],
        tables=[table for table in written.paper_tables if isinstance(table, Table)],
        missing=[table for table in written.paper_tables if isinstance(table, Missing)],
        settings=settings,
    )
    write_text(out / "index.html", text)
    return out / "index.html"


def _stages(entries: dict[str, Any], out: Path) -> Iterator[dict[str, str]]:
    """Name, state and time of each stage, and the path of its results; empty where there are none."""
    for name, path in paths().items():
        entry = entries.get(name)
        time = "-" if entry is None else clock(entry.get("seconds") or 0.0)
        state = "not run" if entry is None else "finished" if entry.get("finished") else "not finished"
        if name == "report":
            state, time = "this page", "-"
        there = state != "not run" and (out / path).exists()
        yield {"name": name, "state": state, "time": time, "path": path if there else ""}
