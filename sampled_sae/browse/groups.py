"""Choices within groups of numbers, for all groups at once."""

from __future__ import annotations

import torch
from torch import Tensor


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
