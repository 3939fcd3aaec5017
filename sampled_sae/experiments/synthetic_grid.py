"""Which SAEs the synthetic experiment compares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sampled_sae import presets
from sampled_sae.config import SAEConfig

if TYPE_CHECKING:
    from sampled_sae.experiments.synthetic import Experiment


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration of the grid, trained once for each seed."""

    group: str
    """Colour and panel in the pictures."""
    label: str
    """Name in tables."""
    config: SAEConfig
    l: float | None = None
    """The multiplier, for constant scored pools."""

    @property
    def name(self) -> str:
        """The label as a folder's name."""
        return self.label.replace(" ", "-").replace("=", "").replace("%", "pct").replace("/", "-")


def grid(experiment: Experiment) -> list[Cell]:
    """BatchTopK, TopK, the scores at several l, released and annealed pools; more if `extended`."""
    m, k = experiment.latents, experiment.k
    cells = [
        Cell("batchtopk", "BatchTopK", presets.batchtopk(m, k)),
        Cell("topk", "TopK", presets.topk(m, k)),
        Cell("topk", "TopK then BatchTopK", presets.topk_then_batchtopk(m, k)),
    ]
    for score in experiment.scores:
        for l in experiment.multipliers:
            cells.append(Cell(score, f"{score} l={l:g}", presets.sampled(m, k, score, l), l))
    cells += [
        Cell("released", "uniform 50% released at 70%", presets.released(m, k, fraction=0.5)),
        Cell("released", "uniform 75% released at 70%", presets.released(m, k, fraction=0.75)),
        Cell("released", "l2 50% released at 70%", presets.released(m, k, score="l2", fraction=0.5)),
        Cell("annealed", "uniform annealed from 30%", presets.annealed(m, k, fraction=0.3)),
    ]
    optimizer, auxk = experiment.optimizer, experiment.auxk
    cells = [replace(cell, config=replace(cell.config, optimizer=optimizer, auxk=auxk)) for cell in cells]
    return cells + (faster(cells, experiment) if experiment.extended else [])


def faster(cells: list[Cell], experiment: Experiment) -> list[Cell]:
    """The members that train well, at higher learning rates."""
    return [
        replace(
            cell,
            label=f"{cell.label} lr={lr:g}",
            config=replace(cell.config, optimizer=replace(cell.config.optimizer, lr=lr)),
        )
        for lr in (1e-3, 3e-3)
        for cell in cells
        if cell.group in ("batchtopk", "topk", "released", "annealed")
    ]
