"""Latents that fire at the same tokens: of one SAE, at single tokens of a text, and of two SAEs in the same context.

m is d_sae in the shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.browser.latents import NONE, Tick, Windows, largest_of_groups, pick_windows, ranks_in_runs
from sampled_sae.evals.reading import Firings

LEAST = 3  # tokens that two latents must share: one shared token makes two rare latents perfectly correlated
PAIRS_AT_ONCE = 2**24  # pairs of firings held at one time
COUNTS_AT_ONCE = 2**24  # counts of pairs of latents held at one time


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
