"""What more seeds would decide: where the spread of a difference comes from, and how many seeds its margin takes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from sampled_sae.reporting.study import GOAL, METRICS, Results
from sampled_sae.utils.measures import Cell, Column, Table
from sampled_sae.utils.paired import POWER, Key, t_quantile

ONE_SIDED = 0.95  # level of "not worse"
MOST = 50  # seeds that are tried
FURTHER = ("probing_1", "probing_5")  # also measured on further datasets


class Spread(NamedTuple):
    """Variances of the differences of two methods: between seeds, between datasets or letters, and the rest."""

    seeds: float
    units: float
    rest: float
    size: int  # number of datasets or letters; 1 without any

    def se(self, seeds: float) -> float:
        """Standard error of the mean difference with so many seeds."""
        by_seed, by_unit = max(0.0, self.seeds) / seeds, max(0.0, self.units) / self.size
        return math.sqrt(by_seed + by_unit + self.rest / seeds / self.size)


def spread(first: Mapping[Key, float], second: Mapping[Key, float]) -> Spread | None:
    """Components of variance of the differences over (seed,) or (seed, source, unit), of units that each seed has.

    The usual estimates of a two-way layout without replicates; they can be negative. None with a single seed or unit.
    """
    by_unit: dict[Key, dict[int, float]] = {}
    for key in first.keys() & second.keys():
        by_unit.setdefault(key[1:], {})[key[0]] = first[key] - second[key]
    n = max(map(len, by_unit.values()), default=0)
    x = np.array([[own[seed] for seed in sorted(own)] for own in by_unit.values() if len(own) == n])
    if n < 2 or (len(x) < 2 and () not in by_unit):
        return None
    m, seeds = len(x), float(x.mean(0).var(ddof=1))
    if m == 1:
        return Spread(seeds, 0.0, 0.0, 1)
    left = x - x.mean(0) - x.mean(1, keepdims=True) + x.mean()
    rest = float((left**2).sum()) / ((n - 1) * (m - 1))
    return Spread(seeds - rest / m, float(x.mean(1).var(ddof=1)) - rest / n, rest, m)


def together(spreads: Iterable[Spread]) -> Spread:
    """The mean of each variance over several comparisons."""
    seeds, units, rest, sizes = zip(*spreads, strict=True)
    return Spread(statistics.fmean(seeds), statistics.fmean(units), statistics.fmean(rest), min(sizes))


def seeds_needed(spread: Spread, margin: float) -> int | None:
    """Seeds with which equal methods are "not worse" with a probability of 80%; None if `MOST` are too few."""
    for seeds in range(2, MOST + 1):
        df = min(seeds, spread.size if spread.size > 1 else seeds) - 1
        if (t_quantile(ONE_SIDED, df) + t_quantile(POWER, df)) * spread.se(seeds) <= margin:
            return seeds
    return None


def power_table(results: Results, setting: str, leaders: Sequence[str], baselines: Sequence[str]) -> Table:
    """A row per metric of the goal: standard error of a comparison by the number of seeds, and the seeds it takes."""
    titles = ("SE, 3 seeds", "5 seeds", "10 seeds", "any number", "margin")
    columns = [Column("metric"), Column("comparisons"), *(Column(title, 5) for title in titles), Column("seeds needed")]
    rows: list[list[Cell]] = []
    for name, measure in [*((metric, "") for metric in GOAL), *((metric, "finalists") for metric in FURTHER)]:
        metric, found, margins = METRICS[name], [], []
        for leader, baseline in product(leaders, baselines):
            own, other = (results.measured(setting, method, name, measure) for method in (leader, baseline))
            if (it := spread(own, other)) is not None:
                found.append(it)
                margins.append(metric.margin * (abs(statistics.fmean(other.values())) if metric.relative else 1))
        if found:
            whole, margin = together(found), statistics.fmean(margins)
            title = metric.title + (f", {whole.size} further datasets" if measure else "")
            errors = [whole.se(seeds) for seeds in (3, 5, 10, math.inf)]
            rows.append([title, len(found), *errors, margin, seeds_needed(whole, margin) or f"over {MOST}"])
    methods = f"one of {', '.join(leaders)} and one of {', '.join(baselines)}"
    note = (
        f"Standard error of the difference between {methods}, by the number of seeds. It follows from the variances "
        "between seeds, between datasets or letters (which more seeds do not reduce), and of the rest, each the mean "
        "over the comparisons. Seeds needed: for a verdict of not worse with a probability of 80%, if the methods are "
        "equal."
    )
    return Table(columns, rows, note=note)
