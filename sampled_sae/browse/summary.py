"""Numbers of every latent out of its firings: histogram of activations, and the tokens that hold most of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.browse.contexts import band_of
from sampled_sae.browse.firings import Firings
from sampled_sae.browse.groups import largest_of_groups, starts_of_runs

NONE = -1
"""Stands for a token or a latent that is not there."""


class TopTokens(NamedTuple):
    """The tokens that hold most of each latent's activation, most first."""

    token: Tensor
    """[m, c] int64; NONE where there are fewer."""
    share: Tensor
    """[m, c]: of the sum of the latent's activations."""


def histogram(firings: Firings, bins: int) -> Tensor:
    """[m, bins] int64: firings of each latent in equal bins from 0 to its largest activation."""
    latent = firings.latent.long()
    number = latent * bins + band_of(firings.value, firings.maximum[latent], bins)
    return torch.bincount(number, minlength=firings.latents * bins).view(firings.latents, bins)


def top_tokens(firings: Firings, contexts: Tensor, count: int) -> TopTokens:
    """The `count` tokens of each latent at which its activations in the contexts [n, L] add up to most."""
    text = contexts.flatten().long()
    width = int(text.max()) + 1
    both, order = (firings.latent.long() * width + text[firings.place.long()]).sort()
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
    whole = torch.bincount(latent, weights=total, minlength=firings.latents)
    tokens = torch.full((firings.latents, count), NONE)
    shares = torch.zeros(firings.latents, count)
    tokens[owner, rank] = token[chosen]
    shares[owner, rank] = (total[chosen] / whole[owner]).float()
    return TopTokens(tokens, shares)
