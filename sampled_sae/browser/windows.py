"""Contexts to show, histograms and top tokens of each latent, for all latents at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.reading import Firings


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
    best = torch.full((len(starts),), _lowest(key), dtype=key.dtype).scatter_reduce(0, run, key, "amax")
    position = torch.where(key == best[run], torch.arange(n), n)
    return torch.full((len(starts),), n).scatter_reduce(0, run, position, "amin")


def largest_of_groups(group: Tensor, key: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest keys [n] of each group [n]: by group, largest first, equals in their order."""
    order = key.sort(descending=True, stable=True).indices
    order = order[group[order].sort(stable=True).indices]
    sorted_ = group[order]
    begin = starts_of_runs(sorted_)
    sizes = torch.diff(begin, append=torch.tensor([len(group)]))
    rank = torch.arange(len(group)) - torch.repeat_interleave(begin, sizes)
    return order[rank < count]


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


def _lowest(key: Tensor) -> float:
    return -torch.inf if key.is_floating_point() else torch.iinfo(key.dtype).min


TOP = -1  # stands for the band of a context that is shown for its largest activation


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


NONE = -1  # stands for a token or a latent that is not there


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
    first = starts_of_runs(owner)
    rank = torch.arange(len(owner)) - torch.repeat_interleave(
        first, torch.diff(first, append=torch.tensor([len(owner)]))
    )
    whole = torch.bincount(latent, weights=total, minlength=firings.d_sae)
    tokens = torch.full((firings.d_sae, count), NONE)
    shares = torch.zeros(firings.d_sae, count)
    tokens[owner, rank] = token[chosen]
    shares[owner, rank] = (total[chosen] / whole[owner]).float()
    return TopTokens(tokens, shares)
