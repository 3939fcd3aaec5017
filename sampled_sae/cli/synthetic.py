"""`sampled-sae synthetic` and `sampled-sae merge`: the synthetic experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import tyro

VALUES = ("seeds", "scores", "multipliers", "steps", "samples", "only", "data", "buckets", "coefficients")
"""Flags that replace a value of the preset."""


@dataclass(frozen=True)
class Synthetic:
    """The paper's synthetic experiment: known features, a grid of SAEs, a table and a page."""

    out: Path
    """Folder for the results, the page, the SAEs, the log and the checkpoints."""
    preset: Literal["demo", "paper", "paper-table", "paper-table-p20", "paper-finite", "synthsaebench"] = "demo"
    """demo: minutes on a laptop; paper: as the paper states it; paper-table: fresh samples, three seeds, for a GPU;
    paper-table-p20: the same with p = 0.20 for frequent features; paper-finite: 10,000 samples and 65,536 latents;
    synthsaebench: data after the specification of SynthSAEBench-16k, 20M samples. Other flags replace its
    values."""
    seeds: tuple[int, ...] | None = None
    """Seeds; each SAE is trained once with each."""
    scores: tuple[str, ...] | None = None
    """Scores of the constant pools."""
    multipliers: tuple[float, ...] | None = None
    """Pool multipliers l."""
    steps: int | None = None
    """Optimizer steps."""
    data: Literal["l0-61", "p-20"] | None = None
    """Reading of the paper's numbers: expected L0 of 61.5 (p = 0.107 for frequent features), or p = 0.20."""
    buckets: Literal["equal", "random"] | None = None
    """Features in equal shares for each bucket, or each in a random one."""
    coefficients: Literal["signed", "non_negative"] | None = None
    """Coefficients of both signs, or their absolute values."""
    samples: int | None = None
    """Size of a fixed training set."""
    only: tuple[str, ...] | None = None
    """Labels of the SAEs to train, as the table prints them."""
    resume: bool = False
    """Continue from the last checkpoint in `out`."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the GPU, if there is one."""
    load_scores: tuple[Path, ...] = ()
    """Python files that register custom scores."""

    GROUPS: ClassVar[Mapping[str, Sequence[str]]] = {
        "Run": ("out", "preset", "steps", "resume", "device"),
        "SAEs": ("scores", "multipliers", "seeds", "only", "load_scores"),
        "Data": ("data", "buckets", "coefficients", "samples"),
    }
    EXAMPLES: ClassVar[Sequence[str]] = (
        "--out demo",
        "--preset paper-table --seeds 0 1 2 --out runs/table",
        "--preset demo --scores l2 entropy --multipliers 5 30 --steps 500 --out runs/small",
    )

    def run(self) -> None:
        from sampled_sae.experiments import synthetic
        from sampled_sae.method.scores import load_scores

        for script in self.load_scores:
            load_scores(script)
        experiment = synthetic.experiment(self.preset, **{name: getattr(self, name) for name in VALUES})
        results = synthetic.run(self.preset, experiment, self.out, resume=self.resume, device=self.device)
        synthetic.show(results, self.out)


@dataclass(frozen=True)
class Merge:
    """Merge the results of several runs of the synthetic experiment, of other seeds or machines."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders with a results.json each."""
    out: Path
    """Folder for the merged results and their page."""

    EXAMPLES: ClassVar[Sequence[str]] = (
        "runs/seed0 runs/seed1 --out runs/both",
        "runs/gpu runs/laptop --out runs/merged",
        "runs/part-* --out runs/all",
    )

    def run(self) -> None:
        from sampled_sae.experiments import synthetic

        synthetic.show(synthetic.merge(self.folders, self.out), self.out)
