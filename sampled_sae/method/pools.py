"""The candidate pool: which latents are in it, and the candidates of a batch."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sampled_sae.method.config import SAEConfig
from sampled_sae.method.latents import WHOLE, Shard
from sampled_sae.method.parameters import Weights, activations
from sampled_sae.method.scores import Score, get_score, token_sums
from sampled_sae.utils.errors import UserError


def draw(q: Tensor, size: int, pick: str, generator: torch.Generator) -> Tensor:
    """Scores q [groups, m] -> the pool of each group [groups, m] bool, exactly `size` in each group."""
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
    """`draw` for one group, q [1, m] -> its pool [m] bool, and the indices of its latents [size], ascending."""
    pool = draw(q, size, pick, generator)[0]
    return pool, members(pool, size)


def members(pool: Tensor, size: int | None) -> Tensor:
    """A pool [m] bool with `size` members, if that is known -> their indices [size], ascending."""
    if size is None or not pool.is_cuda:
        return pool.nonzero().squeeze(1)
    # `nonzero` would make the host wait for the device to count them; the count is known.
    place = torch.where(pool, pool.cumsum(0) - 1, size)
    return torch.empty(size + 1, dtype=torch.long, device=pool.device).scatter_(
        0, place, torch.arange(len(pool), device=pool.device)
    )[:size]


def churn(new: Tensor, old: Tensor) -> Tensor:
    """Share of the new pool's latents [m] that were not in the old pool [m]."""
    return 1 - (new & old).sum() / new.sum().clamp_min(1)


def remember_(memory: Tensor, q: Tensor, decay: float) -> Tensor:
    """A batch's scores q [groups, m] -> the same mixed with those before, decay * memory + (1 - decay) * q.

    `memory` [m] becomes the mean of the result over the groups. It begins at 0, which scales all latents alike
    and so changes neither a pool of the highest nor one in proportion to the score. A score of -inf counts as 0.
    """
    mixed = decay * memory + (1 - decay) * torch.where(q > -torch.inf, q, 0)
    memory.copy_(mixed.mean(0).clamp_max(torch.finfo(memory.dtype).max))  # an infinite one would stay for ever
    return mixed


class PoolState(NamedTuple):
    """What scores know of earlier batches, each [m], changed in place."""

    memory: Tensor
    """Moving average of the score, for pools with a memory."""
    score: Tensor
    """The score's own state, if it has one."""

    @staticmethod
    def empty(m: int, device: torch.device) -> PoolState:
        """Before the first batch."""
        return PoolState(*torch.zeros(2, m, device=device))


class Encoder(Protocol):
    """One batch and the weights that encode it."""

    tokens: int
    shard: Shard
    """Whether these are all latents; if not, `encode` knows the n of this rank, and m are those of all ranks."""

    def encode(self, latents: Tensor | None) -> Tensor:
        """The activations [B, n] of the given latents [n], or of all; those below 0 count as 0."""

    def scores(self, score: Score, group: int, generator: torch.Generator, state: Tensor) -> Tensor:
        """Each latent's score for each group of tokens [groups, m]; `state` [m] is the score's own."""

    def draw(self, q: Tensor, size: int, pick: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Scores q [1, m] -> the pool of the whole batch, [m] bool, and the indices of its latents [size] ascending."""


class PlainEncoder:
    """x [B, d] and the weights, in plain torch."""

    def __init__(self, x: Tensor, weights: Weights, shard: Shard = WHOLE):
        self.x, self.weights, self.shard = x, weights, shard
        self.tokens = len(x)
        self._all: Tensor | None = None

    def encode(self, latents: Tensor | None) -> Tensor:
        if latents is None or self._all is not None:
            if self._all is None:
                self._all = activations(self.x, self.weights)
            return self._all if latents is None else self._all.index_select(1, latents)
        return activations(self.x, self.weights, latents)

    def scores(self, score: Score, group: int, generator: torch.Generator, state: Tensor) -> Tensor:
        exact = torch.promote_types(self.x.dtype, torch.float32)  # sums over tokens in 16 bits would tie most latents
        if score.reads == "input":
            centered = (self.x - self.weights.b_dec).to(exact).view(-1, group, self.x.shape[1])
            encoder = self.weights.W_enc.to(exact), self.weights.b_enc.to(exact)
            return self.shard.gather(score.from_input(centered, *encoder))
        n = len(self.weights.b_enc)
        if score.reads == "nothing":
            shape = (self.tokens // group, group, n * self.shard.number)
            return score(self.x.new_empty(()).expand(shape), generator, state)
        Z = self.encode(None).to(exact).view(self.tokens // group, group, n)
        if self.shard.number > 1:
            return score.from_sums(token_sums(Z, score.sums).map(self.shard.gather))
        return score(Z, generator, state)

    def draw(self, q: Tensor, size: int, pick: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return draw_members(q, size, pick, generator)


class Candidates(NamedTuple):
    """What the cut chooses from."""

    z: Tensor
    """[B, n] activations of the pool's latents (zero outside of a group's own pool); over ranks, of this rank's."""
    columns: Tensor | None
    """[n] which latents the columns are, of this rank's; none: all of them."""
    pool: Tensor
    """[m] bool: latents in the pool, or in the pool of any group; of all ranks."""
    group: int
    """Tokens that share one cut."""


def candidates(
    encoder: Encoder,
    config: SAEConfig,
    step: int,
    steps: int,
    generator: torch.Generator,
    kept: Tensor | None = None,
    state: PoolState | None = None,
) -> Candidates:
    """A batch's candidates at `step` of `steps`. `kept` [m] is the last pool, for pools that stay a while.

    `state` is what scores know of earlier batches; without it each batch is the first.
    """
    m, pool, own = config.d_sae, config.pool, encoder.shard.own(config.d_sae)
    group = pool.scope.group_at(encoder.tokens, step, steps)
    # Between two draws the pool keeps its size, whatever an annealed schedule says; a release is not kept waiting.
    size = config.pool_size_at(step - step % pool.refresh, steps)
    if size == m or config.pool_size_at(step, steps) == m:
        z = encoder.encode(None)
        return Candidates(z, None, torch.ones(m, dtype=torch.bool, device=z.device), group)
    if kept is not None and group == encoder.tokens and step % pool.refresh and int(kept.sum()) == size:
        columns = members(kept[own], size if encoder.shard.number == 1 else None)
        return Candidates(encoder.encode(columns), columns, kept, group)
    state = PoolState.empty(m, generator.device) if state is None else state
    q = encoder.scores(get_score(pool.score), group, generator, state.score)
    if pool.memory is not None:
        q = remember_(state.memory, q, pool.memory)
    if group < encoder.tokens:
        pools = draw(q, size, pool.pick, generator)
        z = encoder.encode(None)
        z.view(-1, group, z.shape[1]).mul_(pools[:, None, own])
        return Candidates(z, None, pools.any(0), group)
    chosen, columns = encoder.draw(q, size, pool.pick, generator)
    if encoder.shard.number > 1:
        columns = members(chosen[own], None)
    return Candidates(encoder.encode(columns), columns, chosen, group)
