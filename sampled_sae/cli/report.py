"""`sampled-sae report`: from folders of runs to a page, tables and figures."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from sampled_sae.utils.errors import UserError


@dataclass(frozen=True)
class Report:
    """Make a page to explore a sweep, with its tables and figures, of what training and evaluations have left."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, of SAEs or of comparisons; what is inside them is found."""
    out: Path
    """Folder for index.html, tables and figures."""
    model: str | None = None
    """Only SAEs of this model."""
    layer: int | None = None
    """Only SAEs of this layer."""
    figures: bool = True
    """Write the figures as PNG and PDF files too, which takes kaleido and a Chrome or Chromium."""

    def run(self) -> None:
        if importlib.util.find_spec("plotly") is None:
            raise UserError("plotly is missing; pip install 'sampled-sae[report]'")
        from sampled_sae.reporting.paper_tables_format import Missing
        from sampled_sae.reporting.write import write_report
        from sampled_sae.utils.measures import shown

        written = write_report(self.folders, self.out, self.model, self.layer, self.figures)
        for note in [*written.notes, *(note for sweep in written.sweeps for note in sweep.notes)]:
            print(shown(note), file=sys.stderr)
        for sweep in written.sweeps:
            print(f"{sweep.title}: {len(sweep.saes)} SAEs, {len(sweep.metrics)} numbers of each")
        print(f"Page: {written.page}")
        for what, paths in (
            ("Tables", written.tables),
            ("Figures", written.figures),
            ("The paper's tables", written.paper),
        ):
            if paths:
                print(f"{what}: {paths[0].parent} ({len(paths)} files)")
        missing = [table for table in written.paper_tables if isinstance(table, Missing)]
        if missing:
            reasons = "; ".join(dict.fromkeys(shown(table.why) for table in missing))
            print(f"Of the paper's tables {len(missing)} are missing: {reasons}")
