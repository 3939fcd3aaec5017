"""Intervals by bootstrap: contexts are drawn with replacement, and each measure is taken again from their sums."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 2**24  # weights held at one time: 128 MiB


class Estimate(NamedTuple):
    """One number and its interval; none where it is not defined."""

    value: float | None  # over all contexts
    low: float | None  # lower end of the interval; none for a single context, or if some resample has no value
    high: float | None  # upper end


NOTHING = Estimate(None, None, None)


class Spread(NamedTuple):
    """A mean over letters or seeds."""

    mean: float
    std: float | None  # standard deviation (n - 1); None for a single value


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def weights(units: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """How often each unit is drawn: [r, units] float64 at a time, 1 + resamples rows in all.

    The first row is the whole sample, each unit once. The same seed gives the same draws, so intervals of two SAEs on
    the same contexts rest on the same resamples.
    """
    yield torch.ones(1, units, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    at_once = max(1, MOST // units)
    for first in range(0, resamples, at_once):
        rows = min(at_once, resamples - first)
        drawn = torch.randint(units, (rows, units), generator=generator)
        drawn += torch.arange(rows)[:, None] * units
        yield torch.bincount(drawn.view(-1), minlength=rows * units).view(rows, units).double()


def totals(sums: Mapping[str, Tensor], resamples: int, seed: int) -> dict[str, Tensor]:
    """Sums of each context, [n] by name -> totals [1 + resamples] by name, the first of the whole sample."""
    table = torch.stack([values.double().cpu() for values in sums.values()], dim=1)
    drawn = torch.cat([block @ table for block in weights(len(table), resamples, seed)])
    return dict(zip(sums, drawn.unbind(1), strict=True))


def ratio(top: Tensor, bottom: Tensor, least: Tensor | float = 0.0) -> Tensor:
    """top / bottom, nan where the size of bottom is not above `least`."""
    return torch.where(bottom.abs() > least, top / bottom, math.nan)


def estimate(values: Tensor, units: int, level: float) -> Estimate:
    """Values [1 + resamples], nan for undefined, of a sample of `units` -> the first and the interval of the rest."""
    value = float(values[0])
    if not math.isfinite(value):
        return NOTHING
    drawn = values[1:]
    if units < 2 or not len(drawn) or not bool(drawn.isfinite().all()):
        return Estimate(value, None, None)
    ends = drawn.new_tensor([(1 - level) / 2, (1 + level) / 2])
    low, high = torch.quantile(drawn, ends).tolist()
    return Estimate(value, low, high)
