"""Two SAEs compared: the best cosine of each latent with any of the other's, and a one-to-one matching."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.similarity.matching import Directions, directions, match_rows, nearest, random_best
from sampled_sae.evals.similarity.members import Group, Member, Pair, SimilarityConfig

BINS = 100  # Bins of the histograms, from a cosine of -1 to 1
EDGES = [-1 + 2 * i / BINS for i in range(BINS + 1)]


class Dictionary(NamedTuple):
    """An SAE's decoder, ready to be compared."""

    name: str
    directions: Directions  # its rows, the live ones first where they are known
    live: int | None  # how many rows at the beginning are live ones; None if that is not known
    not_live: str | None  # why its live latents cannot be compared, if they cannot


class Agreement(NamedTuple):
    """The latents of one SAE, each with the nearest of the other."""

    latents: int  # latents that were asked
    mmcs: float | None  # mean over them of the largest cosine; none where one of the two has no latents
    shared: float | None  # share of them whose largest cosine is at the threshold or above
    random: float | None  # what the MMCS would be for random directions, as many as the other SAE has
    histogram: list[int]  # latents by their largest cosine, in 100 even bins from -1 to 1


class BothWays(NamedTuple):
    """MMCS is not symmetric: a rich dictionary holds what a poor one has, not the other way round."""

    a_to_b: Agreement
    b_to_a: Agreement
    mean: float | None  # of the two MMCS
    random: float | None  # of the two random ones


class Matching(NamedTuple):
    """One-to-one pairs of the largest total cosine."""

    pairs: int  # as many as the smaller SAE has latents
    mean: float | None  # mean cosine of the pairs
    shared: float | None  # share of them at the threshold or above
    method: str  # exact, or by candidates
    gap: float  # mean cosine per pair by which the best matching can be better at most; 0 where this one is the best
    histogram: list[int]  # pairs by cosine, in 100 even bins from -1 to 1


class Compared(NamedTuple):
    """Similarity of two SAEs by their decoders."""

    all: BothWays  # over all latents that have a direction
    live: BothWays | None  # live latents with live ones
    live_missing: str | None  # why there is no comparison of live ones
    matching: Matching | None
    matching_missing: str | None  # why there is no matching, though one was asked for


def dictionary(member: Member, device: torch.device | str = "cpu") -> Dictionary:
    """Read a member's decoder onto the device."""
    found, mask = directions(member.decoder().to(device), member.name), member.live.mask
    if mask is None:
        return Dictionary(member.name, found, None, member.live.source)
    alive = mask.to(found.latent.device)[found.latent]
    count = int(alive.sum())
    if 0 < count < len(alive):
        order = torch.cat([alive.nonzero()[:, 0], (~alive).nonzero()[:, 0]])
        found = Directions(found.rows[order], found.latent[order])
    return Dictionary(member.name, found, count, None if count else f"none of its {member.latents} latents is live")


@torch.no_grad()
def compare_pair(a: Dictionary, b: Dictionary, settings: SimilarityConfig) -> Compared:
    """MMCS over all latents and over the live ones in one pass; then a matching, if asked for."""
    rows, others = a.directions.rows, b.directions.rows
    missing = "; ".join(f"{one.name}: {one.not_live}" for one in (a, b) if one.not_live) or None
    # Rows are split where the live ones end, so that one pass over the four quarters gives both comparisons.
    cut = (len(rows), len(others)) if a.live is None or b.live is None else (a.live, b.live)
    quarters = [
        [nearest(part, other, settings.at_once) for other in (others[: cut[1]], others[cut[1] :])]
        for part in (rows[: cut[0]], rows[cut[0] :])
    ]
    best_rows = torch.cat([torch.maximum(left[0], right[0]) for left, right in quarters])
    best_columns = torch.cat([torch.maximum(up[1], low[1]) for up, low in zip(*quarters, strict=True)])
    live = None if missing else _both_ways(*quarters[0][0], rows.shape[1], settings.threshold)
    whole = _both_ways(best_rows, best_columns, rows.shape[1], settings.threshold)
    if settings.matching == "none" or (missing and settings.matching == "live"):
        return Compared(whole, live, missing, None, None if settings.matching == "none" else missing)
    if settings.matching == "live":
        rows, others = rows[: cut[0]], others[: cut[1]]
    if not len(rows) or not len(others):
        return Compared(whole, live, missing, None, "no latent of one of the two has a direction")
    found = match_rows(rows, others, settings)
    cosine = found.cosine[found.column >= 0].clamp(max=1)
    share = _mean(cosine >= settings.threshold)
    matching = Matching(found.pairs, _mean(cosine), share, found.method, found.gap, histogram(cosine))
    return Compared(whole, live, missing, matching, None)


def _both_ways(rows: Tensor, columns: Tensor, width: int, threshold: float) -> BothWays:
    """The largest cosines [m] of a's latents and [n] of b's, as numbers."""
    there, back = (
        Agreement(len(best), _mean(best), _mean(best >= threshold), random_best(width, others), histogram(best))
        if len(best) and others
        else Agreement(len(best), None, None, None, [0] * BINS)
        for best, others in ((rows.cpu(), len(columns)), (columns.cpu(), len(rows)))
    )
    return BothWays(there, back, _mean_of([there.mmcs, back.mmcs]), _mean_of([there.random, back.random]))


def histogram(cosine: Tensor) -> list[int]:
    """Cosines [n] -> how many are in each bin; a bin holds its lower edge, the last one 1 as well."""
    # The nearest float32 to an edge may lie below it.
    number = ((cosine.double() + 1) * (BINS / 2) + 1e-5).floor().long().clamp(0, BINS - 1)
    return torch.bincount(number.cpu(), minlength=BINS).tolist()


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


Facts = Sequence[tuple[Pair, Compared]]


class Spread(NamedTuple):
    """One number of several pairs."""

    pairs: int  # pairs that have it
    mean: float
    sd: float | None
    """Standard deviation over the pairs (which share SAEs, so it is no standard error); none for a single pair."""
    low: float
    high: float


class SeedAgreement(NamedTuple):
    """How alike the seeds of one configuration are; each pair counts with the mean of its two directions."""

    group: str
    seeds: list[int | None]
    mmcs: Spread | None  # over all latents; none where no pair has one
    random: float | None  # the MMCS of random directions, mean over the same pairs
    live: Spread | None  # live latents with live ones; none if it is not known which those are
    live_random: float | None
    matched: Spread | None  # mean cosine of the one-to-one pairs
    shared: Spread | None  # share of the one-to-one pairs at the threshold or above


class Table(NamedTuple):
    """Configurations by configurations."""

    groups: list[str]  # labels of rows and columns
    mmcs: list[list[float | None]]
    """From the row's latents to the column's, mean over seeds; on the diagonal across seeds. None: not compared."""
    pairs: list[list[int]]  # pairs of SAEs behind each number


def across_seeds(groups: Sequence[Group], facts: Facts) -> list[SeedAgreement]:
    """The configurations of which several seeds were compared."""
    found = []
    for group in groups:
        own = [compared for pair, compared in facts if pair.kind == "seeds" and pair.group_a == group.label]
        if not own:
            continue
        live = [item.live for item in own if item.live is not None]
        matched = [item.matching for item in own if item.matching is not None]
        agreement = SeedAgreement(
            group.label,
            [member.seed for member in group.members],
            spread([item.all.mean for item in own]),
            _mean_of([item.all.random for item in own]),
            spread([item.mean for item in live]),
            _mean_of([item.random for item in live]),
            spread([item.mean for item in matched]),
            spread([item.shared for item in matched]),
        )
        found.append(agreement)
    return found


def across_scores(groups: Sequence[Group], facts: Facts) -> dict[str, Table]:
    """The tables of all latents, of live ones where some pair knows them, and of random directions."""
    kinds: dict[str, Callable[[Compared], tuple[float | None, float | None]]] = {
        "all": lambda item: (item.all.a_to_b.mmcs, item.all.b_to_a.mmcs),
        "live": lambda item: (item.live.a_to_b.mmcs, item.live.b_to_a.mmcs) if item.live else (None, None),
        "random": lambda item: (item.all.a_to_b.random, item.all.b_to_a.random),
    }
    labels, tables = [group.label for group in groups], {}
    for name, both in kinds.items():
        cells: dict[tuple[str, str], list[float | None]] = defaultdict(list)
        for pair, compared in facts:
            there, back = both(compared)
            if there is not None and back is not None:
                cells[pair.group_a, pair.group_b].append(there)
                cells[pair.group_b, pair.group_a].append(back)
        # A pair of seeds gives two numbers, one each way, and is one pair all the same.
        counts = [[len(cells[a, b]) // (2 if a == b else 1) for b in labels] for a in labels]
        if any(map(any, counts)):
            tables[name] = Table(labels, [[_mean_of(cells[a, b]) for b in labels] for a in labels], counts)
    return tables


def spread(values: Sequence[float | None]) -> Spread | None:
    """The numbers that there are; none where there is none."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return Spread(len(there), mean(there), stdev(there) if len(there) > 1 else None, min(there), max(there))


def _mean_of(values: Sequence[float | None]) -> float | None:
    found = spread(values)
    return None if found is None else found.mean
