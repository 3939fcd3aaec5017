"""The candidate pool: how large it is at a step, whom it serves, and which latents get in."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sampled_sae.errors import UserError
from sampled_sae.pool_config import Annealed, Constant, PoolConfig, Released, Scope


def size_at(pool: PoolConfig, k: int, m: int, step: int, steps: int) -> int:
    """Number of candidate latents at `step` (from 0) of `steps`."""
    start = pool.size.latents(k, m)
    done = step / steps
    match pool.schedule:
        case Constant():
            return start
        case Released(at):
            return start if done < at else m
        case Annealed(until):
            return min(m, start + math.floor((m - start) * min(1.0, done / until)))


def group_at(scope: Scope, batch_size: int, step: int, steps: int) -> int:
    """Number of tokens that share one pool and one cut at `step`."""
    tokens = scope.tokens if step / steps < scope.until else scope.then
    group = batch_size if tokens is None else min(tokens, batch_size)
    if batch_size % group:
        raise UserError(f"scope = {group} tokens: must divide batch_size = {batch_size}")
    return group


def draw(q: Tensor, size: int, pick: str, generator: torch.Generator) -> Tensor:
    """Scores q [groups, m] -> who is in the pool [groups, m] bool, exactly `size` in each group."""
    return highest(proportional_keys(q, generator) if pick == "sample" else q, size)


def proportional_keys(q: Tensor, generator: torch.Generator) -> Tensor:
    """Random keys whose largest are a sample in proportion to q without replacement (Gumbel's trick)."""
    if (q < 0).logical_and(q > -torch.inf).any():
        raise UserError("pick = 'sample': the score gave negative values; sampling in proportion needs q >= 0")
    uniform = torch.rand(q.shape, generator=generator, device=q.device, dtype=torch.float64)
    gumbel = -(-(uniform.clamp_min(1e-300)).log()).log()
    return q.double().clamp_min(0).log() + gumbel


def highest(q: Tensor, size: int) -> Tensor:
    """Mask of the `size` largest of each row of q [groups, m]; ties go to the lowest index."""
    cut = q.topk(size, dim=-1).values[:, -1:]
    above = q > cut
    ties = q == cut
    room = size - above.sum(dim=-1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=-1) <= room))


def draw_members(q: Tensor, size: int, pick: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`draw` for one group, q [1, m] -> its pool [m] bool, and who is in it [size], ascending."""
    pool = draw(q, size, pick, generator)[0]
    return pool, members(pool, size)


def members(pool: Tensor, size: int) -> Tensor:
    """A pool [m] bool with `size` members -> who they are [size], ascending."""
    if not pool.is_cuda:
        return pool.nonzero().squeeze(1)
    # `nonzero` would make the host wait for the device to count them; the count is known.
    place = torch.where(pool, pool.cumsum(0) - 1, size)
    return torch.empty(size + 1, dtype=torch.long, device=pool.device).scatter_(
        0, place, torch.arange(len(pool), device=pool.device)
    )[:size]


def churn(new: Tensor, old: Tensor) -> Tensor:
    """Share of the new pool's latents [m] that were not in the old pool [m]."""
    return 1 - (new & old).sum() / new.sum().clamp_min(1)
