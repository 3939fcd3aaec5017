"""One pass over each parameter: projection, clipping, Adam, unit rows, and the 16-bit copy that the products read."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Rate(NamedTuple):
    """Adam's numbers at one step."""

    now: Tensor
    """[3]: learning rate over the mean's bias correction, root of the square's, and the gradient's clipping."""
    beta1: float
    beta2: float
    eps: float


@triton.jit
def moved(w, mean, square, g, now, beta1, beta2, eps):
    """Adam's new weight, mean and square."""
    g *= tl.load(now + 2)
    mean += (1 - beta1) * (g - mean)
    square = beta2 * square + (1 - beta2) * g * g
    return w - tl.load(now) * mean / (tl.sqrt(square) / tl.load(now + 1) + eps), mean, square


@triton.jit
def _adam_rows(W, mean, square, copy, G, slot, now, beta1, beta2, eps, d, stride,
               UNIT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    j = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    at, inside = j * d + c, c < d
    w = tl.load(W + at, mask=inside, other=0.0)
    m = tl.load(mean + at, mask=inside, other=0.0)
    s = tl.load(square + at, mask=inside, other=0.0)
    row = tl.load(slot + j)
    g = tl.load(G + row.to(tl.int64) * d + c, mask=c < tl.where(row >= 0, d, 0), other=0.0)
    if UNIT:
        g -= tl.sum(g * w) * w
    w, m, s = moved(w, m, s, g, now, beta1, beta2, eps)
    if UNIT:
        w = w / (tl.sqrt(tl.sum(w * w)) + 1.1920929e-07)
    tl.store(W + at, w, mask=inside)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, s, mask=inside)
    tl.store(copy + j * stride + c, w.to(copy.dtype.element_ty), mask=inside)


@triton.jit
def _adam_vector(w_at, mean, square, G, now, beta1, beta2, eps, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    w, m, s = tl.load(w_at + at, mask=inside), tl.load(mean + at, mask=inside), tl.load(square + at, mask=inside)
    w, m, s = moved(w, m, s, tl.load(G + at, mask=inside), now, beta1, beta2, eps)
    tl.store(w_at + at, w, mask=inside)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, s, mask=inside)


def adam_rows_(
    W: Tensor, mean: Tensor, square: Tensor, copy: Tensor, G: Tensor, slot: Tensor, rate: Rate, unit: bool
) -> None:
    """Move W [m, d] by the gradient rows G [rows, d], where `slot` [m] says which row is whose (-1: zero).

    With `unit`, the gradient's part along W's unit rows is taken out before, and rows
    are scaled to norm 1 after. `copy` [m, stride] gets the new weights in its own type.
    """
    m, d = W.shape
    block = triton.next_power_of_2(d)
    warps = 4 if block <= 2048 else 8
    _adam_rows[(m,)](W, mean, square, copy, G, slot, *rate, d, copy.shape[1], UNIT=unit, BLOCK=block, num_warps=warps)


def adam_vector_(w: Tensor, mean: Tensor, square: Tensor, G: Tensor, rate: Rate) -> None:
    """Move the vector w [n] by the gradient G [n]."""
    _adam_vector[(triton.cdiv(len(w), 1024),)](w, mean, square, G, *rate, len(w), BLOCK=1024)
