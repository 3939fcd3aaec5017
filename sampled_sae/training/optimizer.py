"""From gradients to new weights: projection, clipping, Adam, unit rows, and the learning rate over time."""

from __future__ import annotations

import torch
from torch import Tensor

from sampled_sae.method.config import OptimizerConfig
from sampled_sae.method.parameters import Parameters, unit_rows_


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Rate at `step` (from 0): warm-up from 0, constant, then linear to 0 at the end."""
    warmup = min(config.warmup_steps, steps // 5)
    decay_start = steps - round(steps * config.decay)
    if step < warmup:
        return config.lr * (step / warmup)
    if config.decay > 0 and step >= decay_start:
        return config.lr * ((steps - step) / (steps - decay_start))
    return config.lr


def remove_parallel_(gradient: Tensor, W: Tensor) -> None:
    """Take out of each row of the gradient [m, d] its part along the unit row of W, in place."""
    along = (gradient * W).sum(dim=1, keepdim=True)
    gradient.addcmul_(along, W, value=-1)


def clip_(gradients: Parameters, limit: float) -> Tensor:
    """Scale all gradients so that their common norm is at most `limit`; returns the norm before."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
    torch._foreach_mul_(list(gradients), (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


class Optimizer:
    """Adam over an SAE's four tensors."""

    def __init__(self, weights: Parameters, config: OptimizerConfig):
        self.weights = weights
        self.config = config
        fused = weights.W_dec.device.type in ("cpu", "cuda")
        self.adam = torch.optim.Adam(
            list(weights), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused
        )

    def update(self, gradients: Parameters, lr: float) -> Tensor:
        """One step in place; returns the gradient's norm before clipping."""
        remove_parallel_(gradients.W_dec, self.weights.W_dec)
        norm = clip_(gradients, self.config.clip)
        self.adam.param_groups[0]["lr"] = lr
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        self.adam.step()
        for weight in self.weights:
            weight.grad = None
        unit_rows_(self.weights.W_dec)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Adam's moments and step count by name; empty before the first step."""
        return {
            f"{name}.{key}": value
            for name, weight in zip(Parameters._fields, self.weights, strict=True)
            for key, value in self.adam.state[weight].items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state`."""
        for name, weight in zip(Parameters._fields, self.weights, strict=True):
            own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
            if own:
                self.adam.state[weight] = {
                    "step": own["step"].cpu() if weight.device.type == "cpu" else own["step"].to(weight.device),
                    "exp_avg": own["exp_avg"].to(weight.device),
                    "exp_avg_sq": own["exp_avg_sq"].to(weight.device),
                }
