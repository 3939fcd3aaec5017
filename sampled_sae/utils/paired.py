"""Paired differences: mean, standard error clustered by seed, dataset or letter, and what can be concluded from them.

A measurement is a number under a key, such as `(seed,)`, `(seed, letter)` or `(seed, source, dataset)`. Numbers of two
methods under the same key are a pair. Leading parts of the key say what the differences are clustered by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sampled_sae.utils.measures import Better

Key = tuple[Any, ...]
Verdict = Literal["better", "not worse", "worse", "undecided"]
LEVEL, POWER = 0.975, 0.80  # two-sided 5%, detected with a probability of 80%: 2.8 standard errors for many clusters


class Difference(NamedTuple):
    """Mean paired difference of two methods; positive where the first is better (or larger, if neither end is)."""

    mean: float
    se: float | None  # standard error; None where no kind of cluster has two
    clusters: tuple[int, ...]  # number of clusters of each kind, seeds first
    pairs: int

    @property
    def df(self) -> int:
        """Degrees of freedom: the smallest number of clusters above one, minus one; 0 without any."""
        return min((count for count in self.clusters if count > 1), default=1) - 1

    @property
    def detectable(self) -> float | None:
        """Minimum detectable difference."""
        return None if self.se is None else (t_quantile(LEVEL, self.df) + t_quantile(POWER, self.df)) * self.se

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of the mean."""
        if self.se is None:
            return None
        half = t_quantile(LEVEL, self.df) * self.se
        return self.mean - half, self.mean + half

    @property
    def p_value(self) -> float | None:
        """Two-sided p-value of a difference of 0; None with one cluster of any kind, such as a single seed."""
        if self.se is None or min(self.clusters) < 2:
            return None
        return _two_sided(abs(self.mean) / self.se, self.df) if self.se else float(self.mean == 0)

    def verdict(self, margin: float) -> Verdict:
        """What holds for the first method, if a loss below `margin` counts as none.

        Better or worse: beyond the minimum detectable difference. Not worse: neither, and the one-sided 95% interval
        excludes a loss of `margin`. A comparison with one cluster of any kind, such as a single seed, is undecided.
        """
        detectable = self.detectable
        if detectable is None or self.se is None or min(self.clusters) < 2:
            return "undecided"
        if self.mean and abs(self.mean) >= detectable:
            return "better" if self.mean > 0 else "worse"
        return "not worse" if self.mean - t_quantile(0.95, self.df) * self.se > -margin else "undecided"


def paired(
    first: Mapping[Key, float], second: Mapping[Key, float], *, clusters: int = 1, better: Better | None = "high"
) -> Difference | None:
    """The difference of two methods over the keys that both have; None without any.

    `clusters` is the number of leading parts of a key that are kinds of clusters, 1 or 2.
    """
    sign = -1 if better == "low" else 1
    keys = [key for key in first if key in second]
    if not keys:
        return None
    differences = [sign * (first[key] - second[key]) for key in keys]
    mean = math.fsum(differences) / len(keys)
    counts = tuple(len({key[kind] for key in keys}) for kind in range(clusters))
    residuals = [difference - mean for difference in differences]
    usable = [kind for kind, count in enumerate(counts) if count > 1]
    single = [_variance(residuals, [key[kind] for key in keys]) for kind in usable]
    variance = max(single, default=None)
    if variance is not None and len(single) == 2:
        variance = max(variance, sum(single) - _variance(residuals, [key[:2] for key in keys]))
    return Difference(mean, None if variance is None else math.sqrt(variance), counts, len(keys))


def _variance(residuals: Sequence[float], clusters: Sequence[Any]) -> float:
    """Variance of the mean, with the cluster of each residual, and with the factor G / (G - 1)."""
    sums: dict[Any, float] = {}
    for residual, cluster in zip(residuals, clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + residual
    return len(sums) / (len(sums) - 1) * math.fsum(total**2 for total in sums.values()) / len(residuals) ** 2


def leaders(measured: Sequence[Mapping[Key, float]], better: Better | None) -> list[int]:
    """Indices of the measurements with the best mean and of those that are not clearly worse, the best first.

    A single index is a clear winner. Without a better end, or with less than two measurements, there is none.
    """
    means = {index: math.fsum(values.values()) / len(values) for index, values in enumerate(measured) if values}
    if better is None or len(means) < 2:
        return []
    best = (max if better == "high" else min)(means, key=means.__getitem__)

    def ahead(index: int) -> bool:
        found = paired(measured[best], measured[index], better=better)
        return found is not None and found.verdict(0) == "better"

    return [best, *(index for index in means if index != best and not ahead(index))]


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted by Holm's method, in the given order."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def t_quantile(share: float, df: int) -> float:
    """The value below which a share from 0.5 to 1 of Student's t lies, by bisection."""
    low, high = 0.0, 1.0
    while t_share(high, df) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_share(middle, df) < share else (low, middle)
    return high


def t_share(t: float, df: int) -> float:
    """The share of Student's t that lies below a value."""
    tail = _two_sided(abs(t), df) / 2
    return tail if t < 0 else 1 - tail


def _two_sided(t: float, df: int) -> float:
    """P(|T| > t) for Student's t; a finite sum for whole degrees of freedom (Abramowitz and Stegun, 26.7.3)."""
    angle = math.atan(t / math.sqrt(df))
    square = math.cos(angle) ** 2
    odd = df % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for i in range(df // 2):
        total += term
        term *= square * (2 * i + 1 + odd) / (2 * i + 2 + odd)
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if odd else inside))  # rounding must not make it negative
