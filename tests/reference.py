"""The specification: one training step's loss in plain dense torch, for autograd to differentiate, and its optimizer.

Short and slow on purpose. The trainer takes the sparse path (`step.py`); tests prove it equal to this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sampled_sae.method.config import OptimizerConfig


def activations(x: Tensor, W_enc: Tensor, b_enc: Tensor, b_dec: Tensor) -> Tensor:
    """x [B, d], W_enc [d, m] -> post-ReLU activations [B, m]."""
    return torch.relu((x - b_dec) @ W_enc + b_enc)


def batch_topk(z: Tensor, k: int, group: int | None = None, pool: Tensor | None = None) -> Tensor:
    """Keep, of each `group` of tokens of z [B, m], the k*group largest positive values inside the pool.

    `pool` [groups, m] bool says who may be kept; none means everyone. Returns [B, m], zeros elsewhere.
    """
    tokens, m = z.shape
    group = tokens if group is None else group
    kept = []
    for index, part in enumerate(z.split(group)):
        allowed = part if pool is None else part * pool[index]
        order = allowed.detach().reshape(-1).sort(descending=True, stable=True).indices[: k * group]
        mask = torch.zeros(group * m, dtype=z.dtype, device=z.device)
        mask[order] = 1
        kept.append(allowed * mask.view(group, m))
    return torch.cat(kept)


def prefix_loss(x: Tensor, codes: Tensor, W_dec: Tensor, b_dec: Tensor, prefixes: Sequence[int]) -> Tensor:
    """Mean over nested prefixes of the loss of the reconstruction by the first `width` latents alone."""
    losses = [reconstruction_loss(x, reconstruct(codes[:, :width], W_dec[:width], b_dec)) for width in prefixes]
    return torch.stack(losses).mean()


def reconstruct(codes: Tensor, W_dec: Tensor, b_dec: Tensor) -> Tensor:
    """codes [B, m], W_dec [m, d] -> x_hat [B, d]."""
    return codes @ W_dec + b_dec


def reconstruction_loss(x: Tensor, x_hat: Tensor) -> Tensor:
    """Mean over tokens of the squared error summed over the input's width."""
    return (x - x_hat).square().sum(-1).mean()


def auxk_loss(x: Tensor, x_hat: Tensor, z: Tensor, dead: Tensor, W_dec: Tensor, k_aux: int) -> Tensor:
    """What the dead latents (bool [m]) explain of the error, relative to the error's variance."""
    if not dead.any():
        return x.new_zeros(())
    error = (x - x_hat).detach()
    among_dead = torch.where(dead, z, -torch.inf)
    top = among_dead.topk(min(k_aux, int(dead.sum())), dim=1)
    codes = torch.zeros_like(z).scatter(1, top.indices, top.values)
    variance = (error - error.mean(0)).square().sum(-1).mean()
    return ((error - codes @ W_dec).square().sum(-1).mean() / variance).nan_to_num(0.0)


class Adam:
    """The optimizer over W_enc, b_enc, W_dec, b_dec: its weights and moments, changed by `step`."""

    def __init__(self, weights: Sequence[Tensor], config: OptimizerConfig):
        self.config, self.weights = config, [w.double().clone() for w in weights]
        self.means = [torch.zeros_like(w) for w in self.weights]
        self.squares = [torch.zeros_like(w) for w in self.weights]
        self.updates = 0

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """One update by gradients of the loss, at this learning rate."""
        config, W_dec = self.config, self.weights[2]
        self.updates += 1
        g_enc, g_b_enc, g_dec, g_b_dec = (g.double() for g in gradients)
        g_dec = g_dec - (g_dec * W_dec).sum(1, keepdim=True) * W_dec
        parts = [g_enc, g_b_enc, g_dec, g_b_dec]
        norm = torch.cat([g.flatten() for g in parts]).norm()
        limit = sum(g.numel() for g in parts) ** 0.5 if config.gradient == "normalize" else min(config.clip, norm)
        rates = (config.rates.W_enc, config.rates.b_enc, config.rates.W_dec, config.rates.b_dec)
        for i, (g, rate) in enumerate(zip(parts, rates, strict=True)):
            g = g * limit / norm
            self.means[i] = config.beta1 * self.means[i] + (1 - config.beta1) * g
            self.squares[i] = config.beta2 * self.squares[i] + (1 - config.beta2) * g**2
            mean = self.means[i] / (1 - config.beta1**self.updates)
            if config.cautious and g.ndim == 2:
                for row in range(len(g)):
                    if g[row].any():
                        agrees = mean[row] * g[row] > 0
                        mean[row] *= agrees / max(float(agrees.double().mean()), 0.1)
            root = (self.squares[i] / (1 - config.beta2**self.updates)).sqrt()
            self.weights[i] = self.weights[i] - lr * rate * mean / (root + config.eps)
        self.weights[2] = self.weights[2] / self.weights[2].norm(dim=1, keepdim=True)
