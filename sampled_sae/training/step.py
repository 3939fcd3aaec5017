"""One training step's loss and gradients, by hand, so that only the encoder's product is dense."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.method.codes import (
    SparseCodes,
    by_latent,
    decode_with_pullback,
    sum_by_latent,
    total_by_latent,
    value_gradient,
)
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.parameters import Parameters, activations
from sampled_sae.method.pools import PlainEncoder, candidates
from sampled_sae.method.selection import Selection, keep_largest
from sampled_sae.training.optimizer import Optimizer


class Outcome(NamedTuple):
    """What a step computed: gradients, and what its log and its counters need."""

    gradients: Any
    """`Parameters`, or whatever the path's own optimiser takes."""
    loss: Tensor
    """Reconstruction plus alpha times AuxK."""
    error: Tensor
    """Sum of squared errors over the batch."""
    auxk: Tensor
    """The auxiliary loss before its weight."""


class Moved(NamedTuple):
    """What a step's log needs to know once the weights have moved."""

    loss: Tensor
    error: Tensor
    auxk: Tensor
    norm: Tensor
    """Of the gradient, before clipping."""


def loss_and_gradients(
    x: Tensor, weights: Parameters, codes: SparseCodes, dead: Tensor | None, alpha: float, k_aux: int
) -> Outcome:
    """x [B, d], the kept codes and the numbers of the dead latents [n_dead] -> loss and all gradients."""
    tokens = len(x)
    decoded, leaf = decode_with_pullback(codes, weights.W_dec)
    with torch.no_grad():
        error = x - weights.b_dec - decoded.detach()
        energy = error.square().sum()
        out = error * (-2 / tokens)  # the loss's gradient for x_hat
    on_value = value_gradient(decoded, leaf, out)
    with torch.no_grad():
        groups = by_latent(codes)
        gradients = Parameters(
            W_enc=sum_by_latent(groups, on_value, x - weights.b_dec),
            b_enc=total_by_latent(groups, on_value),
            W_dec=sum_by_latent(groups, codes.value, out),
            b_dec=out.sum(0),
        )
        auxk = x.new_zeros(())
        if dead is not None and alpha > 0:
            auxk = add_auxk(gradients, x, weights, error, dead, alpha, k_aux)
        # b_dec is also subtracted before encoding; through there it feels every latent's bias gradient.
        gradients.b_dec.sub_(gradients.b_enc @ weights.W_enc)
        return Outcome(gradients, energy / tokens + alpha * auxk, energy, auxk)


def add_auxk(
    gradients: Parameters,
    x: Tensor,
    weights: Parameters,
    error: Tensor,
    dead: Tensor,
    alpha: float,
    k_aux: int,
) -> Tensor:
    """Add AuxK's gradients in place and return its loss. Only the dead latents [n_dead] are encoded.

    For each token the k_aux strongest dead latents predict the error, which gets no gradient itself.
    """
    W_dec = weights.W_dec[dead]
    z = activations(x, weights, dead)
    if k_aux < len(dead):
        top = z.topk(k_aux, dim=1, sorted=False)
        z = torch.zeros_like(z).scatter_(1, top.indices, top.values)
    left = error - z @ W_dec
    variance = (error - error.mean(0)).square().sum()
    if variance == 0:  # nothing to explain: the ratio is undefined and counts as 0
        return variance
    out = left * (-2 * alpha / variance)
    on_z = (out @ W_dec.T).mul_(z > 0)
    gradients.W_dec.index_add_(0, dead, z.T @ out)
    gradients.W_enc.index_add_(0, dead, on_z.T @ (x - weights.b_dec))
    gradients.b_enc.index_add_(0, dead, on_z.sum(0))
    return left.square().sum() / variance


class PlainPath:
    """How a learner encodes and cuts a batch, gets gradients and moves its weights."""

    name = "plain"

    def __init__(self, weights: Parameters, config: SAEConfig, steps: int, generator: torch.Generator):
        self.weights, self.config, self.steps, self.generator = weights, config, steps, generator
        self.optimizer = Optimizer(weights, config.optimizer)
        self.k_aux = config.auxk.k or max(1, len(weights.b_dec) // 2)

    def select(self, x: Tensor, step: int, pool: Tensor) -> Selection:
        """x [B, d], the last pool [m] -> what is kept of the batch."""
        config = self.config
        found = candidates(PlainEncoder(x, self.weights), config, step, self.steps, self.generator, kept=pool)
        codes = keep_largest(found.z, config.k, found.group, config.d_sae, found.columns, config.cut)
        fired = torch.zeros_like(found.pool)
        fired[codes.latent] = True
        return Selection(found.pool, fired, lambda: _smallest(codes.value), lambda: len(codes.value), codes)

    def move(self, x: Tensor, selection: Selection, dead: Tensor | None, lr: float) -> Moved:
        """The batch, what was kept of it, the dead latents [n_dead] -> one update of the weights."""
        outcome = self.gradients(x, selection, dead)
        norm = self.optimizer.update(outcome.gradients, lr)
        return Moved(outcome.loss, outcome.error, outcome.auxk, norm)

    def gradients(self, x: Tensor, selection: Selection, dead: Tensor | None) -> Outcome:
        """The batch, what was kept of it and the dead latents [n_dead] -> loss and gradients."""
        alpha = self.config.auxk.alpha
        return loss_and_gradients(x, self.weights, selection.codes, dead, alpha, self.k_aux)

    def state(self) -> dict[str, Tensor]:
        """Adam's moments and step count by name; empty before the first step."""
        return self.optimizer.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state`, once the weights themselves are loaded."""
        self.optimizer.load_state(state)


def _smallest(values: Tensor) -> Tensor:
    return values.min().float() if len(values) else torch.zeros((), device=values.device)
