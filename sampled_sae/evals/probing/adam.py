"""SAEBench's probe on many columns: AdamW on batches, stopped early and chosen by its accuracy on the test texts.

What it reports is therefore too high. It is here to compare with numbers of SAEBench; `fit` has the optimum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

BATCH, EPOCHS, PATIENCE, RATE = 250, 100, 10, 1e-2
"""SAEBench's."""


def fit_adam(train: Tensor, positive: Tensor, test: Tensor, test_positive: Tensor, columns: int, seed: int) -> Tensor:
    """train [n, u], test [v, u] -> f [v] of the test texts at the best epoch.

    `columns`, at least u, is the number of columns with those that are 0 everywhere: it sets the size of the start.
    """
    generator = torch.Generator().manual_seed(seed)
    train, test, y = train.float(), test.float(), positive.float()
    bound = columns**-0.5
    start = (2 * torch.rand(train.shape[1] + 1, generator=generator) - 1) * bound
    w = nn.Parameter(start[:-1].to(train.device))
    b = nn.Parameter(start[-1:].to(train.device))
    optimiser = torch.optim.AdamW([w, b], lr=RATE)
    best, best_right, waited = test @ w.detach() + b.detach(), -1, 0
    for _ in range(EPOCHS):
        order = torch.randperm(len(train), generator=generator).to(train.device)
        for rows in order.split(BATCH):
            with torch.enable_grad():
                loss = binary_cross_entropy_with_logits(train[rows] @ w + b, y[rows])
                w.grad, b.grad = torch.autograd.grad(loss, [w, b])
            optimiser.step()
        f = test @ w.detach() + b.detach()
        right = int(((f > 0) == test_positive).sum())
        waited += 1
        if right > best_right:
            best, best_right, waited = f, right, 0
        if waited >= PATIENCE:
            break
    return best.double()
