"""Training's own cut on held-out text: mixed batches of tokens, the pool and the budget of its last step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.candidates import PlainEncoder, candidates
from sampled_sae.codes import decode
from sampled_sae.config import SAEConfig
from sampled_sae.evals.bootstrap import Estimate, estimate, ratio
from sampled_sae.evals.core.fidelity import unexplained
from sampled_sae.evals.reconstruction import parameters
from sampled_sae.pool import group_at
from sampled_sae.sae import SAE
from sampled_sae.step import keep_largest

MIXED = 8
"""Batches whose tokens are mixed: those of one context would share a cut otherwise, which training does not do."""
LAST, STEPS = 10**9 - 1, 10**9
"""The last step of a training of any length."""


class Trained(NamedTuple):
    """By training's own cut: pool and budget shared by batches of tokens; the last incomplete batch is dropped."""

    tokens: int
    """How many were cut."""
    fvu: Estimate
    """Fraction of variance unexplained."""
    l0: Estimate
    """Mean active latents a token; k, unless the pool has fewer positive activations."""


class MixedBatches:
    """Tokens as they come -> batches of `size`, mixed in blocks; the same ones however many come at a time."""

    def __init__(self, size: int, seed: int):
        self.size = size
        self.generator = torch.Generator().manual_seed(seed)
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.waiting = 0
        self.any_given = False

    def add(self, x: Tensor, context: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """x [t, d] of contexts [t] -> batches [size, d] with their contexts [size], as far as blocks are full."""
        block = MIXED * self.size
        while len(x):
            room = block - self.waiting
            self.parts.append((x[:room], context[:room]))
            self.waiting += len(x[:room])
            x, context = x[room:], context[room:]
            if self.waiting == block:
                yield from self._give()

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches that are still whole; one that is not only if there was no other."""
        if self.waiting:
            yield from self._give()

    def _give(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, context = (torch.cat(parts) for parts in zip(*self.parts, strict=True))
        self.parts, self.waiting = [], 0
        order = torch.randperm(len(x), generator=self.generator).to(x.device)
        for rows in order.split(self.size):
            if len(rows) == self.size or not self.any_given:
                self.any_given = True
                yield x[rows], context[rows]


class TrainedCut:
    """One SAE's cut of one batch after the other, summed for each context."""

    def __init__(self, sae: SAE, config: SAEConfig, contexts: int, batch_size: int, seed: int):
        self.sae, self.config = sae, config
        self.group = group_at(config.pool.scope, batch_size, LAST, STEPS)
        self.generator = torch.Generator(sae.device).manual_seed(seed)
        names = ("tokens", "error", "variance", "energy", "l0")
        self.sums = {name: torch.zeros(contexts, dtype=torch.float64, device=sae.device) for name in names}

    def add(self, x: Tensor, context: Tensor, mean: Tensor) -> None:
        """x [b, d] of contexts [b]; the variance is that around the mean [d]."""
        # Only the one batch of a short text can be of another size; its groups must be whole all the same.
        whole = len(x) - len(x) % min(self.group, len(x))
        sae, part, context = self.sae, x[:whole].to(self.sae.device), context[:whole].to(self.sae.device)
        weights = parameters(sae)
        encoder = PlainEncoder(part.to(sae.dtype), weights)
        found = candidates(encoder, self.config, LAST, STEPS, self.generator)
        codes = keep_largest(found.z, self.config.k, found.group, sae.m, found.columns, self.config.cut)
        x_hat = decode(codes, weights.W_dec) + weights.b_dec
        exact = part.double()
        values = {
            "tokens": torch.ones(whole, dtype=torch.float64, device=sae.device),
            "error": (exact - x_hat.double()).square().sum(1),
            "variance": (exact - mean.to(exact)).square().sum(1),
            "energy": exact.square().sum(1),
            "l0": torch.bincount(codes.token, minlength=whole).double(),
        }
        for name, value in values.items():
            self.sums[name].index_add_(0, context, value)


def summarise(totals: Mapping[str, Tensor], contexts: int, level: float) -> Trained:
    """Totals [1 + resamples] of a cut's sums, by name -> the result."""
    fvu, l0 = unexplained(totals), ratio(totals["l0"], totals["tokens"])
    return Trained(int(totals["tokens"][0]), estimate(fvu, contexts, level), estimate(l0, contexts, level))
