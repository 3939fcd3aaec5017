"""Many pairs of SAEs in a few numbers: agreement across seeds, and a table of MMCS across configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from sampled_sae.evals.similarity.groups import Group, Pair
from sampled_sae.evals.similarity.pair import BothWays, Compared

Facts = Sequence[tuple[Pair, Compared]]


class Spread(NamedTuple):
    """One number of several pairs."""

    pairs: int
    """Pairs that have it."""
    mean: float
    sd: float | None
    """Standard deviation over the pairs (which share SAEs, so it is no standard error); none for a single pair."""
    low: float
    high: float


class SeedAgreement(NamedTuple):
    """How alike the seeds of one configuration are; each pair counts with the mean of its two directions."""

    group: str
    seeds: list[int | None]
    mmcs: Spread | None
    """Over all latents; none where no pair has one."""
    random: float | None
    """The MMCS of random directions, mean over the same pairs."""
    live: Spread | None
    """Live latents with live ones; none if it is not known which those are."""
    live_random: float | None
    matched: Spread | None
    """Mean cosine of the one-to-one pairs."""
    shared: Spread | None
    """Share of the one-to-one pairs at the threshold or above."""


class Table(NamedTuple):
    """Configurations by configurations."""

    groups: list[str]
    """Labels of rows and columns."""
    mmcs: list[list[float | None]]
    """From the row's latents to the column's, mean over seeds; on the diagonal across seeds. None: not compared."""
    pairs: list[list[int]]
    """Pairs of SAEs behind each number."""


def across_seeds(groups: Sequence[Group], facts: Facts) -> list[SeedAgreement]:
    """The configurations of which several seeds were compared."""
    found = []
    for group in groups:
        own = [compared for pair, compared in facts if pair.kind == "seeds" and pair.group_a == group.label]
        if own:
            found.append(_agreement(group, own))
    return found


def _agreement(group: Group, own: list[Compared]) -> SeedAgreement:
    live = [item.live for item in own if item.live is not None]
    matched = [item.matching for item in own if item.matching is not None]
    everything, alive = spread([item.all.mean for item in own]), spread([item.mean for item in live])
    return SeedAgreement(
        group.label,
        [member.seed for member in group.members],
        everything,
        _mean([item.all.random for item in own]),
        alive,
        _mean([item.random for item in live]),
        spread([item.mean for item in matched]),
        spread([item.shared for item in matched]),
    )


def across_scores(groups: Sequence[Group], facts: Facts) -> dict[str, Table]:
    """The tables of all latents, of live ones where some pair knows them, and of random directions."""
    kinds: dict[str, Callable[[Compared], tuple[float | None, float | None]]] = {
        "all": lambda item: _mmcs(item.all),
        "live": lambda item: _mmcs(item.live),
        "random": lambda item: (item.all.a_to_b.random, item.all.b_to_a.random),
    }
    tables = {name: _table(groups, facts, both) for name, both in kinds.items()}
    return {name: table for name, table in tables.items() if any(any(row) for row in table.pairs)}


def _table(
    groups: Sequence[Group], facts: Facts, both: Callable[[Compared], tuple[float | None, float | None]]
) -> Table:
    labels = [group.label for group in groups]
    cells: dict[tuple[str, str], list[float]] = {}
    for pair, compared in facts:
        for place, value in zip(
            ((pair.group_a, pair.group_b), (pair.group_b, pair.group_a)), both(compared), strict=True
        ):
            if value is not None:
                cells.setdefault(place, []).append(value)
    # A pair of seeds gives two numbers, one each way, and is one pair all the same.
    counts = [[len(cells.get((a, b), ())) // (2 if a == b else 1) for b in labels] for a in labels]
    return Table(labels, [[_mean(cells.get((a, b), [])) for b in labels] for a in labels], counts)


def _mmcs(both: BothWays | None) -> tuple[float | None, float | None]:
    return (None, None) if both is None else (both.a_to_b.mmcs, both.b_to_a.mmcs)


def spread(values: Sequence[float | None]) -> Spread | None:
    """The numbers that there are; none where there is none."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return Spread(len(there), mean(there), stdev(there) if len(there) > 1 else None, min(there), max(there))


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return mean(there) if there else None
