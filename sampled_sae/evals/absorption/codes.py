"""Codes of many words, of which few are not 0: kept as lists of what fires."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.sae import SAE


class Codes(NamedTuple):
    """Codes [n, m] of n words, the words one after the other."""

    starts: Tensor
    """Where each word's entries start, and the end of the last: [n + 1] int64."""
    latents: Tensor
    """Latents that fire, [entries] int64."""
    values: Tensor
    """Their activations, above 0, [entries] float32."""
    m: int
    """Number of latents."""

    @property
    def counts(self) -> Tensor:
        """Latents that fire at each word, [n]."""
        return self.starts.diff()

    @property
    def rows(self) -> Tensor:
        """The word of each entry, [entries]."""
        return torch.arange(len(self.counts), device=self.starts.device).repeat_interleave(self.counts)

    def take(self, rows: Tensor) -> Codes:
        """The words of these rows [r] in this order."""
        counts = self.counts[rows]
        starts = _starts(counts)
        entries = torch.arange(int(starts[-1]), device=rows.device)
        entries += (self.starts[rows] - starts[:-1]).repeat_interleave(counts)
        return Codes(starts, self.latents[entries], self.values[entries], self.m)

    def part(self, first: int, last: int) -> Codes:
        """The words from row `first` to before row `last`; entries are shared, not copied."""
        starts = self.starts[first : last + 1]
        inside = slice(int(starts[0]), int(starts[-1]))
        return Codes(starts - starts[0], self.latents[inside], self.values[inside], self.m)

    def columns(self, latents: Tensor) -> Tensor:
        """Activations of some latents, each named once, [n, len(latents)]."""
        place = torch.full((self.m,), -1, dtype=torch.int64, device=latents.device)
        place[latents] = torch.arange(len(latents), device=latents.device)
        found = place[self.latents]
        keep = found >= 0
        dense = self.values.new_zeros(len(self.counts), len(latents))
        dense[self.rows[keep], found[keep]] = self.values[keep]
        return dense

    def renumbered(self, latents: Tensor) -> Codes:
        """The same codes with latents counted by their place among these, which must hold all that fire."""
        place = torch.zeros(self.m, dtype=torch.int64, device=latents.device)
        place[latents] = torch.arange(len(latents), device=latents.device)
        return Codes(self.starts, place[self.latents], self.values, len(latents))

    def padded(self, entries: Tensor) -> Tensor:
        """One number an entry [entries] -> a row a word [n, most entries a word], 0 where there is none."""
        counts = self.counts
        width = max(1, int(counts.max())) if len(counts) else 1
        table = entries.new_zeros(len(counts), width)
        place = torch.arange(len(entries), device=entries.device) - self.starts[:-1].repeat_interleave(counts)
        table[self.rows, place] = entries
        return table


@torch.no_grad()
def encode_words(sae: SAE, x: Tensor, at_once: int) -> Codes:
    """x [n, d] -> codes on the SAE's device, scaled as if every row of its decoder had length 1.

    An SAE that was trained here has such rows already; for others this is what makes activations comparable.
    """
    lengths = sae.W_dec.norm(dim=1)
    counts, latents, values = [], [], []
    for first in range(0, max(1, len(x)), at_once):
        codes = (sae.encode(x[first : first + at_once].to(sae.device)) * lengths).float()
        fired = codes > 0
        row, latent = fired.nonzero(as_tuple=True)
        counts.append(fired.sum(1))
        latents.append(latent)
        values.append(codes[row, latent])
    return Codes(_starts(torch.cat(counts)), torch.cat(latents), torch.cat(values), sae.d_sae)


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
