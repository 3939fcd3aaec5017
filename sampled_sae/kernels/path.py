"""One SAE's step on a GPU: as `plain.PlainPath`, with weights in float32 and products in bfloat16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.kernels.adam import Rate, adam_rows_, adam_vector_
from sampled_sae.kernels.encoder import FROM_STATISTICS, FastEncoder, padded_copy
from sampled_sae.kernels.gradients import Copies, PoolCodes, SparseCodes, counts, pool_pass, sparse_pass, with_auxk
from sampled_sae.kernels.graphs import Recorder
from sampled_sae.kernels.select import cut_batch, cut_into_blocks, cut_rows
from sampled_sae.kernels.sparse import Rows, group_by_latent
from sampled_sae.method.config import Annealed, SAEConfig
from sampled_sae.method.parameters import Parameters
from sampled_sae.method.pools import candidates, group_at, size_at
from sampled_sae.method.scores import get_score
from sampled_sae.method.selection import Selection
from sampled_sae.training.step import Moved, Outcome

DENSE_BELOW = 128
"""Pools of up to so many times K latents are multiplied whole: cheaper there than going from value to value."""


class RowGradients(NamedTuple):
    """Gradients of all four tensors, of the matrices only the rows that have one."""

    rows: Rows
    b_dec: Tensor

    def full(self) -> Parameters:
        """With all rows: for tests."""
        there = (self.rows.slot >= 0)[:, None]
        row = self.rows.slot.clamp_min(0).long()
        W_enc, W_dec = (torch.where(there, G[row], 0) for G in (self.rows.W_enc, self.rows.W_dec))
        return Parameters(W_enc, self.rows.b_enc, W_dec, self.b_dec)


class FastPath:
    """How a learner encodes and cuts a batch, gets gradients and moves its weights."""

    name = "fast"

    def __init__(self, weights: Parameters, config: SAEConfig, steps: int, generator: torch.Generator):
        self.weights, self.config, self.steps, self.generator = weights, config, steps, generator
        self.k_aux = config.auxk.k or max(1, len(weights.b_dec) // 2)
        self.moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
        self.updates = 0
        self.recorder = Recorder(weights.b_dec.device, generator)
        self.rate = torch.ones(3, device=weights.b_dec.device)
        self.key: tuple[int, ...] | None = None
        self.x = weights.b_dec  # `select` copies each batch to the same place
        self.W_enc, self.W_dec = (padded_copy(W, torch.bfloat16) for W in (weights.W_enc, weights.W_dec))
        self.cuts: dict[int, Tensor] = {}
        self.dead: dict[int, Tensor] = {}

    def select(self, x: Tensor, step: int, pool: Tensor) -> Selection:
        """x [B, d], the last pool [m] -> what is kept of the batch."""
        if self.x.shape != x.shape:
            self.x = torch.empty_like(x)
        self.x.copy_(x)
        self.key = self._shape_at(step)
        with self._here():
            return self.recorder.run("select", self.key, lambda: self._select(step, pool))

    def _here(self) -> AbstractContextManager[Any]:
        """Kernels are launched on the current device, which need not be the weights'."""
        device = self.weights.b_dec.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _shape_at(self, step: int) -> tuple[int, ...] | None:
        """What decides a step's launches: sizes of group, pool and batch. None if its draw cannot be recorded."""
        pool = self.config.pool
        size = size_at(pool, self.config.k, self.config.d_sae, step, self.steps)
        group = group_at(pool.scope, len(self.x), step, self.steps)
        if size < self.config.d_sae:
            score = get_score(pool.score)
            known = score.ours and (score.reads != "activations" or score.name in FROM_STATISTICS)
            if not known or pool.pick != "top" or pool.refresh > 1 or group < len(self.x):
                return None
            if isinstance(pool.schedule, Annealed):  # another size at every step
                return None
        return group, size, *self.x.shape

    def _select(self, step: int, pool: Tensor) -> Selection:
        config, m = self.config, self.config.d_sae
        encoder = FastEncoder(self.x, self.weights, self.W_enc)
        found = candidates(encoder, config, step, self.steps, self.generator, kept=pool)
        size = len(found.pool) if found.columns is None else len(found.columns)
        dense = size <= DENSE_BELOW * config.k and found.columns is not None
        blocks = cut_into_blocks(found.z, config.k)
        if found.group == 1 or config.cut == "token":
            cut = cut_rows(blocks, config.k, dense)
        else:
            groups = len(self.x) // found.group
            if groups not in self.cuts:
                self.cuts[groups] = torch.full((groups,), -1, dtype=torch.int32, device=self.x.device)
            last = self.cuts[groups]
            cut = cut_batch(blocks, config.k * found.group, found.group, last, dense)
            last.copy_(cut.lowest)
        if cut.kept is None:
            assert found.columns is not None
            fired = torch.zeros_like(found.pool).index_copy_(0, found.columns, counts(found.z)[:size] > 0)
            codes = PoolCodes(encoder.x16, found.z, found.columns)
            return Selection(found.pool, fired, cut.smallest, lambda: int((found.z > 0).sum()), codes)
        latent = cut.kept.column
        if found.columns is not None:
            latent = _whose(found.columns, found.z.shape[1], m)[latent]
        sparse = SparseCodes(encoder.x16, cut.kept, latent, group_by_latent(cut.kept, latent, m))
        fired = sparse.groups.stop > sparse.groups.start
        return Selection(found.pool, fired, cut.smallest, lambda: int((latent < m).sum()), sparse)

    def move(self, x: Tensor, selection: Selection, dead: Tensor | None, lr: float) -> Moved:
        """What was kept of the batch that was last selected from, the dead latents [n_dead] -> one update."""
        self.updates += 1
        settings = self.config.optimizer
        self.rate[0].fill_(lr / (1 - settings.beta1**self.updates))
        self.rate[1].fill_((1 - settings.beta2**self.updates) ** 0.5)
        dead = None if dead is None else self._with_nobody(dead)
        key = None if self.key is None else (*self.key, 0 if dead is None else len(dead))
        with self._here():
            return self.recorder.run("move", key, lambda: self._move(selection, dead))

    def _with_nobody(self, dead: Tensor) -> Tensor:
        """The dead latents [n_dead], always in the same place, filled up with m to one of 16 lengths."""
        m = self.config.d_sae
        step = max(16, -(-m // 256) * 16)
        size = -(-len(dead) // step) * step
        if size not in self.dead:
            self.dead[size] = torch.empty(size, dtype=torch.long, device=dead.device)
        slots = self.dead[size]
        slots[len(dead) :].fill_(m)
        slots[: len(dead)].copy_(dead)
        return slots

    def _move(self, selection: Selection, dead: Tensor | None) -> Moved:
        outcome = self.gradients(selection, dead)
        return Moved(outcome.loss, outcome.error, outcome.auxk, self.update(outcome))

    def gradients(self, selection: Selection, dead: Tensor | None) -> Outcome:
        """What was kept of the batch, the dead latents [n] (m: nobody) -> loss and gradients."""
        x, alpha = self.x, self.config.auxk.alpha
        copies = Copies(selection.codes.x16, self.W_enc, self.W_dec)
        backward = sparse_pass if isinstance(selection.codes, SparseCodes) else pool_pass
        done = backward(x, self.weights, copies, selection.codes)
        auxk = torch.zeros((), device=x.device)
        if dead is not None:
            done, auxk = with_auxk(done, x, self.weights, copies, dead, alpha, self.k_aux)
        loss = done.squared_error / len(x) + alpha * auxk
        return Outcome(RowGradients(done.rows, done.on_b_dec), loss, done.squared_error, auxk)

    def update(self, outcome: Outcome) -> Tensor:
        """Move the weights at the rate that is set; returns the gradient's norm before clipping."""
        (rows, b_dec), settings = outcome.gradients, self.config.optimizer
        norm = (rows.energy + b_dec.square().sum()).clamp_min(0).sqrt()
        self.rate[2].copy_((settings.clip / (norm + 1e-6)).clamp(max=1.0))
        rate = Rate(self.rate, settings.beta1, settings.beta2, settings.eps)
        W_enc, in_b_enc, W_dec, in_b_dec = self.moments
        adam_rows_(self.weights.W_enc, *W_enc, self.W_enc, rows.W_enc, rows.slot, rate, unit=False)
        adam_rows_(self.weights.W_dec, *W_dec, self.W_dec, rows.W_dec, rows.slot, rate, unit=True)
        adam_vector_(self.weights.b_enc, *in_b_enc, rows.b_enc, rate)
        adam_vector_(self.weights.b_dec, *in_b_dec, b_dec, rate)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Adam's moments and step count, named as the plain path names them; empty before the first step."""
        if not self.updates:
            return {}
        named: dict[str, Tensor] = {}
        for name, (mean, square) in zip(Parameters._fields, self.moments, strict=True):
            parts = {"step": torch.tensor(float(self.updates)), "exp_avg": mean, "exp_avg_sq": square}
            named |= {f"{name}.{key}": value for key, value in parts.items()}
        return named

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state`, once the weights themselves are loaded."""
        for copy, W in ((self.W_enc, self.weights.W_enc), (self.W_dec, self.weights.W_dec)):
            copy[:, : W.shape[1]] = W
        if state:
            self.updates = int(state["W_enc.step"])
            for name, (mean, square) in zip(Parameters._fields, self.moments, strict=True):
                mean.copy_(state[f"{name}.exp_avg"])
                square.copy_(state[f"{name}.exp_avg_sq"])


def _whose(columns: Tensor, width: int, m: int) -> Tensor:
    """Columns of Z -> latents [width + 1] int32, m behind the last."""
    latents = torch.full((width + 1,), m, dtype=torch.int32, device=columns.device)
    latents[: len(columns)] = columns
    return latents
