"""`sampled-sae report`: from folders of runs to a page, tables and figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import tyro


@dataclass(frozen=True)
class Report:
    """Write a page that explores a sweep, with its tables and figures, from the files of training and evaluations."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, of SAEs or of comparisons; they are searched."""
    out: Path
    """Folder for index.html, tables and figures."""
    model: str | None = None
    """Only SAEs of this model."""
    layer: int | None = None
    """Only SAEs of this layer."""
    figures: bool = True
    """Write the figures as PNG and PDF files too, which takes kaleido and a Chrome or Chromium."""

    EXAMPLES: ClassVar[Sequence[str]] = (
        "runs/a --out report",
        "runs/a runs/b --out report --no-figures",
        "runs/layers --layer 12 --out report",
    )

    def run(self) -> None:
        from sampled_sae.api import report
        from sampled_sae.reporting.tables import Missing
        from sampled_sae.utils.measures import shown

        written = report(self.folders, self.out, model=self.model, layer=self.layer, figures=self.figures)
        for note in [*written.notes, *(note for sweep in written.sweeps for note in sweep.notes)]:
            print(shown(note), file=sys.stderr)
        for sweep in written.sweeps:
            print(f"{sweep.title}: {len(sweep.saes)} SAEs, {len(sweep.metrics)} metrics")
        print(f"Page: {written.page}")
        files = {"Tables": written.tables, "Figures": written.figures, "The paper's tables": written.paper}
        for what, paths in files.items():
            if paths:
                print(f"{what}: {paths[0].parent} ({len(paths)} files)")
        missing = [table for table in written.paper_tables if isinstance(table, Missing)]
        if missing:
            reasons = "; ".join(dict.fromkeys(shown(table.why) for table in missing))
            print(f"Of the paper's tables {len(missing)} are missing: {reasons}")
