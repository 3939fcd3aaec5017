"""A learned gate: one number per latent decides whether it enters the pool, and learns from what the latent was worth.

The gain of a latent is the increase of the batch's loss if the latent were removed from it: the exact difference of the
loss between the two positions of its gate. In a pool of fixed size only the order counts, so gates move relative to the
mean gain of the pool. A gate outside of the pool stays where it is, until others have fallen below it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sampled_sae.method.scores import register_score

RATE = 0.1
"""The most that a gate moves in one step; it decides how fast samples in proportion concentrate, not the order."""


def learn(state: Tensor, gain: Tensor, pool: Tensor) -> None:
    """Move the gates [m] in the pool by RATE * (a - b) / (a + b), by -RATE where a = 0.

    a is the gain, at least 0, and b its mean over the pool.
    """
    a = torch.where(pool, gain, 0).clamp_min(0)
    b = a.sum() / pool.sum()
    step = torch.where(a > 0, (a - b) / (a + b), -1)
    state.add_(torch.where(pool, step, 0), alpha=RATE)


@register_score("gate", needs_activations=False, learn=learn)
def gate(Z: Tensor, state: Tensor) -> Tensor:
    """The exponential of each gate: sampled in proportion, latents with lower gates are tried, too."""
    return state.exp().expand(*Z.shape[:-2], Z.shape[-1])
