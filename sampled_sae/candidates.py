"""From a batch to the activations that may be kept: encode, score, draw the pool, restrict to it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.config import SAEConfig
from sampled_sae.pool import draw, group_at, size_at
from sampled_sae.scores import get_score
from sampled_sae.step import Parameters, activations


class Candidates(NamedTuple):
    """What the cut chooses from."""

    z: Tensor
    """[B, n] post-ReLU activations of the pool's latents (zero outside of a group's own pool)."""
    columns: Tensor | None
    """[n] which latents the columns are; none: all of them."""
    pool: Tensor
    """[m] bool: who is in the pool, or in any group's pool."""
    group: int
    """Tokens that share one cut."""


def candidates(
    x: Tensor,
    weights: Parameters,
    config: SAEConfig,
    step: int,
    steps: int,
    generator: torch.Generator,
    kept: Tensor | None = None,
) -> Candidates:
    """x [B, d] -> the candidates at `step` of `steps`. `kept` [m] is the last pool, for pools that stay a while."""
    m, pool = config.latents, config.pool
    group = group_at(pool.scope, len(x), step, steps)
    # Between two draws the pool keeps its size, whatever an annealed schedule says; a release is not kept waiting.
    size = size_at(pool, config.k, m, step - step % pool.refresh, steps)
    if size == m or size_at(pool, config.k, m, step, steps) == m:
        return Candidates(activations(x, weights), None, torch.ones(m, dtype=torch.bool, device=x.device), group)
    score = get_score(pool.score)
    if group < len(x):
        z = activations(x, weights).view(-1, group, m)
        pools = draw(score(z, generator), size, pool.pick, generator)
        return Candidates(z.mul_(pools[:, None]).view(-1, m), None, pools.any(0), group)
    if kept is not None and step % pool.refresh and int(kept.sum()) == size:
        return _encode_only(x, weights, kept, group)
    if not score.needs_activations:
        blank = x.new_empty(1, 1).expand(len(x), m)
        return _encode_only(x, weights, draw(score(blank, generator)[None], size, pool.pick, generator)[0], group)
    z = activations(x, weights)
    chosen = draw(score(z, generator)[None], size, pool.pick, generator)[0]
    columns = chosen.nonzero().squeeze(1)
    return Candidates(z.index_select(1, columns), columns, chosen, group)


def _encode_only(x: Tensor, weights: Parameters, pool: Tensor, group: int) -> Candidates:
    """A pool that is known beforehand: the other latents are never encoded."""
    columns = pool.nonzero().squeeze(1)
    return Candidates(activations(x, weights, columns), columns, pool, group)
