"""The specification: one training step's loss in plain dense torch, for autograd to differentiate.

Short and slow on purpose. The trainer takes the sparse path (`step.py`); tests prove it equal to this.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
