"""Reconstruction error and firing density, by the inference threshold and by training-time selection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.bootstrap import Estimate, estimate, ratio, weights
from sampled_sae.method.codes import SparseCodes
from sampled_sae.method.config import SAEConfig
from sampled_sae.sae import SAE
from sampled_sae.training.heldout import LAST, STEPS, training_time_codes

ROUNDING = 1e-12  # a variance below this fraction of the squared norm is rounding of equal numbers in float32
DENSE = 0.02  # fraction of nonzero codes above which a dense product decodes faster than a sum of rows
GROUPS = 50  # groups of contexts with separate firing counts; intervals of densities resample groups
LOWEST, BINS_A_DECADE = -7, 4  # the density histogram goes from 10^LOWEST to 1
LATENTS = 8192  # latents whose resampled densities are in memory at one time


class Fidelity(NamedTuple):
    """Over the measured tokens, or over those without a high norm."""

    tokens: int  # number of tokens
    fvu: Estimate  # fraction of variance unexplained: sum ||x - x_hat||^2 / sum ||x - mean||^2
    explained_variance_legacy: Estimate
    """SAEBench's: mean over tokens of 1 - ||x - x_hat||^2 / ||x - mean||^2, the mean over batches of contexts."""
    l0: Estimate  # mean active latents per token, by the inference threshold
    cosine: Estimate  # mean cosine of x and x_hat; 0 if x_hat is zero. Tokens with x = 0 do not count.
    relative_norm: Estimate  # mean of ||x_hat|| / ||x||. Tokens with x = 0 do not count.


class Density(NamedTuple):
    """Firing density over some tokens; fractions are of all latents, including dead ones."""

    over_10_percent: Estimate  # fraction of latents that fire on over 10% of the tokens; resamples groups of contexts
    over_1_percent: Estimate  # fraction of latents that fire on more than 1% of the tokens; its interval likewise
    alive: float  # fraction that fires at all; no interval, for a resample never has more live latents
    dead: int  # number of latents that never fire; they are not in the histogram
    histogram: list[int]  # latents per density bin; a bin includes its lower edge, the first all below, the last 1
    log10_edges: list[float]  # edges of the bins, one more than there are bins
    middle_firings: float | None = None  # fraction of all firings by latents that fire on 0.1% to 10% of the tokens


class Firing:
    """Number of tokens on which each latent fires, per group of contexts."""

    def __init__(self, sae: SAE, contexts: int):
        self.groups = min(GROUPS, contexts)
        self.fired = torch.zeros(self.groups, sae.d_sae, dtype=torch.int32, device=sae.device)
        self.tokens = torch.zeros(self.groups, dtype=torch.long)

    def add(self, context: Tensor, latent: Tensor) -> None:
        """Count one more token of context [n] on which latent [n] fires."""
        index = context % self.groups * self.fired.shape[1] + latent
        self.fired.view(-1).scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32))

    def add_tokens(self, contexts: Tensor, counts: Tensor) -> None:
        """Count `counts` [c] more tokens of the contexts [c]."""
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
        density = alive.double() / int(self.tokens.sum())
        middle = float(alive[(density >= 0.001) & (density <= 0.1)].sum() / alive.sum()) if len(alive) else None
        return Density(share[0.1], share[0.01], len(alive) / m, m - len(alive), *histogram(density), middle)


def histogram(density: Tensor) -> tuple[list[int], list[float]]:
    """Densities [n] above 0 -> number in each bin, and the bins' edges as log10."""
    bins = -LOWEST * BINS_A_DECADE
    # The nearest float to a power of ten may lie on the wrong side of an edge.
    number = ((density.log10() - LOWEST) * BINS_A_DECADE + 1e-9).floor().long().clamp(0, bins - 1)
    return torch.bincount(number, minlength=bins).tolist(), [LOWEST + i / BINS_A_DECADE for i in range(bins + 1)]


def reconstruct(
    sae: SAE, x: Tensor, context: Tensor, counted: Sequence[tuple[Tensor, Firing]], at_once: int
) -> tuple[Tensor, Tensor]:
    """x [t, d_in] of contexts [t] -> x_hat [t, d_in] and L0 [t], by the inference threshold.

    `counted`: each `Firing` counts the firings on its tokens [t] bool.
    """
    x_hat, l0 = [], []
    for start in range(0, len(x), at_once):
        rows = slice(start, start + at_once)
        dense = sae.encode(x[rows])
        codes = SparseCodes.from_dense(dense)
        x_hat.append(sae.decode(dense if len(codes.token) > DENSE * dense.numel() else codes, x[rows]))
        l0.append(torch.bincount(codes.token, minlength=len(dense)))
        for tokens, firing in counted:
            chosen = tokens[rows][codes.token]
            firing.add(context[rows][codes.token][chosen], codes.latent[chosen])
    return torch.cat(x_hat), torch.cat(l0)


def fidelity_sums(
    x: Tensor, x_hat: Tensor, l0: Tensor, chosen: Tensor, mean: Tensor, batch_means: Tensor
) -> dict[str, Tensor]:
    """Sums over the chosen [c, L] tokens of each context, by name: [c] float64.

    x, x_hat [c, L, d_in] in float64; l0 [c, L]; the overall mean [d_in] and the mean of each context's batch [c, d_in].
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


def summarize(totals: Mapping[str, Tensor], contexts: int, level: float) -> Fidelity:
    """Totals [1 + resamples] of the values of `fidelity_sums`, by name -> the result."""
    pairs = (("legacy", "legacy_tokens"), ("l0", "tokens"), ("cosine", "nonzero"), ("relative_norm", "nonzero"))
    values = [unexplained(totals), *(ratio(totals[top], totals[bottom]) for top, bottom in pairs)]
    return Fidelity(int(totals["tokens"][0]), *(estimate(value, contexts, level) for value in values))


def unexplained(totals: Mapping[str, Tensor]) -> Tensor:
    """Totals of error, variance and energy -> FVU; nan if all tokens are equal."""
    return ratio(totals["error"], totals["variance"], ROUNDING * totals["energy"])


MIXED = 8  # batches whose tokens are shuffled together: as in training, tokens of one context do not share a cut


class Trained(NamedTuple):
    """By training-time selection: pool and budget of whole batches of tokens; the last incomplete batch is dropped."""

    tokens: int  # number of tokens
    fvu: Estimate  # fraction of variance unexplained
    l0: Estimate  # mean active latents per token: k, unless the pool has fewer positive activations


class MixedBatches:
    """Tokens in order -> batches of `size`, shuffled in blocks; they do not depend on how tokens are added."""

    def __init__(self, size: int, seed: int):
        self.size = size
        self.generator = torch.Generator().manual_seed(seed)
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.waiting = 0
        self.any_given = False

    def add(self, x: Tensor, context: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """x [t, d_in] of contexts [t] -> batches [size, d_in] with their contexts [size], of full blocks."""
        block = MIXED * self.size
        while len(x):
            room = block - self.waiting
            self.parts.append((x[:room], context[:room]))
            self.waiting += len(x[:room])
            x, context = x[room:], context[room:]
            if self.waiting == block:
                yield from self._give()

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The remaining whole batches; an incomplete one only if there was no other."""
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
    """Training-time selection of one SAE, batch by batch, summed per context."""

    def __init__(self, sae: SAE, config: SAEConfig, contexts: int, batch_size: int, seed: int):
        self.sae, self.config = sae, config
        self.group = config.pool.scope.group_at(batch_size, LAST, STEPS)
        self.generator = torch.Generator(sae.device).manual_seed(seed)
        names = ("tokens", "error", "variance", "energy", "l0")
        self.sums = {name: torch.zeros(contexts, dtype=torch.float64, device=sae.device) for name in names}

    def add(self, x: Tensor, context: Tensor, mean: Tensor) -> None:
        """Add x [b, d_in] of contexts [b]; the variance is around the mean [d_in]."""
        # Only the single batch of a short text can have another size; its groups must be whole, too.
        whole = len(x) - len(x) % min(self.group, len(x))
        sae, part, context = self.sae, x[:whole].to(self.sae.device), context[:whole].to(self.sae.device)
        codes = training_time_codes(sae, part.to(sae.dtype), self.config, self.generator)
        exact, x_hat = part.double(), sae.decode(codes, part)
        values = {
            "tokens": torch.ones(whole, dtype=torch.float64, device=sae.device),
            "error": (exact - x_hat.double()).square().sum(1),
            "variance": (exact - mean.to(exact)).square().sum(1),
            "energy": exact.square().sum(1),
            "l0": torch.bincount(codes.token, minlength=whole).double(),
        }
        for name, value in values.items():
            self.sums[name].index_add_(0, context, value)


def summarize_trained(totals: Mapping[str, Tensor], contexts: int, level: float) -> Trained:
    """Totals [1 + resamples] of the sums of `TrainedCut`, by name -> the result."""
    fvu, l0 = unexplained(totals), ratio(totals["l0"], totals["tokens"])
    return Trained(int(totals["tokens"][0]), estimate(fvu, contexts, level), estimate(l0, contexts, level))
