"""From gradients to new weights: projection, normalization, Adam, unit rows, and the learning rate over time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adam import adam

from sampled_sae.method.config import OptimizerConfig
from sampled_sae.method.latents import WHOLE, Shard
from sampled_sae.method.parameters import LEAST_SHARE, Weights, gradient_factor, unit_rows_


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Rate at `step` (from 0): warm-up from 0, constant, then linear to 0 at the end."""
    peak = config.lr
    assert peak is not None  # runs and learners fill it in
    warmup = min(config.warmup_steps, steps // 5)
    decay_start = steps - round(steps * config.decay)
    if step < warmup:
        return peak * (step / warmup)
    if config.decay > 0 and step >= decay_start:
        return peak * ((steps - step) / (steps - decay_start))
    return peak


def remove_parallel_(gradient: Tensor, W: Tensor) -> None:
    """Take out of each row of the gradient [m, d] its part along the unit row of W, in place."""
    along = (gradient * W).sum(dim=1, keepdim=True)
    gradient.addcmul_(along, W, value=-1)


def scale_(gradients: Weights, config: OptimizerConfig, shard: Shard = WHOLE) -> Tensor:
    """Normalize all gradients together, or clip them, in place; returns their common norm before."""
    norms, parameters = torch.stack(torch._foreach_norm(list(gradients))), sum(g.numel() for g in gradients)
    if shard.number > 1:  # all ranks have the same b_dec, and latents of their own
        shared = gradients._fields.index("b_dec")
        norms = shard.stack(norms)
        norms[1:, shared] = 0
        parameters = shard.number * parameters - (shard.number - 1) * gradients.b_dec.numel()
    norm = torch.linalg.vector_norm(norms)
    torch._foreach_mul_(list(gradients), gradient_factor(norm, parameters, config))
    return norm


ROWS_AT_ONCE = {"cpu": 512}
"""Rows that a cautious step handles at a time, so that its working copies stay in a core's cache; elsewhere 2^14, since
each part waits for the device once."""


def adam_(
    W: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, count: Tensor, lr: float, config: OptimizerConfig
) -> None:
    """Adam's step for W of any shape in place; `count` are the steps before. The class `torch.optim.Adam` does the same
    but first imports torch's compiler, which takes longer than importing torch."""
    adam(
        *([W], [gradient], [mean], [square], [], [count]),
        lr=lr,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=0.0,
        amsgrad=False,
        maximize=False,
        fused=W.device.type in ("cpu", "cuda"),
    )


def cautious_adam_(
    W: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, updates: int, lr: float, config: OptimizerConfig
) -> None:
    """Adam's step number `updates` (from 1) for W [m, d] in place, of which each row takes only a part.

    The elements of a row whose new mean has the gradient's sign move, by Adam's step over their share of the row (at
    least `LEAST_SHARE`); the others stay. A row whose gradient is zero moves by Adam's step.
    """
    rows = ROWS_AT_ONCE.get(W.device.type, 2**14)
    for w, g, m, s in zip(*(tensor.split(rows) for tensor in (W, gradient, mean, square)), strict=True):
        step = torch.zeros_like(w)
        count = torch.tensor(float(updates - 1), device=w.device)
        adam_(step, g, m, s, count, lr, config)  # moves from 0, so `step` is what it would add
        part = (m * g).sign_().clamp_min_(0)  # comparisons are slower on a CPU
        share = part.mean(dim=1, keepdim=True)
        part.div_(share.clamp_min(LEAST_SHARE))
        unmoved = (share[:, 0] == 0).nonzero()[:, 0]
        part[unmoved[~g[unmoved].any(dim=1)]] = 1
        w.addcmul_(step, part)


class Optimizer:
    """Adam over an SAE's tensors."""

    def __init__(self, weights: Weights, config: OptimizerConfig, shard: Shard = WHOLE):
        self.weights, self.config, self.shard = weights, config, shard
        self.updates = 0
        self.moments: dict[str, dict[str, Tensor]] = {}
        """Of each tensor: Adam's moments and step count, under the names that `torch.optim.Adam` has for them."""

    def update(self, gradients: Weights, lr: float) -> Tensor:
        """One step in place; returns the gradient's norm before it was scaled."""
        remove_parallel_(gradients.W_dec, self.weights.W_dec)
        norm = scale_(gradients, self.config, self.shard)
        self.updates += 1
        for name, weight, gradient in zip(self.weights._fields, self.weights, gradients, strict=True):
            rate, own = lr * getattr(self.config.rates, name, 1.0), self._moments(name, weight)
            if self.config.cautious and weight.ndim == 2:
                own["step"] += 1
                cautious_adam_(weight, gradient, own["exp_avg"], own["exp_avg_sq"], self.updates, rate, self.config)
            else:
                adam_(weight, gradient, own["exp_avg"], own["exp_avg_sq"], own["step"], rate, self.config)
        unit_rows_(self.weights.W_dec)
        return norm

    def _moments(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        if name not in self.moments:
            step = torch.zeros((), device=weight.device if weight.device.type == "cuda" else "cpu")
            zeros = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            self.moments[name] = {"step": step, **zeros}
        return self.moments[name]

    def state(self) -> dict[str, Tensor]:
        """Adam's moments and step count by name; empty before the first step."""
        return {f"{name}.{key}": value for name, own in self.moments.items() for key, value in own.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state`."""
        for name, weight in zip(self.weights._fields, self.weights, strict=True):
            own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
            if own:
                self.updates = int(own["step"])
                self.moments[name] = {
                    "step": own["step"].cpu() if weight.device.type == "cpu" else own["step"].to(weight.device),
                    "exp_avg": own["exp_avg"].to(weight.device),
                    "exp_avg_sq": own["exp_avg_sq"].to(weight.device),
                }
