"""Sparse codes: the few activations that were kept, and the products that touch only them.

Every matrix product is an `embedding_bag`: a sum of rows of a table, weighted, one bag an output row. The
order of each sum is fixed, so on a CPU results are the same in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Codes(NamedTuple):
    """Kept activations, ordered by token: value[i] is latent[i]'s activation on token[i]."""

    token: Tensor
    """[n] long."""
    latent: Tensor
    """[n] long."""
    value: Tensor
    """[n], all positive."""
    tokens: int
    """B, the number of tokens."""
    latents: int
    """m, the number of latents."""

    def dense(self) -> Tensor:
        """[B, m], for tests and small cases."""
        out = self.value.new_zeros(self.tokens, self.latents)
        out[self.token, self.latent] = self.value
        return out


def starts(groups: Tensor, count: int) -> Tensor:
    """Sorted group numbers [n] -> where each of the `count` groups starts [count]."""
    return torch.searchsorted(groups, torch.arange(count, device=groups.device))


def decode(codes: Codes, W_dec: Tensor) -> Tensor:
    """Codes and W_dec [m, d] -> sum of the active latents' rows [B, d], without bias."""
    return F.embedding_bag(
        codes.latent, W_dec, starts(codes.token, codes.tokens), mode="sum", per_sample_weights=codes.value
    )


def decode_with_pullback(codes: Codes, W_dec: Tensor) -> tuple[Tensor, Tensor]:
    """`decode`, and the leaf through which `value_gradient` later flows back: (x_hat [B, d], leaf [n])."""
    with torch.enable_grad():
        leaf = codes.value.detach().requires_grad_()
        x_hat = decode(codes._replace(value=leaf), W_dec.detach())
    return x_hat, leaf


def value_gradient(x_hat: Tensor, leaf: Tensor, gradient: Tensor) -> Tensor:
    """Gradient for x_hat [B, d] -> gradient for each kept value [n]: gradient[token] . W_dec[latent]."""
    return torch.autograd.grad(x_hat, leaf, gradient)[0]


class ByLatent(NamedTuple):
    """The same codes grouped by latent."""

    order: Tensor
    """[n] positions in the codes, latents ascending, tokens ascending within a latent."""
    token: Tensor
    """[n] token of each, in that order."""
    start: Tensor
    """[m] where each latent's group starts."""


def by_latent(codes: Codes) -> ByLatent:
    """Group codes by latent (a stable sort, so the order of sums is fixed)."""
    latent, order = codes.latent.sort(stable=True)
    return ByLatent(order, codes.token[order], starts(latent, codes.latents))


def sum_by_latent(groups: ByLatent, weight: Tensor, rows: Tensor) -> Tensor:
    """weight [n], rows [B, d] -> [m, d]: for each latent the weighted sum of its tokens' rows."""
    return F.embedding_bag(
        groups.token, rows, groups.start, mode="sum", per_sample_weights=weight[groups.order].to(rows.dtype)
    )


def total_by_latent(groups: ByLatent, weight: Tensor) -> Tensor:
    """weight [n] -> [m]: for each latent the sum of its weights."""
    # Differences of a running sum, in double precision so that nothing is lost to cancellation.
    running = F.pad(weight[groups.order].cumsum(0, dtype=torch.float64), (1, 0))
    end = torch.cat([groups.start[1:], groups.start.new_tensor([len(weight)])])
    return (running[end] - running[groups.start]).to(weight.dtype)
