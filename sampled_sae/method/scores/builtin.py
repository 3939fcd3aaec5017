"""The built-in scores: eleven without a state, and a learned gate."""

from __future__ import annotations

import torch
from torch import Tensor

from sampled_sae.method.scores import Sums, register_input_score, register_score

RIDGE = 0.01
"""The paper's lambda."""


@register_score("l2", sums=("energy",))
def l2(sums: Sums) -> Tensor:
    """Column norm. Energy counts, so 100 on 5% of the tokens beats 10 on half of them."""
    return sums.energy.sqrt()


@register_score("squared_l2", sums=("energy",))
def squared_l2(sums: Sums) -> Tensor:
    """Squared column norm plus the ridge: the order of `l2`, so the same top pool; another when sampled."""
    # In double precision, or the ridge would swallow the order of weak latents.
    return l2(sums).double().square() + RIDGE


@register_score("entropy", sums=("total", "z_log_z"))
def entropy(sums: Sums) -> Tensor:
    """Entropy of a latent's activation over the tokens, by the paper's formula: most spread first."""
    limits = torch.finfo(sums.total.dtype)
    safe = sums.total.clamp_min(limits.tiny)
    # -sum (z/S) log (z/S) = log S - sum (z log z) / S; a latent without activations gets 0.
    log = safe.log()
    value = log - sums.z_log_z / safe
    # A latent that fires on one token has entropy 0, not the rounding error of the difference: such latents tie.
    significant = value > 16 * limits.eps * (1 + log.abs())
    return torch.where((sums.total > 0) & significant, value, 0)


@register_score("low_entropy", sums=("total", "z_log_z"))
def low_entropy(sums: Sums) -> Tensor:
    """What the paper's prose describes: most selective first; latents that did not fire come last."""
    total = sums.total
    spread = total.new_full((), float(sums.tokens)).log()  # made on the device: steps are captured as a CUDA graph
    return torch.where(total > 0, (spread - entropy(sums)).clamp_min(0), -torch.inf)


@register_score("uniform", needs_activations=False)
def uniform(Z: Tensor, generator: torch.Generator) -> Tensor:
    """A fresh random number for each latent: the pool is a random subset."""
    return torch.rand((*Z.shape[:-2], Z.shape[-1]), generator=generator, device=Z.device)


@register_score("prefix", needs_activations=False)
def prefix(Z: Tensor) -> Tensor:
    """A constant: ties go to the lowest index, so the pool is always the first P latents (the paper's Uniform)."""
    return torch.ones((*Z.shape[:-2], Z.shape[-1]), device=Z.device)


@register_score("l1", sums=("total",))
def l1(sums: Sums) -> Tensor:
    """Sum of the activations: consistent firing counts as much as strength."""
    total: Tensor = sums.total
    return total


@register_score("frequency", sums=("fired",))
def frequency(sums: Sums) -> Tensor:
    """Share of the tokens on which a latent is positive."""
    return sums.fired / sums.tokens


@register_score("participation", sums=("total", "energy"))
def participation(sums: Sums) -> Tensor:
    """Participation ratio (sum z)^2 / sum z^2: the effective number of tokens, whatever the strength."""
    return torch.where(sums.energy > 0, sums.total.square() / sums.energy, 0)


@register_input_score("preactivation_l2")
def preactivation_l2(x: Tensor, W_enc: Tensor, b_enc: Tensor) -> Tensor:
    """Norm over the tokens before the ReLU, from the Gram matrix of the batch: m d^2 operations instead of B m d.

    Strong negative pre-activations count as much as positive ones, so this is not the order of `l2`.
    """
    gram = x.mT @ x
    along = (W_enc @ gram * W_enc).sum(dim=-1)
    mean = (x.sum(dim=-2, keepdim=True) @ W_enc.T).squeeze(-2)
    return (along + 2 * b_enc * mean + x.shape[-2] * b_enc.square()).clamp_min(0).sqrt()


@register_score("leverage")
def leverage(Z: Tensor) -> Tensor:
    """Ridge leverage z_j' (Z Z' + lambda I)^-1 z_j, lambda = 0.01 of the mean eigenvalue of Z Z'.

    Costs B^2 m operations and a Cholesky factor of B x B: for small batches, groups or GPUs.
    """
    tokens = Z.shape[-2]
    gram = Z @ Z.transpose(-1, -2)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = (RIDGE * diagonal.mean(dim=-1)).clamp_min(torch.finfo(Z.dtype).tiny ** 0.5)
    gram = gram + ridge[..., None, None] * torch.eye(tokens, dtype=Z.dtype, device=Z.device)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), Z, upper=False)
    return half.square().sum(dim=-2)


GATE_RATE = 0.1
"""The most that a gate moves in one step; it decides how fast samples in proportion concentrate, not the order."""


def learn_gates(state: Tensor, gain: Tensor, pool: Tensor) -> None:
    """Move the gates [m] in the pool by GATE_RATE * (a - b) / (a + b), by -GATE_RATE where a = 0.

    a is the gain, at least 0, and b its mean over the pool. The gain of a latent is the increase of the batch's loss if
    the latent were removed from it: the exact difference of the loss between the two positions of its gate. In a pool
    of fixed size only the order counts, so gates move relative to the mean gain. A gate outside of the pool stays where
    it is, until others have fallen below it.
    """
    a = torch.where(pool, gain, 0).clamp_min(0)
    b = a.sum() / pool.sum()
    step = torch.where(a > 0, (a - b) / (a + b), -1)
    state.add_(torch.where(pool, step, 0), alpha=GATE_RATE)


MOST = 700.0
"""Largest difference of two gates that counts; the exponential of 710 would be infinite."""


@register_score("gate", needs_activations=False, learn=learn_gates)
def gate(Z: Tensor, state: Tensor) -> Tensor:
    """A learned number per latent decides whether it enters the pool: its exponential, so that a sample in proportion
    tries latents with lower gates, too."""
    # Gates drift apart as long as training goes on, but the last ones in the pool stay near the lowest of all: relative
    # to that one no exponential vanishes, and only those far inside of the pool are limited.
    return (state.double() - state.min()).clamp_max(MOST).exp().expand(*Z.shape[:-2], Z.shape[-1])
