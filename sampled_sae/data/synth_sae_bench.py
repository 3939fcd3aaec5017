"""SynthSAEBench's specification of synthetic activations: Zipf frequencies, a hierarchy, correlated firing.

Features are numbered by their frequency. The first ones form trees: roots, then their children level by level. A child
fires only together with its parent, and in proportion to it; of the children of one parent at most one fires. The other
features fire on their own. A Gaussian copula of low rank correlates all of them.

This follows the published specification (arXiv:2602.14687; the defaults are those of SynthSAEBench-16k) with random
draws of its own: it is not the published model itself, whose weights are on the Hugging Face hub.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sampled_sae.config import Config, Count, NonNegative, OpenShare, Positive, PositiveNumber, require
from sampled_sae.data.frames import coherence
from sampled_sae.data.stream import Endless
from sampled_sae.data.synthetic import Split, stream_seed
from sampled_sae.method.codes import SparseCodes

CHUNK = 512  # samples made at one time; more are slower on a CPU, where their noise [n, features] leaves the cache


@dataclass(frozen=True, slots=True)
class SynthSAEBenchConfig(Config):
    """Sizes and distributions; the defaults are those of SynthSAEBench-16k."""

    d: Positive = 768
    """Width of the activations."""
    features: Positive = 16_384
    """True features."""
    roots: Positive = 128
    """Trees."""
    branching: Positive = 4
    """Children of each feature that is not a leaf."""
    depth: Count = 3
    """Levels of children."""
    exponent: PositiveNumber = 0.5
    """Zipf exponent of the frequencies."""
    p_max: OpenShare = 0.4
    """Firing probability of the most frequent feature."""
    p_min: OpenShare = 5e-4
    """Firing probability of the rarest feature."""
    mean_first: PositiveNumber = 5.0
    """Mean magnitude of the most frequent feature."""
    mean_last: PositiveNumber = 4.0
    """Mean magnitude of the rarest feature; linear in between."""
    std_mean: NonNegative = 0.5
    """Mean of the normal distribution whose absolute values are the standard deviations of the magnitudes."""
    std_std: NonNegative = 0.5
    """Standard deviation of that distribution."""
    rank: Positive = 25
    """Rank of the correlations between features."""
    correlation: NonNegative = 0.1
    """Scale of the correlations: standard deviation of the entries of their factor."""
    bias: NonNegative = 0.5
    """Norm of a constant that is added to every sample."""
    orthogonalization: Count = 100
    """Adam steps at a rate of 3e-4 that make random directions more orthogonal."""
    seed: int = 42
    """Seed of the directions, magnitudes, correlations and samples."""

    def check(self) -> None:
        require(self.p_min < self.p_max, "p_min", self.p_min, f"must be below p_max = {self.p_max}")
        inside = sum(self.levels)
        require(inside <= self.features, "features", self.features, f"must be at least {inside}, the size of the trees")

    @property
    def levels(self) -> list[int]:
        """Features of each level of the trees, roots first."""
        return [self.roots * self.branching**level for level in range(self.depth + 1)]


class SynthSAEBench(Endless):
    """Samples of a `SynthSAEBenchConfig`, without end; the interface of `SyntheticData`.

    dictionary [features, d] unit rows; bucket [features] index into `names`; p [features] firing probabilities before
    the hierarchy has its effect; mean and std [features] of the magnitudes.
    """

    def __init__(self, config: SynthSAEBenchConfig, device: torch.device | str = "cpu") -> None:
        self.config, self.device = config, torch.device(device)
        n = config.features
        # Drawn on the CPU, so that they do not depend on the device.
        draw = torch.Generator().manual_seed(stream_seed(config.seed, "buckets", 0))
        self.dictionary = orthogonalized(
            torch.randn(n, config.d, generator=draw).to(self.device), config.orthogonalization
        )
        self.offset = config.bias * normalize(torch.randn(config.d, generator=draw), dim=0).to(self.device)
        self.std = (config.std_mean + config.std_std * torch.randn(n, generator=draw)).abs().to(self.device)
        self.mean = torch.linspace(config.mean_first, config.mean_last, n, device=self.device)
        factor = config.correlation * torch.randn(n, config.rank, generator=draw)
        shared = factor.square().sum(1, keepdim=True)
        self.factor = (factor * (0.99 / shared).sqrt().clamp(max=1)).to(self.device)
        self.own = (1 - self.factor.square().sum(1)).sqrt()
        self.p = self._probabilities().to(self.device)
        self.threshold = torch.special.ndtri(1 - self._compensated(self.p).double()).float()
        sizes = [*config.levels, n - sum(config.levels)]
        self.bucket = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(self.device)
        self.parent = self._parents().to(self.device)
        self.names = ("roots", *(f"depth {level}" for level in range(1, config.depth + 1)), "outside")

    @property
    def identity(self) -> dict[str, Any]:
        return {"synth_sae_bench": self.config.to_dict()}

    def _probabilities(self) -> Tensor:
        c = self.config
        zipf = torch.arange(1, c.features + 1).double() ** -c.exponent
        return (c.p_min + (c.p_max - c.p_min) * (zipf - zipf[-1]) / (zipf[0] - zipf[-1])).float()

    def _families(self) -> list[tuple[slice, slice]]:
        """For each level the positions of the parents and of their children, which are in the same order."""
        ends = [0]
        for size in self.config.levels:
            ends.append(ends[-1] + size)
        return [(slice(*ends[i : i + 2]), slice(*ends[i + 1 : i + 3])) for i in range(self.config.depth)]

    def _parents(self) -> Tensor:
        """[features] the parent of each feature; -1 for roots and for features outside of the trees."""
        found = torch.full((self.config.features,), -1)
        for parents, children in self._families():
            found[children] = torch.arange(parents.start, parents.stop).repeat_interleave(self.config.branching)
        return found

    def _compensated(self, p: Tensor) -> Tensor:
        """Probabilities that give children about their own frequency, given parents and exclusive siblings."""
        found = p.clone()
        for parents, children in self._families():
            parent, own = p[parents, None], p[children].view(-1, self.config.branching)
            others = own.sum(1, keepdim=True) - own
            found[children] = (own / parent * (1 + others / parent)).flatten()
        return found.clamp(max=1 - 1e-6)

    def codes(self, n: int, generator: torch.Generator) -> SparseCodes:
        """Coefficients of n samples, all positive; `latent` is the feature."""
        place: dict[str, Any] = {"generator": generator, "device": self.device}
        common = torch.randn((n, self.config.rank), **place) @ self.factor.T
        active = common.addcmul_(torch.randn(common.shape, **place), self.own) > self.threshold
        for parents, children in self._families():  # few are left, so that the rest need not be dense
            active[:, children].unflatten(1, (-1, self.config.branching)).logical_and_(active[:, parents, None])
        sample, feature = active.nonzero(as_tuple=True)
        value = torch.addcmul(self.mean[feature], torch.randn(len(feature), **place), self.std[feature]).relu_()
        parent = self.parent[feature]
        inside = (parent >= 0).nonzero()[:, 0]
        # Of several children of one parent that fire, a random one stays.
        family = sample[inside] * self.config.features + parent[inside]
        order = torch.rand(len(inside), **place) * (value[inside] > 0)
        names, number = family.unique(return_inverse=True)
        first = order.new_zeros(len(names)).scatter_reduce_(0, number, order, "amax")
        value[inside] *= order == first[number]
        # A child fires in proportion to its parent, which may itself be a child: level by level, roots first.
        key = sample * self.config.features + feature
        for _, level in self._families():
            at = ((feature >= level.start) & (feature < level.stop)).nonzero()[:, 0]
            wanted = sample[at] * self.config.features + parent[at]
            found = torch.searchsorted(key, wanted)
            there = key[found] == wanted  # a child follows its parent, so `found` is never past the end
            value[at] *= torch.where(there, value[found] / self.mean[parent[at]], 0.0)
        return SparseCodes(sample, feature, value, n, self.config.features).where(value > 0)

    def batch(self, index: int, size: int, split: Split = "train") -> Tensor:
        """Fresh samples number `index`; [size, d]. Decided by the config's seed and the arguments alone."""
        require(size >= 1, "size", size, "must be at least 1 sample")
        return torch.cat([x for x, _ in self.parts(index, size, split)])

    def parts(self, index: int, size: int, split: Split = "train") -> Iterator[tuple[Tensor, SparseCodes]]:
        """The same samples in chunks [n, d], each with its codes."""
        generator = torch.Generator(self.device).manual_seed(stream_seed(self.config.seed, split, index))
        for start in range(0, size, CHUNK):
            yield self._samples(min(CHUNK, size - start), generator)

    def fixed(self, n: int) -> Tensor:
        """A fixed data set of n samples; [n, d]."""
        generator = torch.Generator(self.device).manual_seed(stream_seed(self.config.seed, "fixed", 0))
        return torch.cat([self._samples(CHUNK, generator)[0] for _ in range(0, n, CHUNK)])[:n]

    def _samples(self, n: int, generator: torch.Generator) -> tuple[Tensor, SparseCodes]:
        codes = self.codes(n, generator)
        return codes.decode(self.dictionary).add_(self.offset), codes

    def statistics(self, n: int = 10_000) -> dict[str, Any]:
        """Statistics of n samples, as those of `SyntheticData`."""
        generator = torch.Generator(self.device).manual_seed(stream_seed(self.config.seed, "fixed", 0))
        fired, total, squares = (torch.zeros_like(self.p, dtype=torch.float64) for _ in range(3))
        for start in range(0, n, CHUNK):
            codes = self.codes(CHUNK, generator).dense()[: n - start].double()
            fired, total, squares = fired + (codes > 0).sum(0), total + codes.sum(0), squares + codes.square().sum(0)
        rows = []
        for index, name in enumerate(self.names):
            own = self.bucket == index
            count = max(1.0, float(fired[own].sum()))
            mean = float(total[own].sum()) / count
            std = math.sqrt(max(0.0, float(squares[own].sum()) / count - mean**2))
            facts = {"name": name, "features": int(own.sum()), "p": float(fired[own].mean()) / n if own.any() else None}
            sigma = float(self.mean[own].mean()) if own.any() else None
            rows.append(facts | {"sigma": sigma, "mean_activation": mean, "std_activation": std})
        l0 = float(fired.sum()) / n
        overall = {"samples": n, "coherence": coherence(self.dictionary), "expected_l0": None, "observed_l0": l0}
        return overall | {"noise_db": None, "buckets": rows}


def orthogonalized(rows: Tensor, steps: int, lr: float = 3e-4) -> Tensor:
    """Unit rows [n, d] after Adam steps that lower the squared cosines between different rows."""
    rows = torch.nn.Parameter(normalize(rows, dim=1))
    optimizer = torch.optim.Adam([rows], lr=lr)
    for _ in range(steps):
        with torch.no_grad():
            # A quarter of the gradient of the sum of squared products of different rows, without their n x n matrix,
            # plus n times the squared errors of the squared norms: without that term all rows would mostly shrink.
            squares = rows.square().sum(1, keepdim=True)
            rows.grad = rows @ (rows.T @ rows) - rows * squares + len(rows) * (squares - 1) * rows
        optimizer.step()
    return normalize(rows.detach(), dim=1)
