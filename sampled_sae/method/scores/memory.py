"""Scores with a memory: a moving average over batches ranks the latents. `PoolConfig.memory` is its decay."""

from __future__ import annotations

import torch
from torch import Tensor


def remember_(memory: Tensor, q: Tensor, decay: float) -> Tensor:
    """A batch's scores q [groups, m] -> the same mixed with those before, decay * memory + (1 - decay) * q.

    `memory` [m] becomes the mean of the result over the groups. It begins at 0, which scales all latents alike
    and so changes neither a pool of the highest nor one in proportion to the score. A score of -inf counts as 0.
    """
    mixed = decay * memory + (1 - decay) * torch.where(q > -torch.inf, q, 0)
    memory.copy_(mixed.mean(0))
    return mixed
