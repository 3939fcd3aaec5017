"""Where every latent of an SAE fires in a text: one reading, about L0 numbers a token, never tokens x latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.reading import Streams, Tick
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError

MOST_FIRINGS = 2**27
"""Firings held at one time: 12 bytes each, and some five times that while they are sorted."""
MOST_CODES = 2**26
"""Codes of one piece of tokens."""


class Firings(NamedTuple):
    """All firings of one SAE in a text of contexts of `length` tokens, by latent, and by place within a latent."""

    latent: Tensor
    """[f] int32."""
    place: Tensor
    """[f] int32: flat position in the text."""
    value: Tensor
    """[f] float32, all positive."""
    latents: int
    """Number of latents m."""
    length: int
    """Tokens a context."""

    @property
    def fired(self) -> Tensor:
        """[m] int64: at how many tokens each latent fires."""
        return torch.bincount(self.latent, minlength=self.latents)

    @property
    def maximum(self) -> Tensor:
        """[m]: the largest activation of each latent, 0 where it never fires."""
        return torch.zeros(self.latents).scatter_reduce(0, self.latent.long(), self.value, "amax")


def sort_firings(latent: Tensor, place: Tensor, value: Tensor, latents: int, length: int) -> Firings:
    """Firings in the order of the text -> by latent."""
    sorted_, order = latent.int().sort(stable=True)
    return Firings(sorted_, place[order].int(), value[order].float(), latents, length)


@torch.no_grad()
def read_firings(
    saes: Sequence[SAE], streams: Streams, tokens_at_once: int = 2048, tick: Tick | None = None
) -> list[Firings]:
    """All firings of each SAE at the counted tokens, on the host."""
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in saes]
    held = read = 0
    for contexts, places, x in streams:
        read += len(places)
        for sae, kept in zip(saes, found, strict=True):
            size = max(1, min(tokens_at_once, MOST_CODES // sae.d_sae))
            for piece, where in zip(x.to(sae.device).split(size), places.split(size), strict=True):
                codes = sae.encode(piece)
                token, latent = codes.nonzero(as_tuple=True)
                value = codes[token, latent].float().cpu()
                kept.append((latent.int().cpu(), where[token.cpu()].int(), value))
                held += len(value)
        if held > MOST_FIRINGS:
            raise UserError(f"tokens: {held:,} firings after {read:,} tokens, more than can be held; read fewer tokens")
        if tick is not None:
            tick(contexts)
    return [_together(kept, sae, streams) for sae, kept in zip(saes, found, strict=True)]


def _together(kept: list[tuple[Tensor, Tensor, Tensor]], sae: SAE, streams: Streams) -> Firings:
    latent, place, value = (torch.cat(parts) for parts in zip(*kept, strict=True))
    if not bool(value.isfinite().all()):
        raise UserError("the SAE gives codes that are nan or infinite: its weights are damaged")
    return sort_firings(latent, place, value, sae.d_sae, streams.contexts.shape[1])
