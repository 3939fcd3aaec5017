"""JumpReLU's step on a GPU: the kernels of the other methods, and dense products in 16 bits for the thresholds.

How many activations pass the thresholds differs from step to step, so nothing is recorded, and the host waits for the
device once a step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.kernels.auxk import Copies, DeadPass
from sampled_sae.kernels.encoder import padded_copy, product
from sampled_sae.kernels.gradients import RowGradients, finished, sparse_pass
from sampled_sae.kernels.path import FastPath
from sampled_sae.kernels.select import Kept
from sampled_sae.kernels.sparse import Rows, decode_error
from sampled_sae.method.config import JumpReLUConfig
from sampled_sae.method.jumprelu import encoder_input, fine, penalty, thresholds, window
from sampled_sae.method.parameters import JumpReLUParameters
from sampled_sae.method.selection import Outcome, Selection

AT_ONCE = 2**25
"""Activations whose distance from the thresholds is computed at one time."""


class JumpReLUGradients(NamedTuple):
    """Gradients of all five tensors; of the matrices only the rows that have one."""

    rows: Rows
    b_dec: Tensor
    threshold: Tensor

    def full(self) -> JumpReLUParameters:
        """With all rows: for tests."""
        return JumpReLUParameters(*RowGradients(self.rows, self.b_dec).full(), threshold=self.threshold)


class FastJumpReLUPath(FastPath):
    """A training step of JumpReLU in Triton kernels."""

    weights: JumpReLUParameters

    @property
    def settings(self) -> JumpReLUConfig:
        assert self.config.jumprelu is not None
        return self.config.jumprelu

    def _shape_at(self, step: int) -> None:
        self.step = step

    def _select(self, step: int, pool: Tensor) -> Selection:
        weights, W_enc = self.weights, self.optimizer.W_enc
        x16 = padded_copy(encoder_input(self.x, weights, self.settings), W_enc.dtype)
        if fine(self.settings):
            self.z = product(x16, W_enc.T).add_(weights.b_enc)
        else:
            self.z = torch.addmm(weights.b_enc.to(x16.dtype), x16, W_enc.T)
        theta = thresholds(weights, self.settings)
        token, latent = (self.z > theta).nonzero(as_tuple=True)
        number, m = len(token), len(theta)
        # One slot more, which nothing fills: no list is empty.
        value = torch.cat([self.z[token, latent].float(), theta.new_zeros(1)])
        token, latent = (torch.nn.functional.pad(t.int(), (0, 1), value=end) for t, end in ((token, 0), (latent, m)))
        each = torch.arange(len(self.x), dtype=torch.int32, device=token.device)
        start, stop = (torch.searchsorted(token[:number], each, right=r, out_int32=True) for r in (False, True))
        codes = self._listed(x16, Kept(start, stop, token, latent, value), latent)
        fired = codes.groups.stop > codes.groups.start
        return Selection(torch.ones_like(pool), fired, lambda: theta.mean(), lambda: number, codes)

    def gradients(self, selection: Selection, dead: Tensor | None) -> Outcome:
        """Kept activations and dead latents [n] (m: an empty slot) -> loss and `JumpReLUGradients`."""
        x, weights, codes, auxk = self.x, self.weights, selection.codes, self.config.auxk
        copies = Copies(codes.x16, self.optimizer.W_enc, self.optimizer.W_dec)
        relative = self.settings.variant == "relative"
        beside = DeadPass(copies, weights, dead, auxk) if dead is not None and relative else None
        errors = decode_error(
            x, weights.b_dec, copies.W_dec, codes.latent, codes.kept.value, codes.segments, codes.scale
        )
        done = sparse_pass(copies, codes, errors, beside, x.shape[1])
        done, through_encoder, loss, auxiliary = finished(done, weights, copies, dead, beside, len(x), auxk)
        on_l0, slope = penalty(x, selection.kept() / len(x), self.step, self.steps, self.config)
        on_b_dec = done.on_b_dec - through_encoder if relative else done.on_b_dec
        found = JumpReLUGradients(done.rows, on_b_dec, self._on_threshold(errors.out, slope))
        return Outcome(found, loss + on_l0, done.squared_error, auxiliary)

    def _on_threshold(self, out: Tensor, slope: Tensor) -> Tensor:
        """Gradient of what decides the thresholds [m]; `out` [B * n, stride] is that of the segments' sums.

        So many activations are near their thresholds that a dense product is cheaper than going from one to the next.
        """
        theta, relative = thresholds(self.weights, self.settings), self.settings.variant == "relative"
        half, m = window(theta, self.settings) / 2, len(theta)
        edges = (0, *(self.config.prefixes or (m,)))
        by_segment = out.view(len(self.x), len(edges) - 1, -1)
        on_codes, counts = torch.zeros_like(theta), torch.zeros_like(theta)
        for segment, (first, last) in enumerate(pairwise(edges)):
            own, W = slice(first, last), self.optimizer.W_dec[first:last]
            parts = (t.split(max(1, AT_ONCE // (last - first))) for t in (self.z, by_segment))
            for z, on_segment in zip(*parts, strict=True):
                above = z[:, own] - theta[own]
                near = above.abs() < half[own]
                on_codes[own] += torch.where(near, on_segment[:, segment] @ W.T, 0).sum(0, dtype=torch.float32)
                # In dictionary_learning the L0 of the codes counts, so only activations above the threshold are seen.
                counts[own] += (near if relative else near & (above > 0)).sum(0)
        # Over the window's width; of a logarithm times theta, which is a factor of the relative width.
        return -(theta * on_codes + slope / len(self.x) * counts) / self.settings.bandwidth
