"""`sampled-sae synthetic` and `sampled-sae merge`: the synthetic experiment."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from sampled_sae.data.synthetic import PRESETS, SyntheticConfig
from sampled_sae.method.scores import get_score, load_scores
from sampled_sae.utils.errors import UserError


@dataclass(frozen=True)
class Synthetic:
    """The paper's synthetic experiment: known features, a grid of SAEs, a table and a page."""

    out: Path
    """Folder for the results, the page, the SAEs, the log and the checkpoints."""
    preset: Literal["demo", "paper", "paper-table"] = "demo"
    """demo: minutes on a laptop; paper: the paper's words; paper-table: fresh samples, three seeds, for a GPU."""
    seeds: tuple[int, ...] | None = None
    """Seeds, instead of the preset's."""
    scores: tuple[str, ...] | None = None
    """Scores of the constant pools, instead of the preset's."""
    multipliers: tuple[float, ...] | None = None
    """Pool multipliers l, instead of the preset's."""
    steps: int | None = None
    """Optimiser steps, instead of the preset's."""
    data: Literal["l0-61", "p-20"] | None = None
    """Reading of the paper's numbers: expected L0 of 61.5 (p = .107 for frequent features), or p = .20."""
    buckets: Literal["equal", "random"] | None = None
    """Features in equal shares for each bucket, or each in a random one, instead of the preset's."""
    coefficients: Literal["signed", "non_negative"] | None = None
    """Coefficients of both signs, or their absolute values, instead of the preset's."""
    samples: int | None = None
    """Size of a fixed training set, instead of the preset's samples."""
    only: tuple[str, ...] | None = None
    """Labels of the SAEs to train, as the table prints them, out of the preset's grid."""
    resume: bool = False
    """Go on from the last checkpoint in `out`."""
    device: str | None = None
    """cpu, cuda and so on; the GPU if there is one by default."""
    load_scores: tuple[Path, ...] = ()
    """Python files that register scores of your own."""

    def run(self) -> None:
        from sampled_sae.experiments.synthetic import EXPERIMENTS, run

        need_extras()
        for script in self.load_scores:
            load_scores(script)
        if self.seeds == ():
            raise UserError("seeds: must name at least one")
        chosen = {
            name: getattr(self, name)
            for name in ("seeds", "scores", "multipliers", "steps", "samples", "only")
            if getattr(self, name) is not None
        }
        for score in chosen.get("scores", ()):
            get_score(score)
        experiment = replace(EXPERIMENTS[self.preset], **chosen, data=self._data(EXPERIMENTS[self.preset].data))
        results = run(self.preset, experiment, self.out, resume=self.resume, device=self.device)
        show_results(results, self.out)

    def _data(self, data: SyntheticConfig) -> SyntheticConfig:
        """The preset's data with what was asked for instead."""
        if self.data is not None:
            data = replace(data, p_low=PRESETS[self.data].p_low, p_high=PRESETS[self.data].p_high)
        return replace(data, buckets=self.buckets or data.buckets, coefficients=self.coefficients or data.coefficients)


@dataclass(frozen=True)
class Merge:
    """Put the results of several runs of the synthetic experiment (other seeds, other machines) together."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders with a results.json each."""
    out: Path
    """Folder for the merged results and their page."""

    def run(self) -> None:
        from sampled_sae.experiments.synthetic import merge

        need_extras()
        if not self.folders:
            raise UserError("folders: must name at least one folder with a results.json")
        show_results(merge(self.folders, self.out), self.out)


def need_extras() -> None:
    """Better to miss a package before the work than after it."""
    for name in ("scipy", "plotly"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{name} is missing; pip install 'sampled-sae[experiments]'")


def show_results(results: dict[str, Any], out: Path) -> None:
    """The table in the terminal and the path of the page."""
    from sampled_sae.reporting.synthetic import print_results, write_page

    page = write_page(out)
    print_results(results)
    print(f"\nPictures and all settings: {page}")
