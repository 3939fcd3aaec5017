"""Logistic regression to convergence: the minimum of |w|^2 / 2 + C * sum of log(1 + exp(-s f)), f = x.w + b, s = +-1.

It is what scikit-learn's LogisticRegression(C=C) minimises; the intercept b has no penalty. Newton's method with
halved steps finds it to rounding: for many small problems at once, or, where there are more columns than texts, in as
many dimensions as there are texts. Columns may be of any scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

ROUNDS = 100
HALVINGS = 40
CLOSE = 1e-10  # Newton's decrement, as a share of the objective, at which the step that it belongs to is the last one
ROUNDING = 1e-13  # share of the objective by which it may seem to grow
DAMPING = [10.0**power for power in range(-15, 1)]  # shares of its diagonal added to a matrix that cannot be factored
LARGE = 1e8  # C |x|^2 of a text above which rounding leaves too little of the products of texts
COLUMNS = 8192  # columns of a product in float64 at one time


def fit(x: Tensor, positive: Tensor, weight: Tensor | None = None, C: float = 1.0) -> tuple[Tensor, Tensor]:
    """Problems x [T, n, k], positive [T, n] bool -> w [T, k] and b [T], all in float64.

    `weight` [T, n] counts each text so many times; 0 for one that is not there.
    """
    x, sign = x.double(), positive.double() * 2 - 1
    if not bool(x.isfinite().all()):
        raise ValueError("the columns of a regression hold numbers that are not finite")
    count = C * (torch.ones_like(sign) if weight is None else weight.double())
    # b takes what the columns have in common: a large mean would only drown their differences in rounding.
    middle = (x * count[..., None]).sum(1) / count.sum(1, keepdim=True)
    design = torch.cat([x - middle[:, None], x.new_ones(*x.shape[:2], 1)], dim=2)
    penalty = x.new_ones(design.shape[2])
    penalty[-1] = 0.0

    def objective(theta: Tensor, f: Tensor) -> Tensor:
        return (penalty * theta.square()).sum(1) / 2 + (count * _loss(f, sign)).sum(1)

    theta = x.new_zeros(len(x), design.shape[2])
    f = torch.zeros_like(sign)
    value = objective(theta, f)
    for _ in range(ROUNDS):
        pull, curved = _derivatives(f, sign, count)
        gradient = _apply(design.mT, pull) + penalty * theta
        hessian = design.mT @ (design * curved[..., None]) + penalty.diag()
        step = -_solve(hessian, gradient[..., None]).squeeze(2)
        decrement = -(gradient * step).sum(1)
        theta, f, value, stuck = _descend(objective, theta, f, step, _apply(design, step), value)
        if bool(((decrement <= CLOSE * value) | stuck).all()):
            w, b = theta[:, :-1], theta[:, -1]
            return w, b - (middle * w).sum(1)
    raise RuntimeError(f"logistic regression did not converge in {ROUNDS} rounds")


def fit_kernel(gram: Tensor, positive: Tensor, C: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same by the products x x^T [n, n] alone: -> a [n] and b [1], with w = x^T a, so that f = gram a + b.

    One problem with many columns: the time does not depend on their number. The texts' mean should be 0, or near it.
    """
    gram, sign = gram.double(), positive.double() * 2 - 1
    if not _is_fine(gram, C):
        raise ValueError(f"products of texts are finite and of C |x|^2 <= {LARGE:g}; fit_one takes others")

    def objective(theta: Tensor, f: Tensor) -> Tensor:
        # f - b = gram a, so the first term is |w|^2 / 2.
        return (theta[:, :-1] * (f - theta[:, -1:])).sum(1) / 2 + C * _loss(f, sign).sum(1)

    theta, f = gram.new_zeros(1, len(sign) + 1), gram.new_zeros(1, len(sign))
    value = objective(theta, f)
    for _ in range(ROUNDS):
        pull, curved = _derivatives(f[0], sign, C)
        left = theta[0, :-1] + pull
        da, db = _kernel_step(gram, theta[0, :-1], left, curved)
        moved = gram @ da
        decrement = -(left @ moved + pull.sum() * db)
        step = torch.cat([da, db])[None]
        theta, f, value, stuck = _descend(objective, theta, f, step, (moved + db)[None], value)
        if bool(((decrement <= CLOSE * value) | stuck).all()):
            return theta[0, :-1], theta[0, -1:]
    raise RuntimeError(f"logistic regression did not converge in {ROUNDS} rounds")


def _kernel_step(gram: Tensor, a: Tensor, left: Tensor, curved: Tensor) -> tuple[Tensor, Tensor]:
    """Newton's step for a [n] and b [1]: (1 + curved gram) da + curved db = -left, and the sum of a + da is 0."""
    root = curved.sqrt()[:, None]
    system = root * gram * root.T
    system.diagonal().add_(1.0)
    right = torch.stack([-left, -curved], dim=1)
    # (1 + curved gram)^-1 by a system that is symmetric, and without a division by curvatures near 0.
    plain, along = (right - root * _solve(system, root * (gram @ right))).unbind(1)
    db = -(a.sum() + plain.sum()) / along.sum()
    return plain + db * along, db[None]


def _descend(
    objective: Callable[[Tensor, Tensor], Tensor], theta: Tensor, f: Tensor, step: Tensor, df: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take each problem's step, halved until its objective is no larger; whether there is none such comes last, [T]."""
    size = torch.ones_like(value)[:, None]
    allowed = value + ROUNDING * value.abs()
    for _ in range(HALVINGS):
        now = objective(theta + size * step, f + size * df)
        worse = ~(now <= allowed)
        if not bool(worse.any()):
            break
        size = torch.where(worse[:, None], size / 2, size)
    else:
        size = torch.where(worse[:, None], 0.0, size)
    return theta + size * step, f + size * df, torch.where(worse, value, now), worse


def fit_one(train: Tensor, positive: Tensor, test: Tensor, C: float = 1.0) -> Tensor:
    """One problem, train [n, u] and test [v, u] -> f [v] of the test texts, in float64; by the shorter way."""
    if train.shape[1] <= len(train):
        w, b = fit(train[None], positive[None], C=C)
        return test.double() @ w[0] + b
    middle = train.mean(0, dtype=torch.float64)
    gram = products(train, train, middle)
    if _is_fine(gram, C):
        a, b = fit_kernel(gram, positive, C)
        return products(test, train, middle) @ a + b
    # The same problem along the n directions of the train texts: slower, and exact at any scale.
    axes, own = torch.linalg.qr((train.double() - middle).T)
    w, b = fit(own.T[None], positive[None], C=C)
    return (test.double() - middle) @ (axes @ w[0]) + b


def products(left: Tensor, right: Tensor, middle: Tensor) -> Tensor:
    """left [n, u], right [v, u], both less middle [u] -> left right^T [n, v] in float64, without a copy of all columns
    in it."""
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    parts = (tensor.split(COLUMNS, dim=-1) for tensor in (left, right, middle))
    for part, other, mean in zip(*parts, strict=True):
        total.addmm_(part.double() - mean, (other.double() - mean).T)
    return total


def _is_fine(gram: Tensor, C: float) -> bool:
    """Whether these products do for a regression."""
    return bool((C * gram.diagonal() <= LARGE).all())


def _loss(f: Tensor, sign: Tensor) -> Tensor:
    """log(1 + exp(-s f))."""
    return torch.logaddexp(-sign * f, torch.zeros_like(f))


def _derivatives(f: Tensor, sign: Tensor, count: Tensor | float) -> tuple[Tensor, Tensor]:
    """The loss's first and second one by f, exact even where it is next to nothing."""
    wrong = (-sign * f).sigmoid()
    return -count * sign * wrong, count * wrong * (sign * f).sigmoid()


def _apply(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[..., None]).squeeze(2)


def _solve(matrices: Tensor, right: Tensor) -> Tensor:
    """matrices^-1 right, for matrices that are positive definite but for rounding."""
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    factor, info = torch.linalg.cholesky_ex(matrices)
    damped = torch.zeros_like(info, dtype=torch.bool)
    for share in DAMPING:
        if not bool(info.any()):
            break
        damped |= info > 0
        factor, info = torch.linalg.cholesky_ex(matrices + (share * damped[..., None] * diagonal).diag_embed())
    return torch.cholesky_solve(right, factor)


BATCH, EPOCHS, PATIENCE, RATE = 250, 100, 10, 1e-2  # SAEBench's


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
