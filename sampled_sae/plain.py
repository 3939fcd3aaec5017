"""One SAE's step in plain torch: runs on any device and in any precision."""

from __future__ import annotations

import torch
from torch import Tensor

from sampled_sae.candidates import PlainEncoder, candidates
from sampled_sae.config import SAEConfig
from sampled_sae.optimizer import Optimizer
from sampled_sae.selection import Selection
from sampled_sae.step import Moved, Outcome, Parameters, keep_largest, loss_and_gradients


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
        codes = keep_largest(found.z, config.k, found.group, config.latents, found.columns, config.cut)
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
