"""One training step in plain PyTorch: only the encoder's product is dense, gradients are computed by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sampled_sae.method.codes import (
    SparseCodes,
    by_latent,
    decode_with_pullback,
    running_sum,
    sum_by_latent,
    total_by_latent,
    value_gradient,
)
from sampled_sae.method.config import AuxKConfig, SAEConfig
from sampled_sae.method.latents import WHOLE, Shard
from sampled_sae.method.parameters import Parameters, Weights, activations
from sampled_sae.method.pools import PlainEncoder, PoolState, candidates
from sampled_sae.method.scores import get_score
from sampled_sae.method.selection import Dead, Moved, Outcome, Selection, keep_largest, smallest_kept
from sampled_sae.training.optimizer import Optimizer


class StepPath(Protocol):
    """Both halves of a training step. `select` keeps the batch for the `update` that follows it."""

    name: str
    pool_state: PoolState

    def select(self, x: Tensor, step: int, pool: Tensor) -> Selection:
        """x [batch, d_in] and the last pool [d_sae] -> the kept activations. The first recorded half on a GPU."""
        ...

    def update(self, selection: Selection, dead: Dead | None, lr: float) -> Moved:
        """Kept activations and dead latents -> one update of the weights. The second recorded half."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Adam's moments and step count by name; empty before the first step."""
        ...

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state`, called after the weights are loaded."""
        ...


def loss_and_gradients(
    x: Tensor,
    weights: Weights,
    codes: SparseCodes,
    dead: Tensor | None,
    auxk: AuxKConfig,
    prefixes: Sequence[int] | None = None,
    gains: bool = False,
    shard: Shard = WHOLE,
) -> Outcome:
    """x [batch, d_in], kept codes, dead latents [n_dead] -> loss and all gradients, as `Parameters`."""
    centered = x - weights.b_dec
    left = reconstruct(centered, weights.W_dec, codes, prefixes, shard)
    outcome = parameter_gradients(centered, codes, left)
    auxiliary = x.new_zeros(())
    if dead is not None and auxk.alpha > 0:
        auxiliary = add_auxk(outcome.gradients, x, weights, left.errors[:, -1], dead, auxk, shard)
    # b_dec is also subtracted before encoding, so it gets every latent's bias gradient through the encoder.
    outcome.gradients.b_dec.sub_(shard.sum(outcome.gradients.b_enc @ weights.W_enc))
    gain = gains_of(codes, left) if gains else None
    return outcome._replace(loss=outcome.loss + auxk.alpha * auxiliary, auxk=auxiliary, gain=gain)


class Left(NamedTuple):
    """What the reconstructions by n nested prefixes of the latents leave; n is 1 without prefixes."""

    errors: Tensor
    """[tokens, n, d_in]."""
    out: Tensor
    """[tokens, n, d_in]: gradient of the loss for what segment p of a token's codes contributes, the codes of prefix p
    that are not of the one before. They are part of prefix p and of all wider ones, so it is a sum over these."""
    on_value: Tensor
    """[entries]: gradient of each code."""
    segment: Tensor
    """[entries]: row of `out`, as [tokens * n, d_in], that each code belongs to."""


def reconstruct(
    goal: Tensor, W_dec: Tensor, codes: SparseCodes, prefixes: Sequence[int] | None, shard: Shard = WHOLE
) -> Left:
    """Reconstruct goal [tokens, d_in] = x - b_dec. The loss is the squared error per token, averaged over prefixes."""
    tokens, n = len(goal), 1 if prefixes is None else len(prefixes)
    parts = codes if prefixes is None else codes.segments(prefixes)
    decoded, leaf = decode_with_pullback(parts, W_dec)
    with torch.no_grad():
        errors = goal[:, None] - running_sum(shard.sum(decoded.detach().view(tokens, n, -1)))
        out = running_sum(errors * (-2 / (tokens * n)), backward=True)
    on_value = value_gradient(decoded, leaf, out.view(tokens * n, -1))
    return Left(errors, out, on_value, parts.token)


def parameter_gradients(encoded: Tensor, codes: SparseCodes, left: Left) -> Outcome:
    """`encoded` [tokens, d_in], the input of the encoder, and its codes -> the reconstruction loss and its gradients.

    That of b_dec is without what comes through the encoder.
    """
    with torch.no_grad():
        groups, out = by_latent(codes), left.out
        by_segment = groups._replace(token=left.segment[groups.order])
        gradients = Parameters(
            W_enc=sum_by_latent(groups, left.on_value, encoded),
            b_enc=total_by_latent(groups, left.on_value),
            W_dec=sum_by_latent(by_segment, codes.value, out.view(-1, out.shape[2])),
            b_dec=out[:, 0].sum(0),
        )
        energies = left.errors.square().sum((0, 2))
        return Outcome(gradients, energies.mean() / codes.tokens, energies[-1], encoded.new_zeros(()))


def gains_of(codes: SparseCodes, left: Left) -> Tensor:
    """[m]: increase of the reconstruction loss if a latent, whose decoder row has norm 1, were 0 on all tokens."""
    n = left.out.shape[1]
    # ||e + f w||^2 - ||e||^2 = f^2 + 2 f e.w, summed over the prefixes that contain the latent.
    containing = n - left.segment % n
    each = codes.value.square() * containing / (n * codes.tokens) - codes.value * left.on_value
    return total_by_latent(by_latent(codes), each)


def add_auxk(
    gradients: Parameters,
    x: Tensor,
    weights: Weights,
    error: Tensor,
    dead: Tensor,
    auxk: AuxKConfig,
    shard: Shard = WHOLE,
) -> Tensor:
    """Add AuxK's gradients in place and return its loss. Only the dead latents [n_dead] are encoded.

    For each token the k strongest dead latents predict the error, which gets no gradient itself.
    """
    k, W_dec = auxk.latents(x.shape[1]), weights.W_dec[dead]
    z = activations(x, weights, dead)
    if shard.number > 1:
        z = keep_largest(z, k, 1, len(dead), None, "token", shard).dense()
    elif k < len(dead):
        top = z.topk(k, dim=1, sorted=False)
        z = torch.zeros_like(z).scatter_(1, top.indices, top.values)
    left = error - shard.sum(z @ W_dec)
    variance = (error - error.mean(0)).square().sum()
    if variance == 0:  # nothing to explain: the ratio is undefined and counts as 0
        return variance
    out = left * (-2 * auxk.alpha / variance)
    on_z = (out @ W_dec.T).mul_(z > 0)
    gradients.W_dec.index_add_(0, dead, z.T @ out)
    gradients.W_enc.index_add_(0, dead, on_z.T @ (x - weights.b_dec))
    gradients.b_enc.index_add_(0, dead, on_z.sum(0))
    return left.square().sum() / variance


class PlainPath:
    """A training step in plain PyTorch, on any device and in any precision."""

    name = "plain"

    def __init__(
        self,
        weights: Weights,
        config: SAEConfig,
        steps: int,
        generator: torch.Generator,
        shard: Shard = WHOLE,
    ):
        """`weights` are those of this rank's latents."""
        self.weights, self.config, self.steps, self.generator, self.shard = weights, config, steps, generator, shard
        self.score = get_score(config.pool.score)
        self.pool_state = PoolState.empty(config.d_sae, weights.b_dec.device)
        self.prefixes = config.prefixes and [width - shard.own(config.d_sae).start for width in config.prefixes]
        self.optimizer = Optimizer(weights, config.optimizer, shard)
        self.state, self.load_state = self.optimizer.state, self.optimizer.load_state

    def select(self, x: Tensor, step: int, pool: Tensor) -> Selection:
        """x [batch, d_in] and the last pool [d_sae] -> the kept activations."""
        self.x, config, shard, latents = x, self.config, self.shard, len(self.weights.b_enc)
        encoder = PlainEncoder(x, self.weights, shard)
        found = candidates(encoder, config, step, self.steps, self.generator, pool, self.pool_state)
        codes = keep_largest(found.z, config.k, found.group, latents, found.columns, config.cut, shard)
        group = 1 if config.cut == "token" else found.group
        return self._selection(found.pool, codes, lambda: smallest_kept(codes, group, shard))

    def _selection(self, pool: Tensor, codes: SparseCodes, smallest: Callable[[], Tensor]) -> Selection:
        fired = torch.zeros(codes.d_sae, dtype=torch.bool, device=pool.device)
        fired[codes.latent] = True
        return Selection(pool, fired, smallest, lambda: self.shard.total(len(codes.value), pool.device), codes)

    def update(self, selection: Selection, dead: Dead | None, lr: float) -> Moved:
        """Kept activations and dead latents -> one update of the weights."""
        numbers = None if dead is None else dead.mask.nonzero().squeeze(1)
        if numbers is not None and not self.shard.total(len(numbers), numbers.device):
            numbers = None
        outcome = self.gradients(selection, numbers)
        norm = self.optimizer.update(outcome.gradients, lr)
        if self.score.learn is not None and outcome.gain is not None:
            self.score.learn(self.pool_state.score, self.shard.gather(outcome.gain), selection.pool)
        return Moved(outcome.loss, outcome.error, outcome.auxk, norm)

    def gradients(self, selection: Selection, dead: Tensor | None) -> Outcome:
        """Kept activations and dead latents [n_dead] -> loss and gradients on the batch given to `select`."""
        config, learns = self.config, self.config.pool.restricts and self.score.learn is not None
        return loss_and_gradients(
            self.x, self.weights, selection.codes, dead, config.auxk, self.prefixes, learns, self.shard
        )
