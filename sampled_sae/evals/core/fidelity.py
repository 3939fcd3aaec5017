"""How near the reconstruction of each token comes, and how often each latent fires, by the SAE's threshold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.bootstrap import Estimate, estimate, ratio, weights
from sampled_sae.method.codes import SparseCodes
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.pools import group_at
from sampled_sae.sae import SAE
from sampled_sae.training.heldout import LAST, STEPS, training_time_codes

ROUNDING = 1e-12
"""A variance below this share of the squared norm is what float32 makes of equal numbers."""
DENSE = 0.02
"""Share of the codes from which on one dense product decodes faster than a sum of single rows."""
GROUPS = 50
"""Groups of contexts for which firing is counted apart; intervals of densities draw whole groups."""
LOWEST, BINS_A_DECADE = -7, 4
"""The density histogram goes from 10^LOWEST to 1."""
LATENTS = 8192
"""Latents whose resampled densities are held at one time."""


class Fidelity(NamedTuple):
    """Over the measured tokens, or those of them without a high norm; each mean is of the same tokens."""

    tokens: int
    """How many there are."""
    fvu: Estimate
    """Fraction of variance unexplained: sum ||x - x_hat||^2 / sum ||x - mean||^2, the mean over all of them."""
    explained_variance_legacy: Estimate
    """SAEBench's: mean over tokens of 1 - ||x - x_hat||^2 / ||x - mean||^2, the mean over batches of contexts."""
    l0: Estimate
    """Mean active latents a token, by threshold."""
    cosine: Estimate
    """Mean cosine of x and x_hat; that of an x_hat of zeros is 0, an x of zeros does not count."""
    relative_norm: Estimate
    """Mean of ||x_hat|| / ||x||; an x of zeros does not count."""


class Density(NamedTuple):
    """How often latents fire, over some tokens; every share is one of all latents, dead ones too."""

    over_10_percent: Estimate
    """Share of the latents that fire on more than 10% of the tokens; its interval draws groups of contexts."""
    over_1_percent: Estimate
    """Share of the latents that fire on more than 1% of the tokens; its interval likewise."""
    alive: float
    """Share of the latents that fire at all. No interval: a resample holds fewer contexts and never finds more."""
    dead: int
    """Latents that never fire; the histogram leaves them out."""
    histogram: list[int]
    """Latents with a density in each bin; a bin holds its lower edge, the first all below and the last 1 as well."""
    log10_edges: list[float]
    """Edges of the bins, one more than there are bins."""


class Firing:
    """Counts on how many tokens each latent fires, for each of some groups of contexts."""

    def __init__(self, sae: SAE, contexts: int):
        self.groups = min(GROUPS, contexts)
        self.fired = torch.zeros(self.groups, sae.d_sae, dtype=torch.int32, device=sae.device)
        self.tokens = torch.zeros(self.groups, dtype=torch.long)

    def add(self, context: Tensor, latent: Tensor) -> None:
        """One more token of context [n] on which latent [n] fires."""
        place = context % self.groups * self.fired.shape[1] + latent
        self.fired.view(-1).scatter_add_(0, place, torch.ones_like(place, dtype=torch.int32))

    def add_tokens(self, contexts: Tensor, counts: Tensor) -> None:
        """`counts` [c] more tokens were seen of the contexts [c]."""
        self.tokens.index_add_(0, contexts % self.groups, counts)

    def density(self, resamples: int, level: float, seed: int) -> Density:
        drawn = torch.cat(list(weights(self.groups, resamples, seed))).to(self.fired.device)
        seen = (drawn @ self.tokens.to(drawn)).clamp_min(1)[:, None]
        over = {limit: drawn.new_zeros(len(drawn)) for limit in (0.1, 0.01)}
        for part in self.fired.split(LATENTS, dim=1):
            resampled = drawn @ part.to(drawn) / seen
            for limit in over:
                over[limit] += (resampled > limit).sum(1)
        m = self.fired.shape[1]
        share = {limit: estimate((count / m).cpu(), self.groups, level) for limit, count in over.items()}
        fired = self.fired.sum(0).cpu()
        alive = fired[fired > 0]
        counts, edges = histogram(alive.double() / int(self.tokens.sum()))
        return Density(share[0.1], share[0.01], len(alive) / m, m - len(alive), counts, edges)


def histogram(density: Tensor) -> tuple[list[int], list[float]]:
    """Densities [n] above 0 -> how many are in each bin, and the bins' edges as log10."""
    bins = -LOWEST * BINS_A_DECADE
    # The nearest float to a power of ten may lie on the wrong side of an edge.
    number = ((density.log10() - LOWEST) * BINS_A_DECADE + 1e-9).floor().long().clamp(0, bins - 1)
    return torch.bincount(number, minlength=bins).tolist(), [LOWEST + i / BINS_A_DECADE for i in range(bins + 1)]


def reconstruct(
    sae: SAE, x: Tensor, context: Tensor, counted: Sequence[tuple[Tensor, Firing]], at_once: int
) -> tuple[Tensor, Tensor]:
    """x [t, d] -> x_hat [t, d] and L0 [t], by threshold; each `Firing` counts what fires on its tokens [t] bool of each
    context [t]."""
    x_hat, l0 = [], []
    for start in range(0, len(x), at_once):
        rows = slice(start, start + at_once)
        dense = sae.encode(x[rows])
        codes = SparseCodes.from_dense(dense)
        token, latent = codes.token, codes.latent
        x_hat.append(sae.decode(dense if len(token) > DENSE * dense.numel() else codes))
        l0.append(torch.bincount(token, minlength=len(dense)))
        for tokens, firing in counted:
            chosen = tokens[rows][token]
            firing.add(context[rows][token][chosen], latent[chosen])
    return torch.cat(x_hat), torch.cat(l0)


def fidelity_sums(
    x: Tensor, x_hat: Tensor, l0: Tensor, chosen: Tensor, mean: Tensor, batch_means: Tensor
) -> dict[str, Tensor]:
    """Sums over the chosen [c, L] tokens of each context, by name: [c] float64.

    x, x_hat [c, L, d] in float64; l0 [c, L]; the overall mean [d] and the mean of each context's batch [c, d].
    """
    error = (x - x_hat).square().sum(2)
    energy, norm, norm_hat = x.square().sum(2), x.norm(dim=2), x_hat.norm(dim=2)
    around = (x - batch_means[:, None]).square().sum(2)
    spread, there = around > ROUNDING * energy, norm > 0
    product = norm * norm_hat
    values = {
        "tokens": torch.ones_like(error),
        "error": error,
        "variance": (x - mean).square().sum(2),
        "energy": energy,
        "l0": l0.double(),
        "legacy": torch.where(spread, 1 - error / around, 0.0),
        "legacy_tokens": spread.double(),
        "cosine": torch.where(product > 0, (x * x_hat).sum(2) / product, 0.0),
        "relative_norm": torch.where(there, norm_hat / norm, 0.0),
        "nonzero": there.double(),
    }
    return {name: torch.where(chosen, value, 0.0).sum(1) for name, value in values.items()}


def summarise(totals: Mapping[str, Tensor], contexts: int, level: float) -> Fidelity:
    """Totals [1 + resamples] of what `fidelity_sums` gives, by name -> the result."""
    values = {
        "fvu": unexplained(totals),
        "explained_variance_legacy": ratio(totals["legacy"], totals["legacy_tokens"]),
        "l0": ratio(totals["l0"], totals["tokens"]),
        "cosine": ratio(totals["cosine"], totals["nonzero"]),
        "relative_norm": ratio(totals["relative_norm"], totals["nonzero"]),
    }
    tokens = int(totals["tokens"][0])
    return Fidelity(tokens, **{name: estimate(value, contexts, level) for name, value in values.items()})


def unexplained(totals: Mapping[str, Tensor]) -> Tensor:
    """Totals of error, variance and energy -> FVU, nan where the tokens are all the same."""
    return ratio(totals["error"], totals["variance"], ROUNDING * totals["energy"])


MIXED = 8
"""Batches whose tokens are mixed: those of one context would share a cut otherwise, which training does not do."""


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
        codes = training_time_codes(sae, part.to(sae.dtype), self.config, self.generator)
        x_hat = sae.decode(codes)
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


def summarise_trained(totals: Mapping[str, Tensor], contexts: int, level: float) -> Trained:
    """Totals [1 + resamples] of a cut's sums, by name -> the result."""
    fvu, l0 = unexplained(totals), ratio(totals["l0"], totals["tokens"])
    return Trained(int(totals["tokens"][0]), estimate(fvu, contexts, level), estimate(l0, contexts, level))
