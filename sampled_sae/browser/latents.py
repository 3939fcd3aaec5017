"""Where latents fire: contexts to show, histograms, top tokens, and latents that fire at the same tokens.

m is d_sae in the shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.reading import Firings

NONE = -1  # stands for a token or a latent that is not there
TOP = -1  # stands for the band of a context that is shown for its largest activation
LEAST = 3  # tokens that two latents must share: one shared token makes two rare latents perfectly correlated
PAIRS_AT_ONCE = 2**24  # pairs of firings held at one time
COUNTS_AT_ONCE = 2**24  # counts of pairs of latents held at one time
Tick = Callable[[int], None]  # called with the number of latents that were added


def starts_of_runs(*keys: Tensor) -> Tensor:
    """Where a run of equal keys [n] begins: [runs] positions, ascending."""
    new = torch.zeros(len(keys[0]), dtype=torch.bool)
    new[:1] = True
    for key in keys:
        new[1:] |= key[1:] != key[:-1]
    return new.nonzero().squeeze(1)


def largest_of_runs(starts: Tensor, key: Tensor) -> Tensor:
    """The position of the largest key [n] in each run, the first of equals: [runs]."""
    n = len(key)
    run = torch.repeat_interleave(torch.diff(starts, append=torch.tensor([n])))
    best = key[starts].scatter_reduce(0, run, key, "amax")
    position = torch.where(key == best[run], torch.arange(n), n)
    return torch.full((len(starts),), n).scatter_reduce(0, run, position, "amin")


def largest_of_groups(group: Tensor, key: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest keys [n] of each group [n]: by group, largest first, equals in their order."""
    order = key.sort(descending=True, stable=True).indices
    order = order[group[order].sort(stable=True).indices]
    return order[ranks_in_runs(group[order]) < count]


def ranks_in_runs(key: Tensor) -> Tensor:
    """How far each position is from the beginning of its run of equal keys [n]: [n]."""
    begin = starts_of_runs(key)
    return torch.arange(len(key)) - torch.repeat_interleave(begin, torch.diff(begin, append=torch.tensor([len(key)])))


def mixed(seed: int, *parts: Tensor) -> Tensor:
    """Numbers [n] that look random, but are the same for the same seed and parts [n]: int64."""
    state = torch.full_like(parts[0], seed, dtype=torch.int64)
    for part in parts:
        # splitmix64; products wrap around, shifts are made unsigned by a mask.
        state = (state ^ part) + -0x61C8864680B583EB
        state = (state ^ (state >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
        state = (state ^ (state >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
        state = state ^ (state >> 31 & 0x1FFFFFFFF)
    return state


class Windows(NamedTuple):
    """Contexts to show: by latent; first the top ones, the largest first, then those of each band, the highest first.

    A context is shown at most once for a latent.
    """

    latent: Tensor  # [w] int64
    band: Tensor  # [w] int64: from 0, the lowest part of the range; TOP for the top ones
    center: Tensor  # [w] int64: which firing it is shown for
    first: Tensor  # [w] int64: the latent's first firing in that context
    last: Tensor  # [w] int64: one after its last firing there


def pick_windows(firings: Firings, top: int, bands: int, each: int, seed: int = 0) -> Windows:
    """The contexts of the `top` largest activations, and `each` others drawn from each of the bands."""
    latent, value = firings.latent.long(), firings.value
    first = starts_of_runs(firings.latent, firings.position // firings.shape[1])
    last = torch.cat((first[1:], torch.tensor([len(latent)])))
    peak = largest_of_runs(first, value)
    best = largest_of_groups(latent[peak], value[peak], top)
    rest = torch.ones(len(first), dtype=torch.bool)
    rest[best] = False
    # One firing of each context, whichever it is, stands for it among the draws.
    lot = mixed(seed, latent, firings.position.long())
    drawn = largest_of_runs(first, lot)
    others = rest.nonzero().squeeze(1)
    band = band_of(value[drawn], firings.maximum[latent[drawn]], bands)
    group = latent[drawn] * bands + (bands - 1 - band)
    others = others[largest_of_groups(group[others], lot[drawn][others], each)]
    run = torch.cat((best, others))
    center = torch.cat((peak[best], drawn[others]))
    kind = torch.cat((torch.full((len(best),), TOP), band[others]))
    order = latent[center].sort(stable=True).indices
    run, center = run[order], center[order]
    return Windows(latent[center], kind[order], center, first[run], last[run])


def band_of(value: Tensor, maximum: Tensor, bands: int) -> Tensor:
    """Activations [n] and the largest of their latents [n] -> in which of the equal parts of the range they are [n]."""
    return (value.double() / maximum.double() * bands).long().clamp_(0, bands - 1)


class TopTokens(NamedTuple):
    """The tokens that hold most of each latent's activation, most first."""

    token: Tensor  # [m, c] int64; NONE where there are fewer
    share: Tensor  # [m, c]: of the sum of the latent's activations


def histogram(firings: Firings, bins: int) -> Tensor:
    """[m, bins] int64: firings of each latent in equal bins from 0 to its largest activation."""
    latent = firings.latent.long()
    number = latent * bins + band_of(firings.value, firings.maximum[latent], bins)
    return torch.bincount(number, minlength=firings.d_sae * bins).view(firings.d_sae, bins)


def top_tokens(firings: Firings, contexts: Tensor, count: int) -> TopTokens:
    """The `count` tokens of each latent at which its activations in the contexts [n, L] add up to most."""
    text = contexts.flatten().long()
    width = int(text.max()) + 1
    both, order = (firings.latent.long() * width + text[firings.position.long()]).sort()
    begin = starts_of_runs(both)
    run = torch.repeat_interleave(torch.diff(begin, append=torch.tensor([len(both)])))
    total = torch.bincount(run, weights=firings.value[order].double(), minlength=len(begin))
    latent, token = both[begin] // width, both[begin] % width
    chosen = largest_of_groups(latent, total, count)
    owner = latent[chosen]
    rank = ranks_in_runs(owner)
    whole = torch.bincount(latent, weights=total, minlength=firings.d_sae)
    tokens = torch.full((firings.d_sae, count), NONE)
    shares = torch.zeros(firings.d_sae, count)
    tokens[owner, rank] = token[chosen]
    shares[owner, rank] = (total[chosen] / whole[owner]).float()
    return TopTokens(tokens, shares)


# ---- latents that fire together ---------------------------------------------------------------------
# Of one SAE, at single tokens of a text, and of two SAEs in the same context.


class Together(NamedTuple):
    """The latents whose firing is most correlated with each latent's, most first."""

    latent: Tensor  # [m, c] int64; NONE where there are fewer
    correlation: Tensor  # [m, c]: of the indicators of firing (phi); nan where there is none
    tokens: Tensor  # [m, c] int64: tokens at which both fire; 0 where there is none


def coactivating(firings: Firings, tokens: int, count: int, tick: Tick = lambda added: None) -> Together:
    """For each latent the `count` others of the highest positive correlation over the `tokens` that were read."""
    m, fired = firings.d_sae, firings.fired
    found = Together(torch.full((m, count), NONE), torch.full((m, count), torch.nan), torch.zeros(m, count).long())
    position, order = firings.position.long().sort(stable=True)
    others = firings.latent[order].long()
    begin = torch.searchsorted(position, torch.arange(firings.shape[0] * firings.shape[1] + 1))
    pairs = begin.diff()[firings.position.long()]  # of each firing with all at its token, itself included
    until = torch.cat((torch.zeros(1, dtype=torch.int64), pairs.cumsum(0)))[firings.start]  # [m + 1]
    first = 0
    while first < m and count:
        most = int(torch.searchsorted(until, until[first] + PAIRS_AT_ONCE, right=True)) - 1
        last = max(first + 1, min(m, most, first + COUNTS_AT_ONCE // m))
        inside = slice(int(firings.start[first]), int(firings.start[last]))
        size = pairs[inside]
        ends = size.cumsum(0)
        shift = begin[firings.position[inside].long()] - ends + size
        own = torch.repeat_interleave(firings.latent[inside].long() - first, size)
        at = torch.repeat_interleave(shift, size) + torch.arange(len(own))
        both = torch.bincount(own * m + others[at], minlength=(last - first) * m)
        key = (both >= LEAST).nonzero().squeeze(1)
        a, b = key // m + first, key % m
        _keep(found, a[a != b], b[a != b], both[key][a != b], fired, tokens, count)
        tick(last - first)
        first = last
    return found


def _keep(found: Together, a: Tensor, b: Tensor, both: Tensor, fired: Tensor, tokens: int, count: int) -> None:
    """Enter the most correlated of these pairs of latents a, b [p] that fire together at `both` [p] tokens."""
    of_a, of_b = fired[a].double(), fired[b].double()
    spread = (of_a * (tokens - of_a) * of_b * (tokens - of_b)).sqrt()
    phi = (tokens * both.double() - of_a * of_b) / spread.clamp_min(1e-9)
    up = phi > 0
    a, b, both, phi = a[up], b[up], both[up], phi[up]
    chosen = largest_of_groups(a, phi, count)
    rank = ranks_in_runs(a[chosen])
    found.latent[a[chosen], rank] = b[chosen]
    found.correlation[a[chosen], rank] = phi[chosen].float()
    found.tokens[a[chosen], rank] = both[chosen]


class TokenLatents(NamedTuple):
    """The latents of the largest activations at each token of some contexts, largest first."""

    latent: Tensor  # [n, L, c] int64; NONE where there are fewer
    value: Tensor  # [n, L, c]; 0 where there is none


def token_latents(firings: Firings, contexts: int, count: int) -> TokenLatents:
    """The `count` latents of the largest activations at each token of the first contexts."""
    n, length = min(contexts, firings.shape[0]), firings.shape[1]
    inside = (firings.position < n * length).nonzero().squeeze(1)
    position, value = firings.position[inside].long(), firings.value[inside]
    chosen = largest_of_groups(position, value, count)
    rank = ranks_in_runs(position[chosen])
    latent, values = torch.full((n * length, count), NONE), torch.zeros(n * length, count)
    latent[position[chosen], rank] = firings.latent[inside][chosen].long()
    values[position[chosen], rank] = value[chosen]
    return TokenLatents(latent.view(n, length, count), values.view(n, length, count))


class Counterparts(NamedTuple):
    """For each latent its nearest one in another SAE, on the same text."""

    latent: Tensor  # [m] int64; NONE where there is none
    both: Tensor  # [m] int64: tokens at which both fire
    firings: Firings  # of the other SAE
    windows: Windows  # contexts of the largest activations of the other SAE's latents


def counterparts(firings: Firings, other: Firings, nearest: Tensor, top: int) -> Counterparts:
    """`nearest` [m] is the other SAE's latent nearest to each; `top` contexts are kept of each of those."""
    tokens = other.shape[0] * other.shape[1]
    partner = nearest[firings.latent.long()]
    known = partner != NONE
    wanted = partner[known] * tokens + firings.position[known].long()
    keys = _keys(other)
    at = torch.searchsorted(keys, wanted).clamp_max(max(0, len(keys) - 1))
    hit = keys[at] == wanted if len(keys) else torch.zeros_like(wanted, dtype=torch.bool)
    both = torch.bincount(firings.latent.long()[known][hit], minlength=firings.d_sae)
    return Counterparts(nearest, both, other, pick_windows(other, top, 1, 0))


def inside_contexts(firings: Firings, latent: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
    """The firings of latents [w] inside contexts [w], as (first [w], end [w]); none for a latent of NONE."""
    tokens, length = firings.shape[0] * firings.shape[1], firings.shape[1]
    keys, begin = _keys(firings), latent * tokens + context * length
    first, end = torch.searchsorted(keys, begin), torch.searchsorted(keys, begin + length)
    return first, torch.where(latent == NONE, first, end)


def _keys(firings: Firings) -> Tensor:
    """Latent and position of each firing [f] as one number, ascending."""
    return firings.latent.long() * (firings.shape[0] * firings.shape[1]) + firings.position.long()
