"""Two SAEs compared: the best cosine of each latent with any of the other's, and a one-to-one matching."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.similarity.config import SimilarityConfig
from sampled_sae.evals.similarity.matching import match_rows
from sampled_sae.evals.similarity.members import Member
from sampled_sae.evals.similarity.random import random_best
from sampled_sae.evals.similarity.stream import Directions, directions, nearest

BINS = 100
"""Bins of the histograms, from a cosine of -1 to 1."""
EDGES = [-1 + 2 * i / BINS for i in range(BINS + 1)]


class Dictionary(NamedTuple):
    """An SAE's decoder, ready to be compared."""

    directions: Directions
    """Its rows, the live ones first where they are known."""
    live: int | None
    """How many rows at the beginning are live ones; none if it is not known."""
    zeros: int
    """Latents without a direction, left out: their rows are zeros."""


class Agreement(NamedTuple):
    """The latents of one SAE, each with the nearest of the other."""

    latents: int
    """Latents that were asked."""
    mmcs: float | None
    """Mean over them of the largest cosine; none where one of the two has no latents."""
    shared: float | None
    """Share of them whose largest cosine is at the threshold or above."""
    random: float | None
    """What the MMCS would be for random directions, as many as the other SAE has."""
    histogram: list[int]
    """Latents by their largest cosine, in 100 even bins from -1 to 1."""


class BothWays(NamedTuple):
    """MMCS is not symmetric: a rich dictionary holds what a poor one has, not the other way round."""

    a_to_b: Agreement
    b_to_a: Agreement
    mean: float | None
    """Of the two MMCS."""
    random: float | None
    """Of the two random ones."""


class Matching(NamedTuple):
    """One-to-one pairs of the largest total cosine."""

    pairs: int
    """As many as the smaller SAE has latents."""
    mean: float | None
    """Mean cosine of the pairs."""
    shared: float | None
    """Share of them at the threshold or above."""
    method: str
    """exact, or by candidates."""
    gap: float
    """Mean cosine a pair by which the best matching can be better at most; 0 where this one is the best."""
    histogram: list[int]
    """Pairs by cosine, in 100 even bins from -1 to 1."""


class Compared(NamedTuple):
    """What the decoders of two SAEs say."""

    all: BothWays
    """Over all latents that have a direction."""
    live: BothWays | None
    """Live latents with live ones."""
    live_missing: str | None
    """Why there is no comparison of live ones."""
    matching: Matching | None
    matching_missing: str | None
    """Why there is no matching, though one was asked for."""


def dictionary(member: Member, device: torch.device | str = "cpu") -> Dictionary:
    """Read a member's decoder onto the device."""
    found = directions(member.decoder().to(device), member.name)
    zeros, mask = member.latents - len(found.latent), member.live.mask
    if mask is None:
        return Dictionary(found, None, zeros)
    alive = mask.to(found.latent.device)[found.latent]
    count = int(alive.sum())
    if 0 < count < len(alive):
        order = torch.cat([alive.nonzero()[:, 0], (~alive).nonzero()[:, 0]])
        found = Directions(found.rows[order], found.latent[order])
    return Dictionary(found, count, zeros)


@torch.no_grad()
def compare_pair(a: Member, b: Member, first: Dictionary, second: Dictionary, settings: SimilarityConfig) -> Compared:
    """MMCS over all latents and over the live ones in one pass; then a matching, if asked for."""
    rows, others = first.directions.rows, second.directions.rows
    why = [f"{member.name}: {reason}" for member, own in ((a, first), (b, second)) if (reason := not_live(member, own))]
    missing = "; ".join(why) or None
    # Rows are split where the live ones end, so that one pass over the four quarters gives both comparisons.
    cut = (len(rows), len(others)) if first.live is None or second.live is None else (first.live, second.live)
    quarters = [
        [nearest(part, other, settings.at_once) for other in (others[: cut[1]], others[cut[1] :])]
        for part in (rows[: cut[0]], rows[cut[0] :])
    ]
    best_rows = torch.cat([torch.maximum(left[0], right[0]) for left, right in quarters])
    best_columns = torch.cat([torch.maximum(up[1], low[1]) for up, low in zip(*quarters, strict=True)])
    live = None if missing else _both_ways(*quarters[0][0], width=a.width, threshold=settings.threshold)
    whole = _both_ways(best_rows, best_columns, width=a.width, threshold=settings.threshold)
    return Compared(whole, live, missing, *_matching(rows, others, cut, missing, settings))


def _matching(
    rows: Tensor, others: Tensor, cut: tuple[int, int], missing: str | None, settings: SimilarityConfig
) -> tuple[Matching | None, str | None]:
    """The matching, or why there is none."""
    if settings.matching == "none":
        return None, None
    if settings.matching == "live":
        if missing:
            return None, missing
        rows, others = rows[: cut[0]], others[: cut[1]]
    if not len(rows) or not len(others):
        return None, "no latent of one of the two has a direction"
    found = match_rows(rows, others, settings)
    cosine = found.cosine[found.column >= 0].clamp(max=1)
    mean, shared = _mean(cosine), _mean(cosine >= settings.threshold)
    return Matching(found.pairs, mean, shared, found.method, found.gap, histogram(cosine)), None


def not_live(member: Member, own: Dictionary) -> str | None:
    """Why its live latents cannot be compared, if they cannot."""
    if own.live is None:
        return member.live.source
    return None if own.live else f"none of its {member.latents} latents is live"


def _both_ways(rows: Tensor, columns: Tensor, *, width: int, threshold: float) -> BothWays:
    there = _agreement(rows, len(columns), width, threshold)
    back = _agreement(columns, len(rows), width, threshold)
    return BothWays(there, back, _middle(there.mmcs, back.mmcs), _middle(there.random, back.random))


def _agreement(best: Tensor, others: int, width: int, threshold: float) -> Agreement:
    if not len(best) or not others:
        return Agreement(len(best), None, None, None, [0] * BINS)
    best = best.cpu()
    return Agreement(len(best), _mean(best), _mean(best >= threshold), random_best(width, others), histogram(best))


def histogram(cosine: Tensor) -> list[int]:
    """Cosines [n] -> how many are in each bin; a bin holds its lower edge, the last one 1 as well."""
    # The nearest float32 to an edge may lie below it.
    number = ((cosine.double() + 1) * (BINS / 2) + 1e-5).floor().long().clamp(0, BINS - 1)
    return torch.bincount(number.cpu(), minlength=BINS).tolist()


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def _middle(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else (first + second) / 2
