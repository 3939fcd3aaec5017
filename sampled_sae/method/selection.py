"""TopK and BatchTopK: which activations are kept. Only positive ones count; ties go to the lowest index."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.method.codes import SparseCodes
from sampled_sae.method.latents import WHOLE, CommonCut, Shard, as_bits

SAMPLE = 2**16
"""Values looked at to guess the cut; the guess only saves work, the result is exact."""
SORTED_ON_GPU = 2**25
"""Up to this many values a GPU takes topk over all of them: it then waits for the host once, not twice."""


def largest(z: Tensor, keep: int) -> Tensor:
    """Flat positions, ascending, of the `keep` largest positive values of z (any shape, contiguous).

    Instead of sorting all of z, a sample gives a floor that a few more than `keep` values pass, and the
    exact cut is made among those.
    """
    flat = z.reshape(-1)
    if flat.is_cuda and keep < len(flat) <= SORTED_ON_GPU:
        candidates = _at_least(flat, flat.topk(keep, sorted=False).values.min())
    else:
        candidates = _candidates(flat, keep, width=z.shape[-1])
    if len(candidates) <= keep:
        return candidates
    values = flat[candidates]
    cut = values.topk(keep, sorted=False).values.min()
    above = values > cut
    ties = values == cut
    room = keep - above.sum()
    return candidates[above | (ties & (ties.cumsum(0) <= room))]


def _candidates(flat: Tensor, keep: int, width: int) -> Tensor:
    """Positions of at least the `keep` largest positive values (all positive ones if there are fewer)."""
    stride = max(1, len(flat) // SAMPLE)
    while math.gcd(stride, width) > 1:  # else only some of the columns would be looked at
        stride += 1
    sample = flat[::stride]
    expected = keep / stride
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 16)
    if stride > 1 and rank < len(sample):
        found = _at_least(flat, sample.topk(rank, sorted=False).values.min())
        if len(found) >= keep:
            return found
    return (flat > 0).nonzero().squeeze(1)


def _at_least(flat: Tensor, floor: Tensor) -> Tensor:
    """Positions of the positive values that reach the floor."""
    return (flat >= floor.clamp_min(torch.finfo(flat.dtype).tiny)).nonzero().squeeze(1)


def largest_of_rows(z: Tensor, keep: int) -> Tensor:
    """The same for each row of z [rows, n] on its own: flat positions, ascending."""
    rows, n = z.shape
    if rows == 1:
        return largest(z, keep)
    if keep >= n:
        return (z.reshape(-1) > 0).nonzero().squeeze(1)
    values, index = z.topk(keep + 1, dim=1)
    cut = values[:, keep - 1]
    tied = (cut == values[:, keep]) & (cut > 0)
    if tied.any():  # topk breaks ties as it likes; a stable sort breaks them by index
        values, index = values[:, :keep].clone(), index[:, :keep].clone()
        exact = z[tied].sort(dim=1, descending=True, stable=True)
        values[tied], index[tied] = exact.values[:, :keep], exact.indices[:, :keep]
    else:
        values, index = values[:, :keep], index[:, :keep]
    flat = index + torch.arange(rows, device=z.device)[:, None] * n
    return flat[values > 0].sort().values


class Selection(NamedTuple):
    """The outcome of encoding, scoring and cutting one batch."""

    pool: Tensor
    """[m] bool: latents in the pool, or in the pool of any group; with latents over ranks, on all of them."""
    fired: Tensor
    """[m] bool: latents with at least one kept activation; with latents over ranks, of this rank's."""
    smallest: Callable[[], Tensor]
    """Smallest kept activation, averaged over the groups that share a cut (TopK: over tokens); 0 if none is kept."""
    kept: Callable[[], int]
    """Number of kept activations, on all ranks."""
    codes: Any
    """The kept activations, in the form that the gradients of the same step path take."""


class Dead(NamedTuple):
    """Latents that have not fired for long."""

    mask: Tensor
    """[m] bool; with latents over ranks, of this rank's."""
    most: int
    """At least as many as there are on any rank; known without waiting for the device."""


class Outcome(NamedTuple):
    """Loss and gradients of one batch."""

    gradients: Any
    """In the form that the optimizer of the same step path takes."""
    loss: Tensor
    """Reconstruction loss plus alpha times AuxK."""
    error: Tensor
    """Sum of squared errors over the batch."""
    auxk: Tensor
    """Auxiliary loss before its weight."""
    gain: Tensor | None = None
    """[m]: how much larger the loss would be without each latent, for scores that learn from it."""


class Moved(NamedTuple):
    """Measurements of one update of the weights."""

    loss: Tensor
    error: Tensor
    auxk: Tensor
    norm: Tensor
    """Gradient norm before clipping."""


def smallest_kept(codes: SparseCodes, group: int, shard: Shard = WHOLE) -> Tensor:
    """Smallest code of each group of tokens, averaged over the groups that have one; 0 if none has."""
    if codes.tokens == group and len(codes.value) and shard.number == 1:
        return codes.value.min().float()
    smallest = codes.value.new_full((codes.tokens // group,), torch.inf, dtype=torch.float32)
    smallest.scatter_reduce_(0, codes.token // group, codes.value.float(), "amin")
    smallest = shard.stack(smallest).amin(0)
    there = smallest.isfinite()
    return torch.where(there, smallest, 0).sum() / there.sum().clamp_min(1)


def keep_largest(
    z: Tensor, k: int, group: int, latents: int, columns: Tensor | None, cut: str, shard: Shard = WHOLE
) -> SparseCodes:
    """The cut: of each group of tokens of z [B, n] the k*group largest (or of each token the k largest).

    `columns` [n] says which latents the columns of z are; none means all of them. With latents over ranks, z, columns
    and the codes are those of this rank's latents, and the cut is one over all ranks.
    """
    tokens, width = z.shape
    rows = tokens if cut == "token" else tokens // group
    keep = k * tokens // rows
    flat = largest_of_rows(z.view(rows, tokens // rows * width), keep)
    if shard.number > 1:  # those kept are among this rank's own largest
        bits, size = as_bits(z.view(-1)[flat])
        flat = flat[CommonCut(bits, flat // width, tokens, rows, keep, size, shard).kept()()]
    column = flat % width
    latent = column if columns is None else columns[column]
    return SparseCodes(flat // width, latent, z.view(-1)[flat], tokens, latents)
