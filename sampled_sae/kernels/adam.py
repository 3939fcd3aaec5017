"""One pass over each parameter: projection, normalization, Adam, unit rows, and the products' 16-bit copy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sampled_sae.kernels.encoder import padded_copy
from sampled_sae.kernels.sparse import Rows
from sampled_sae.method.config import OptimizerConfig
from sampled_sae.method.parameters import LEAST_SHARE, Weights, gradient_factor

LEAST = tl.constexpr(LEAST_SHARE)


@triton.jit
def moved(w, mean, square, g, now, factor, beta1, beta2, eps, d, CAUTIOUS: tl.constexpr):
    """Adam's new weight, mean and square. CAUTIOUS: for a row of d elements, see `training.optimizer`."""
    g *= tl.load(now + 2)
    mean += (1 - beta1) * (g - mean)
    square = beta2 * square + (1 - beta2) * g * g
    direction = mean
    if CAUTIOUS:
        agrees = mean * g > 0
        share = tl.sum(agrees.to(tl.float32)) / d
        part = tl.where(agrees, mean, 0.0) / tl.maximum(share, LEAST)
        direction = tl.where(tl.max(tl.abs(g)) > 0, part, mean)
    return w - tl.load(now) * factor * direction / (tl.sqrt(square) / tl.load(now + 1) + eps), mean, square


@triton.jit
def _adam_rows(W, mean, square, copy, G, more, slot, now, factor, beta1, beta2, eps, d, stride, rows, width,
               MORE: tl.constexpr, UNIT: tl.constexpr, CAUTIOUS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    j = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    at, inside = j * d + c, c < d
    w = tl.load(W + at, mask=inside, other=0.0)
    m = tl.load(mean + at, mask=inside, other=0.0)
    s = tl.load(square + at, mask=inside, other=0.0)
    row = tl.load(slot + j).to(tl.int64)
    g = tl.load(G + row * width + c, mask=c < tl.where((row >= 0) & (row < rows), d, 0), other=0.0)
    if MORE:
        g += tl.load(more + (row - rows) * stride + c, mask=c < tl.where(row >= rows, d, 0), other=0.0)
    if UNIT:
        g -= tl.sum(g * w) * w
    w, m, s = moved(w, m, s, g, now, factor, beta1, beta2, eps, d, CAUTIOUS)
    if UNIT:
        w = w / (tl.sqrt(tl.sum(w * w)) + 1.1920929e-07)
    tl.store(W + at, w, mask=inside)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, s, mask=inside)
    tl.store(copy + j * stride + c, w.to(copy.dtype.element_ty), mask=inside)


@triton.jit
def _adam_vector(w_at, mean, square, G, now, factor, beta1, beta2, eps, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    w, m, s = tl.load(w_at + at, mask=inside), tl.load(mean + at, mask=inside), tl.load(square + at, mask=inside)
    w, m, s = moved(w, m, s, tl.load(G + at, mask=inside), now, factor, beta1, beta2, eps, n, False)
    tl.store(w_at + at, w, mask=inside)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, s, mask=inside)


class FusedAdam:
    """Adam over an SAE's tensors, with the 16-bit copies of both matrices that the products read.

    `set_rate` runs before each update and outside of a recorded graph; `update` may be recorded, because everything
    that changes from step to step is in `rate`, on the device.
    """

    def __init__(self, weights: Weights, config: OptimizerConfig):
        self.weights, self.config = weights, config
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights._asdict().items()}
        self.W_enc, self.W_dec = (padded_copy(W, torch.bfloat16) for W in (weights.W_enc, weights.W_dec))
        self.updates = 0
        self.rate = torch.ones(3, device=weights.b_dec.device)
        """[3]: learning rate over the mean's bias correction, root of the square's, and the gradient's factor."""
        self.parameters = sum(w.numel() for w in weights)

    def set_rate(self, lr: float) -> None:
        """Count one more update, at learning rate `lr`."""
        self.updates += 1
        self.rate[0].fill_(lr / (1 - self.config.beta1**self.updates))
        self.rate[1].fill_((1 - self.config.beta2**self.updates) ** 0.5)

    def update(self, rows: Rows, b_dec: Tensor, threshold: Tensor | None = None) -> Tensor:
        """Gradient rows of both matrices and of b_enc, gradient of b_dec [d], of JumpReLU's thresholds [m] -> gradient
        norm before it is scaled."""
        energy = rows.energy + b_dec.square().sum()
        if threshold is not None:
            energy = energy + threshold.square().sum()
        norm = energy.clamp_min(0).sqrt()
        self.rate[2].copy_(gradient_factor(norm, self.parameters, self.config))
        more = rows.more or (None, None)
        self._rows("W_enc", self.W_enc, rows.W_enc, more[0], rows.slot, unit=False)
        self._rows("W_dec", self.W_dec, rows.W_dec, more[1], rows.slot, unit=True)
        self._vector("b_enc", rows.b_enc)
        self._vector("b_dec", b_dec)
        if threshold is not None:
            self._vector("threshold", threshold)
        return norm

    def _numbers(self, name: str) -> tuple[Tensor, float, float, float, float]:
        factor = float(getattr(self.config.rates, name, 1.0))
        return self.rate, factor, self.config.beta1, self.config.beta2, self.config.eps

    def _rows(self, name: str, copy: Tensor, G: Tensor, more: Tensor | None, slot: Tensor, unit: bool) -> None:
        """Update a matrix [m, d] by the gradient rows G [rows, d or more], then those of `more` [n, stride]; `slot` [m]
        is each latent's row (-1: zero gradient).

        With `unit`, the gradient's part along the matrix's unit rows is removed before, and rows are scaled to norm 1
        after. `copy` [m, stride] gets the new weights in its own type.
        """
        W, moments = getattr(self.weights, name), self.moments[name]
        m, d = W.shape
        block = triton.next_power_of_2(d)
        _adam_rows[(m,)](
            W, *moments, copy, G, G if more is None else more, slot, *self._numbers(name), d, copy.shape[1], *G.shape,
            MORE=more is not None, UNIT=unit, CAUTIOUS=self.config.cautious, BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip

    def _vector(self, name: str, G: Tensor) -> None:
        """Update a bias [n] by the gradient G [n]."""
        w, moments = getattr(self.weights, name), self.moments[name]
        _adam_vector[(triton.cdiv(len(w), 1024),)](w, *moments, G, *self._numbers(name), len(w), BLOCK=1024)

    def state(self) -> dict[str, Tensor]:
        """Adam's moments and step count, with the names of `training.optimizer`; empty before the first step."""
        if not self.updates:
            return {}
        named: dict[str, Tensor] = {}
        for name, (mean, square) in self.moments.items():
            parts = {"step": torch.tensor(float(self.updates)), "exp_avg": mean, "exp_avg_sq": square}
            named |= {f"{name}.{key}": value for key, value in parts.items()}
        return named

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state`, called after the weights are loaded."""
        for copy, W in ((self.W_enc, self.weights.W_enc), (self.W_dec, self.weights.W_dec)):
            copy[:, : W.shape[1]] = W
        if state:
            self.updates = int(state["W_enc.step"])
            for name, (mean, square) in self.moments.items():
                mean.copy_(state[f"{name}.exp_avg"])
                square.copy_(state[f"{name}.exp_avg_sq"])
