"""One training step of JumpReLU in plain PyTorch: a learned threshold per latent, and a penalty that moves L0 to K.

A step function has no useful gradient, so a threshold gets that of a window around it (Rajamanoharan et al., 2024).
docs/method.md has the formulas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sampled_sae.method.codes import SparseCodes, by_latent, decode_with_pullback, total_by_latent, value_gradient
from sampled_sae.method.config import JumpReLUConfig, SAEConfig
from sampled_sae.method.jumprelu import encoder_input, penalty, thresholds, window
from sampled_sae.method.latents import WHOLE, Shard
from sampled_sae.method.parameters import JumpReLUParameters, Parameters
from sampled_sae.method.selection import Outcome, Selection, keep_largest
from sampled_sae.training.step import Left, PlainPath, add_auxk, parameter_gradients, reconstruct

PEER_START = 0.001
"""Thresholds of dictionary_learning before the first step."""


def pre_activations(x: Tensor, weights: JumpReLUParameters, config: JumpReLUConfig) -> Tensor:
    """x [batch, d_in] -> [batch, m]."""
    return torch.addmm(weights.b_enc, encoder_input(x, weights, config), weights.W_enc.T)


def start_thresholds_(weights: JumpReLUParameters, x: Tensor, config: SAEConfig, shard: Shard = WHOLE) -> None:
    """The thresholds before the first step, from its batch x [batch, d_in]."""
    assert config.jumprelu is not None
    if config.jumprelu.variant == "dictionary_learning":
        weights.b_dec.zero_()
        weights.threshold.fill_(PEER_START)
    else:
        z = pre_activations(x, weights, config.jumprelu)
        codes = keep_largest(z, config.k, len(x), z.shape[1], None, "batch", shard)
        smallest = shard.stack(torch.cat([codes.value, z.new_full((1,), torch.inf)]).min()).min()
        # In a batch of equal tokens, such as a single one, nothing is positive.
        weights.threshold.fill_(torch.where(smallest.isfinite(), smallest, PEER_START).log())


class JumpReLUPath(PlainPath):
    """A training step of JumpReLU, on any device and in any precision."""

    weights: JumpReLUParameters

    def select(self, x: Tensor, step: int, pool: Tensor) -> Selection:
        """x [batch, d_in] -> the activations above their thresholds; every latent is in the pool."""
        self.x, self.step = x, step
        self.pre = pre_activations(x, self.weights, self.settings)
        theta = thresholds(self.weights, self.settings)
        codes = SparseCodes.from_dense(torch.where(self.pre > theta, self.pre, 0))
        return self._selection(
            torch.ones_like(pool), codes, lambda: self.shard.sum(theta.mean().float()) / self.shard.number
        )

    @property
    def settings(self) -> JumpReLUConfig:
        assert self.config.jumprelu is not None
        return self.config.jumprelu

    def gradients(self, selection: Selection, dead: Tensor | None) -> Outcome:
        """Codes and dead latents [n_dead] -> loss and gradients, as `JumpReLUParameters`."""
        x, weights, settings, codes, shard = self.x, self.weights, self.settings, selection.codes, self.shard
        left = reconstruct(x - weights.b_dec, weights.W_dec, codes, self.prefixes, shard)
        outcome = parameter_gradients(encoder_input(x, weights, settings), codes, left)
        gradients: Parameters = outcome.gradients
        auxiliary, alpha = outcome.auxk, self.config.auxk.alpha
        if settings.variant == "relative":
            if dead is not None and alpha > 0:
                auxiliary = add_auxk(gradients, x, weights, left.errors[:, -1], dead, self.config.auxk, shard)
            gradients.b_dec.sub_(shard.sum(gradients.b_enc @ weights.W_enc))
        on_l0, slope = penalty(x, selection.kept() / len(x), self.step, self.steps, self.config)
        both = JumpReLUParameters(*gradients, threshold=self._on_threshold(left, slope))
        return Outcome(both, outcome.loss + on_l0 + alpha * auxiliary, outcome.error, auxiliary)

    @torch.no_grad()
    def _on_threshold(self, left: Left, slope: Tensor) -> Tensor:
        """Gradient of what decides the thresholds [m], from the activations in a window around each."""
        pre, settings, theta = self.pre, self.settings, thresholds(self.weights, self.settings)
        relative, width = settings.variant == "relative", window(theta, settings)
        token, latent = ((pre - theta).abs() < width / 2).nonzero(as_tuple=True)
        near = SparseCodes(token, latent, pre.new_zeros(len(token)), *pre.shape)
        parts = near if self.prefixes is None else near.segments(self.prefixes)
        decoded, leaf = decode_with_pullback(parts, self.weights.W_dec)
        on_code = value_gradient(decoded, leaf, left.out.view(decoded.shape))
        # In dictionary_learning the L0 of the codes counts, so only activations above the threshold are seen.
        counted = 1.0 if relative else (pre[token, latent] > theta[latent]).to(pre.dtype)
        each = -(theta[latent] * on_code + slope / len(pre) * counted) / width[latent]
        on_theta = total_by_latent(by_latent(near), each)
        return on_theta * theta if relative else on_theta
