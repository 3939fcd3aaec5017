"""Which contexts are shown of each latent: those of its largest activations, and some from every part of its range."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.browse.firings import Firings
from sampled_sae.browse.groups import largest_of_groups, largest_of_runs, mixed, starts_of_runs

TOP = -1
"""Stands for the band of a context that is shown for its largest activation."""


class Windows(NamedTuple):
    """Contexts to show: by latent; first the top ones, the largest first, then those of each band, the highest first.

    A context is shown at most once for a latent.
    """

    latent: Tensor
    """[w] int64."""
    band: Tensor
    """[w] int64: from 0, the lowest part of the range; TOP for the top ones."""
    centre: Tensor
    """[w] int64: which firing it is shown for."""
    first: Tensor
    """[w] int64: the latent's first firing in that context."""
    last: Tensor
    """[w] int64: one after its last firing there."""


def pick_windows(firings: Firings, top: int, bands: int, each: int, seed: int = 0) -> Windows:
    """The contexts of the `top` largest activations, and `each` others drawn from each of the bands."""
    latent, value = firings.latent.long(), firings.value
    first = starts_of_runs(firings.latent, firings.place // firings.length)
    last = torch.cat((first[1:], torch.tensor([len(latent)])))
    peak = largest_of_runs(first, value)
    best = largest_of_groups(latent[peak], value[peak], top)
    rest = torch.ones(len(first), dtype=torch.bool)
    rest[best] = False
    # One firing of each context, whichever it is, stands for it among the draws.
    lot = mixed(seed, latent, firings.place.long())
    drawn = largest_of_runs(first, lot)
    others = rest.nonzero().squeeze(1)
    band = band_of(value[drawn], firings.maximum[latent[drawn]], bands)
    group = latent[drawn] * bands + (bands - 1 - band)
    others = others[largest_of_groups(group[others], lot[drawn][others], each)]
    run = torch.cat((best, others))
    centre = torch.cat((peak[best], drawn[others]))
    kind = torch.cat((torch.full((len(best),), TOP), band[others]))
    order = latent[centre].sort(stable=True).indices
    run, centre = run[order], centre[order]
    return Windows(latent[centre], kind[order], centre, first[run], last[run])


def band_of(value: Tensor, maximum: Tensor, bands: int) -> Tensor:
    """Activations [n] and the largest of their latents [n] -> in which of the equal parts of the range they are [n]."""
    return (value.double() / maximum.double() * bands).long().clamp_(0, bands - 1)
