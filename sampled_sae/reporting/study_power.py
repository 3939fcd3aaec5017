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
from sampled_sae.utils.paired import POWER, Key, t_quantile, t_share

ONE_SIDED = 0.95  # level of "not worse"
MOST = 50  # seeds that are tried
FURTHER = ("probing_1", "probing_5")  # also measured on further datasets


class Spread(NamedTuple):
    """Variances of the differences of two methods: between seeds, between sources or letters, and the rest."""

    seeds: float
    units: float
    rest: float
    size: int  # number of sources of datasets or of letters; 1 without any

    def se(self, seeds: float) -> float:
        """Standard error of the mean difference with so many seeds."""
        by_seed, by_unit = max(0.0, self.seeds) / seeds, max(0.0, self.units) / self.size
        return math.sqrt(by_seed + by_unit + self.rest / seeds / self.size)


def spread(first: Mapping[Key, float], second: Mapping[Key, float]) -> Spread | None:
    """Components of variance of the differences over (seed,) or (seed, source, unit), of units that each seed has.

    The usual estimates of a two-way layout without replicates; they can be negative. The units of a source count as
    one, because a verdict clusters by source. None with a single seed or source.
    """
    by_unit: dict[Key, dict[int, float]] = {}
    for key in (key for key in first if key in second):
        by_unit.setdefault(key[1:], {})[key[0]] = first[key] - second[key]
    n = max(map(len, by_unit.values()), default=0)
    complete = {unit: [own[seed] for seed in sorted(own)] for unit, own in by_unit.items() if len(own) == n}
    sources = dict.fromkeys(unit[:1] for unit in complete)
    if n < 2 or (len(sources) < 2 and () not in by_unit):
        return None
    x = np.array(list(complete.values()))
    # Sums of deviations, as in the standard error of `paired`: a source weighs as much as it has units.
    inside = np.array([[unit[:1] == source for unit in complete] for source in sources])
    x = x.mean() + len(sources) / len(x) * inside @ (x - x.mean())
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


def chance(spread: Spread, seeds: float, margin: float) -> float:
    """Probability that equal methods are "not worse" with so many seeds; `seeds` can be infinite."""
    if not (se := spread.se(seeds)):
        return 1.0
    df = int(min(seeds, spread.size if spread.size > 1 else seeds)) - 1
    return t_share(margin / se - t_quantile(ONE_SIDED, df), df)


def seeds_needed(spread: Spread, margin: float) -> int | None:
    """Seeds with which equal methods are "not worse" with a probability of 80%; None if `MOST` are too few."""
    return next((seeds for seeds in range(2, MOST + 1) if chance(spread, seeds, margin) >= POWER), None)


def power_table(results: Results, setting: str, leaders: Sequence[str], baselines: Sequence[str]) -> Table:
    """A row per metric of the goal: standard error of a comparison by the number of seeds, and the seeds it takes."""
    titles = ("SE, 3 seeds", "5 seeds", "any number", "margin")
    columns = [Column("metric"), *(Column(title, 5) for title in titles)]
    columns += [Column("seeds needed"), Column("highest probability", 2)]
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
            title = metric.title + (f", {len({key[1:] for key in own})} datasets" if measure else "")
            errors = [whole.se(seeds) for seeds in (3, 5, math.inf)]
            needed = seeds_needed(whole, margin) or f"over {MOST}"
            rows.append([title, *errors, margin, needed, chance(whole, math.inf, margin)])
    methods = f"a leader ({', '.join(leaders)}) and a baseline ({', '.join(baselines)})"
    note = (
        f"SE: standard error of the difference between {methods}, by the number of seeds. It follows from three "
        "variances, each averaged over the comparisons: between seeds, between sources of datasets or letters (which "
        "more seeds do not reduce), and the rest. Seeds needed: to find equal methods not worse with a probability of "
        "80%. Highest probability: of this verdict, with any number of seeds."
    )
    return Table(columns, rows, note=note)
