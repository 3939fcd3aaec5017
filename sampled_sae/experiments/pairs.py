"""Similarity of SAEs by their decoders, live latents alone: across seeds, and with the base method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sampled_sae.evals.similarity.cosines import directions, nearest
from sampled_sae.experiments.layer import Layer
from sampled_sae.sae import SAE

SAME = 0.7  # cosine from which on a latent counts as found in another SAE
AT_ONCE = 2**28  # cosines in memory at one time


def next_seed(seeds: Sequence[int], seed: int) -> int:
    """The seed after this one; the first after the last."""
    return seeds[(seeds.index(seed) + 1) % len(seeds)]


@torch.no_grad()
def similarity(saes: Sequence[SAE], layer: Layer) -> dict[str, float]:
    """An SAE, the next seed of its method, the base of the same seed and of the next seed -> MMCS of live latents, and
    the share of its live latents that the base of the next seed has."""
    own, other, same, next_base = (_live(sae, layer) for sae in saes)
    across, with_same, with_next = nearest(own, other, AT_ONCE), nearest(own, same, AT_ONCE), None
    with_next = across if saes[1] is saes[3] else nearest(own, next_base, AT_ONCE)
    return {
        "mmcs_seeds": _mean(across),
        "mmcs_same": _mean(with_same),
        "mmcs_other": _mean(with_next),
        "found": float((with_next[0] >= SAME).double().mean()),
        "live": float(len(own)),
    }


def _live(sae: SAE, layer: Layer) -> Tensor:
    """[n, d_in] unit rows of the decoder: latents that fire on the report tokens."""
    return directions(sae.W_dec.detach()[layer.frequency(sae) > 0]).rows


def _mean(both: tuple[Tensor, Tensor]) -> float:
    """The mean of the two directions' MMCS."""
    return sum(float(best.double().mean()) for best in both) / 2
