"""Sparse codes: the few activations that are not 0, and the products that touch only them.

Every matrix product is an `embedding_bag`: a weighted sum of rows of a table, one bag per output row. The
order of each sum is fixed, so on a CPU results are the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SparseCodes(NamedTuple):
    """Codes [tokens, d_sae] as their nonzero entries, by token and then by latent."""

    token: Tensor
    """[n] integers, ascending."""
    latent: Tensor
    """[n] integers."""
    value: Tensor
    """[n]: code of latent[i] on token[i]."""
    tokens: int
    """Number of tokens."""
    d_sae: int
    """Number of latents."""

    @staticmethod
    def from_dense(codes: Tensor) -> SparseCodes:
        """Codes [tokens, d_sae] -> their nonzero entries."""
        token, latent = codes.nonzero(as_tuple=True)
        return SparseCodes(token, latent, codes[token, latent], *codes.shape)

    @staticmethod
    def cat(parts: Sequence[SparseCodes]) -> SparseCodes:
        """Codes of consecutive tokens, of the same latents."""
        if len(parts) == 1:
            return parts[0]
        first, shifted = 0, []
        for part in parts:
            shifted.append(part.token + first)
            first += part.tokens
        latent, value = torch.cat([part.latent for part in parts]), torch.cat([part.value for part in parts])
        return SparseCodes(torch.cat(shifted), latent, value, first, parts[0].d_sae)

    def dense(self) -> Tensor:
        """[tokens, d_sae], for small cases."""
        out = self.value.new_zeros(self.tokens, self.d_sae)
        out[self.token, self.latent] = self.value
        return out

    def decode(self, W_dec: Tensor) -> Tensor:
        """W_dec [d_sae, d_in] -> sum of the active latents' rows [tokens, d_in], without bias."""
        return F.embedding_bag(
            self.latent, W_dec, starts(self.token, self.tokens), mode="sum", per_sample_weights=self.value
        )

    def starts(self) -> Tensor:
        """Index at which each token's entries start, and the end of the last: [tokens + 1]."""
        return starts(self.token, self.tokens + 1)

    def where(self, kept: Tensor) -> SparseCodes:
        """The entries with kept [n] bool."""
        index = kept.nonzero().squeeze(1)
        return self._replace(token=self.token[index], latent=self.latent[index], value=self.value[index])

    def rows(self, tokens: Tensor) -> SparseCodes:
        """Codes of the tokens [t], in this order."""
        own = self.starts()
        counts = own.diff()[tokens]
        ends = counts.cumsum(0)
        entries = int(ends[-1]) if len(ends) else 0
        token = torch.arange(len(tokens), device=tokens.device).repeat_interleave(counts, output_size=entries)
        index = torch.arange(entries, device=tokens.device) + (own[tokens] - ends + counts)[token]
        return SparseCodes(token, self.latent[index], self.value[index], len(tokens), self.d_sae)

    def segments(self, prefixes: Sequence[int]) -> SparseCodes:
        """Each token's codes cut at the widths of nested prefixes: segment p of token t becomes token t * n + p of n.

        `prefixes` ascend and end with d_sae; the latents of a token must ascend, too.
        """
        edges = torch.tensor(prefixes, dtype=self.latent.dtype, device=self.latent.device)
        segment = torch.searchsorted(edges, self.latent, right=True)
        return self._replace(token=self.token * len(prefixes) + segment, tokens=self.tokens * len(prefixes))

    def split(self, size: int) -> Iterator[SparseCodes]:
        """Codes of `size` tokens after another, at least one part; latents and values are views."""
        firsts = [*range(0, max(1, self.tokens), size), self.tokens]
        ends = self.starts()[firsts].tolist()
        for (first, last), (start, end) in zip(pairwise(firsts), pairwise(ends), strict=True):
            inside = slice(start, end)
            token, latent, value = self.token[inside] - first, self.latent[inside], self.value[inside]
            yield SparseCodes(token, latent, value, last - first, self.d_sae)

    def columns(self, latents: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Dense codes [t, c] of the latents [c] on the tokens [t] or on all; each is given once."""
        column = _index_of(latents, self.d_sae, self.latent.dtype)[self.latent]
        row = self.token if tokens is None else _index_of(tokens, self.tokens, self.token.dtype)[self.token]
        inside = column >= 0 if tokens is None else (column >= 0) & (row >= 0)
        dense = self.value.new_zeros(self.tokens if tokens is None else len(tokens), len(latents))
        dense[row[inside], column[inside]] = self.value[inside]
        return dense

    def renumbered(self, latents: Tensor) -> SparseCodes:
        """The same codes with latents numbered by their index in `latents`, which must contain all that are active."""
        latent = _index_of(latents, self.d_sae, self.latent.dtype)[self.latent]
        return self._replace(latent=latent, d_sae=len(latents))

    def padded(self, entries: Tensor) -> Tensor:
        """One number per entry [n] -> one row per token [tokens, most entries of a token], filled up with 0."""
        own = self.starts()
        width = max(1, int(own.diff().max())) if self.tokens else 1
        table = entries.new_zeros(self.tokens, width)
        table[self.token, torch.arange(len(entries), device=entries.device) - own[self.token]] = entries
        return table


def _index_of(chosen: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """[count]: each number's index in `chosen` [c], -1 for numbers that are not in it."""
    index = torch.full((count,), -1, dtype=dtype, device=chosen.device)
    index[chosen] = torch.arange(len(chosen), dtype=dtype, device=chosen.device)
    return index


def starts(groups: Tensor, count: int) -> Tensor:
    """Sorted group numbers [n] -> index at which each of the `count` groups starts [count]."""
    return torch.searchsorted(groups, torch.arange(count, dtype=groups.dtype, device=groups.device))


def decode_with_pullback(codes: SparseCodes, W_dec: Tensor) -> tuple[Tensor, Tensor]:
    """x_hat [tokens, d_in] as by `decode`, and the leaf [n] through which `value_gradient` later flows back."""
    with torch.enable_grad():
        leaf = codes.value.detach().requires_grad_()
        # Before 2.7, torch's embedding_bag differentiates the weights only if the table requires gradients, too.
        x_hat = codes._replace(value=leaf).decode(W_dec.detach().requires_grad_())
    return x_hat, leaf


def value_gradient(x_hat: Tensor, leaf: Tensor, gradient: Tensor) -> Tensor:
    """Gradient of x_hat [tokens, d_in] -> gradient of each value [n]: gradient[token] . W_dec[latent]."""
    return torch.autograd.grad(x_hat, leaf, gradient)[0]


class ByLatent(NamedTuple):
    """The same codes grouped by latent."""

    order: Tensor
    """[n] indices of entries, latents ascending, tokens ascending within a latent."""
    token: Tensor
    """[n] token of each, in that order."""
    start: Tensor
    """[d_sae] index at which each latent's group starts."""


def by_latent(codes: SparseCodes) -> ByLatent:
    """Group codes by latent (a stable sort, so the order of sums is fixed)."""
    latent, order = codes.latent.sort(stable=True)
    return ByLatent(order, codes.token[order], starts(latent, codes.d_sae))


def sum_by_latent(groups: ByLatent, weight: Tensor, rows: Tensor) -> Tensor:
    """weight [n], rows [tokens, d_in] -> [d_sae, d_in]: for each latent the weighted sum of its tokens' rows."""
    return F.embedding_bag(
        groups.token, rows, groups.start, mode="sum", per_sample_weights=weight[groups.order].to(rows.dtype)
    )


def total_by_latent(groups: ByLatent, weight: Tensor) -> Tensor:
    """weight [n] -> [d_sae]: for each latent the sum of its weights."""
    # Differences of a running sum, in double precision so that nothing is lost to cancellation.
    running = F.pad(weight[groups.order].cumsum(0, dtype=torch.float64), (1, 0))
    end = torch.cat([groups.start[1:], groups.start.new_tensor([len(weight)])])
    return (running[end] - running[groups.start]).to(weight.dtype)


def running_sum(segments: Tensor, backward: bool = False) -> Tensor:
    """[tokens, n, d_in] -> sums over the segments up to each, or from each to the last [tokens, n, d_in]."""
    if segments.shape[1] == 1:
        return segments
    return segments.flip(1).cumsum(1).flip(1) if backward else segments.cumsum(1)
