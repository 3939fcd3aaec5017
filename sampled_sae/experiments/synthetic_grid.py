"""Which SAEs the synthetic experiment compares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sampled_sae import presets
from sampled_sae.config import SAEConfig
from sampled_sae.errors import UserError
from sampled_sae.pool_config import Fraction, PoolConfig

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
    cells = [
        replace(cell, config=replace(cell.config, optimizer=experiment.optimizer, auxk=experiment.auxk))
        for cell in family(experiment)
    ]
    if experiment.extended:
        cells += improved({cell.label: cell for cell in cells})
    if experiment.only is None:
        return cells
    for label in experiment.only:
        if label not in {cell.label for cell in cells}:
            raise UserError(f"only = {label!r}: not in this grid; its SAEs are {', '.join(c.label for c in cells)}")
    return [cell for cell in cells if cell.label in experiment.only]


def family(experiment: Experiment) -> list[Cell]:
    """The members that the experiment compares, in their default settings."""
    m, k = experiment.latents, experiment.k
    cells = [
        Cell("batchtopk", "BatchTopK", presets.batchtopk(m, k)),
        Cell("topk", "TopK", presets.topk(m, k)),
        Cell("topk", "TopK then BatchTopK", presets.topk_then_batchtopk(m, k)),
    ]
    for score in experiment.scores:
        for l in experiment.multipliers:
            cells.append(Cell(score, f"{score} l={l:g}", presets.sampled(m, k, score, l), l))
    half = PoolConfig("uniform", Fraction(0.5))
    return [
        *cells,
        Cell("uniform", "uniform 50%", SAEConfig(m, k, pool=half), m / k / 2),
        Cell("released", "uniform 50% released at 70%", presets.released(m, k, fraction=0.5)),
        Cell("released", "uniform 75% released at 70%", presets.released(m, k, fraction=0.75)),
        Cell("released", "l2 50% released at 70%", presets.released(m, k, score="l2", fraction=0.5)),
        Cell("annealed", "uniform annealed from 30%", presets.annealed(m, k, fraction=0.3)),
    ]


def improved(cells: dict[str, Cell]) -> list[Cell]:
    """The members that train well, with a higher learning rate and with dead latents revived early."""

    def faster(label: str, lr: float, dead_after: int | None = None) -> Cell:
        config = cells[label].config
        config = replace(config, optimizer=replace(config.optimizer, lr=lr))
        name = f"{label} lr={lr:g}"
        if dead_after is not None:
            config = replace(config, auxk=replace(config.auxk, dead_after=dead_after))
            name += f" dead after {dead_after // 1000}k"
        return replace(cells[label], label=name, config=config)

    half, three_quarters = "uniform 50% released at 70%", "uniform 75% released at 70%"
    return [
        faster("BatchTopK", 1e-3),
        faster(half, 1e-3),
        faster("BatchTopK", 3e-3),
        faster("TopK", 3e-3),
        faster(three_quarters, 3e-3),
        faster("BatchTopK", 3e-3, dead_after=400_000),
    ]
