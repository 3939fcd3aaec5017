"""The residual stream of a text, read once or twice, and where given latents fire in it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError

MOST_FIRINGS = 2**27
"""Firings held at one time, 12 bytes each."""
SURVEYED = 64
"""Contexts from whose norms the median is taken."""
MOST_CODES = 2**26
"""Codes of one piece of tokens."""
Tick = Callable[[int], None]
"""Is told how many contexts were read since it was last told."""


class Piece(NamedTuple):
    """The counted tokens of some contexts."""

    contexts: int
    """How many contexts."""
    places: Tensor
    """[t] int64: flat positions in the text, on the host."""
    x: Tensor
    """[t, d]: the residual stream there."""


class Streams:
    """The residual stream after `layer` at the counted positions of contexts [n, L], from the first context on.

    Tokens whose norm is above `norm_factor` times the median of the first contexts do not count. What was computed is
    kept in the host's memory if it fits into `keep_gib`, and computed again the next time otherwise.
    """

    def __init__(
        self,
        model: LanguageModel,
        layer: int,
        contexts: Tensor,
        counted: Tensor,
        *,
        norm_factor: float = math.inf,
        at_once: int = 16,
        keep_gib: float = 4.0,
    ):
        self.model, self.layer = model, model.check_layer(layer)
        self.contexts, self.counted, self.at_once = contexts, counted, at_once
        size = int(counted.sum()) * model.width * torch.empty((), dtype=model.dtype).element_size()
        self._keep = size <= keep_gib * 2**30
        self._kept: list[Piece] = []
        self.limit = self._limit(norm_factor)
        """Norm above which a token does not count."""
        self.high_norm = 0
        """Tokens above it, after the first time."""

    def __iter__(self) -> Iterator[Piece]:
        high, length = 0, self.contexts.shape[1]
        for index, first in enumerate(range(0, len(self.contexts), self.at_once)):
            if index < len(self._kept):
                kept = self._kept[index]
                yield kept._replace(x=kept.x.to(self.model.device, non_blocking=True))
                continue
            chosen = self.counted[first : first + self.at_once]
            stream = self._read(first, first + self.at_once)[chosen.to(self.model.device)]
            low = (stream.float().norm(dim=1) <= self.limit).cpu()
            places = chosen.flatten().nonzero().squeeze(1)[low] + first * length
            piece = Piece(len(chosen), places, stream[low.to(stream.device)])
            high += len(low) - len(places)
            if self._keep:
                self._kept.append(piece._replace(x=piece.x.cpu()))
            yield piece
        self.high_norm = max(self.high_norm, high)

    def _read(self, first: int, last: int) -> Tensor:
        stream = self.model.activations(self.contexts[first:last], [self.layer])[self.layer]
        if not bool(stream.isfinite().all()):
            raise UserError(
                f"layer = {self.layer}: {self.model.name} gives activations that are nan or infinite in "
                f"{self.model.dtype}; load it in float32"
            )
        return stream

    def _limit(self, norm_factor: float) -> float:
        if math.isinf(norm_factor):
            return math.inf
        norms: list[Tensor] = []
        for first in range(0, min(SURVEYED, len(self.contexts)), self.at_once):
            last = min(SURVEYED, first + self.at_once)
            norms.append(self._read(first, last).float().norm(dim=2).cpu()[self.counted[first:last]])
        found = torch.cat(norms)
        return norm_factor * float(found.median()) if len(found) else math.inf


def counted_positions(contexts: Tensor, skip_first: int, left_out: Sequence[int]) -> Tensor:
    """[n, L] bool: positions at which firing counts."""
    counted = ~torch.isin(contexts, torch.tensor(left_out, dtype=contexts.dtype))
    counted[:, :skip_first] = False
    if not bool(counted.any()):
        raise UserError(f"skip_first = {skip_first}, left_out = {tuple(left_out)!r}: leave no position of the text")
    return counted


@torch.no_grad()
def count_firings(
    saes: Sequence[SAE], streams: Streams, tokens_at_once: int = 2048, tick: Tick | None = None
) -> list[Tensor]:
    """At how many of the counted tokens each latent fires: [m] int64 on the host for each SAE."""
    totals = [torch.zeros(sae.d_sae, dtype=torch.int64, device=sae.device) for sae in saes]
    for contexts, _, x in streams:
        for sae, total in zip(saes, totals, strict=True):
            for piece in x.to(sae.device).split(_piece(tokens_at_once, sae.d_sae)):
                total += (sae.encode(piece) > 0).sum(0)
        if tick is not None:
            tick(contexts)
    return [total.cpu() for total in totals]


class Firings:
    """Where some latents of one SAE fire in a text of n contexts of L tokens, and how strongly."""

    def __init__(self, latents: Sequence[int], shape: tuple[int, int], column: Tensor, place: Tensor, value: Tensor):
        """Firing i is of latents[column[i]], at the flat position place[i] of the text, and value[i] strong."""
        self.latents, self.shape = list(latents), shape
        order = column.argsort(stable=True)
        self._place, self._value = place[order], value[order]
        counts = torch.bincount(column.long(), minlength=len(self.latents))
        self._ends = [0, *counts.cumsum(0).tolist()]
        self._column = {latent: number for number, latent in enumerate(self.latents)}

    def of(self, latent: int) -> tuple[Tensor, Tensor]:
        """Flat positions [f] int64 in their order, and activations [f] float32."""
        number = self._column[latent]
        inside = slice(self._ends[number], self._ends[number + 1])
        return self._place[inside].long(), self._value[inside]

    def count(self, latent: int) -> int:
        """Tokens at which it fires."""
        number = self._column[latent]
        return self._ends[number + 1] - self._ends[number]

    def dense(self, latent: int) -> Tensor:
        """Its activation at every position, [n, L] float32."""
        place, value = self.of(latent)
        flat = torch.zeros(self.shape[0] * self.shape[1])
        flat[place] = value
        return flat.view(self.shape)


@torch.no_grad()
def collect_firings(
    saes: Sequence[SAE],
    latents: Sequence[Sequence[int]],
    streams: Streams,
    tokens_at_once: int = 2048,
    tick: Tick | None = None,
) -> list[Firings]:
    """For each SAE the firings of its own list of latents at the counted tokens.

    Only the encoder rows of those latents are used, so that the cost does not grow with m.
    """
    encoders = [_Rows(sae, chosen) for sae, chosen in zip(saes, latents, strict=True)]
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in saes]
    held = read = 0
    for contexts, places, x in streams:
        for encoder, kept in zip(encoders, found, strict=True):
            size = _piece(tokens_at_once, len(encoder.bias))
            for piece, where in zip(x.to(encoder.bias.device).split(size), places.split(size), strict=True):
                codes = encoder(piece)
                token, column = codes.nonzero(as_tuple=True)
                value = codes[token, column].float().cpu()
                kept.append((column.int().cpu(), where[token.cpu()].int(), value))
                held += len(value)
        read += contexts
        if held > MOST_FIRINGS:
            raise UserError(
                f"max_latents: {held} firings after {read} contexts, more than can be held; take fewer latents, SAEs "
                "or contexts"
            )
        if tick is not None:
            tick(contexts)
    shape = (len(streams.contexts), streams.contexts.shape[1])
    return [
        Firings(list(chosen), shape, *(torch.cat(parts) for parts in zip(*kept, strict=True)))
        for chosen, kept in zip(latents, found, strict=True)
    ]


class _Rows:
    """x [t, d] -> the codes of some latents [t, c], as `SAE.encode` gives them."""

    def __init__(self, sae: SAE, latents: Sequence[int]):
        rows = torch.tensor(list(latents), dtype=torch.int64, device=sae.device)
        self.weight, self.bias, self.shift = sae.W_enc.T[rows], sae.b_enc[rows], sae.b_dec
        self.threshold = sae.threshold[rows] if sae.threshold.ndim else sae.threshold

    def __call__(self, x: Tensor) -> Tensor:
        z = torch.relu((x.to(self.weight.dtype) - self.shift) @ self.weight.T + self.bias)
        return z * (z > self.threshold)


def _piece(tokens: int, width: int) -> int:
    """Tokens at once, fewer where their codes would be too many."""
    return max(1, min(tokens, MOST_CODES // max(1, width)))


HOOK = re.compile(r"blocks\.(\d+)\.(?:\w+\.)?hook_(\w+)")
"""A place in a model as SAELens names it."""


def checked(saes: Sequence[SAE], model: LanguageModel, layer: int) -> Iterator[tuple[str, SAE]]:
    """Each SAE with a name for error lines; refuses none at all, one of another width or layer, and one with weights
    that are no numbers."""
    if not saes:
        raise UserError("saes = []: must name at least one SAE")
    for number, sae in enumerate(saes):
        which = "sae" if len(saes) == 1 else f"saes[{number}]"
        if sae.d_in != model.width:
            raise UserError(f"{which} has width {sae.d_in}: must be {model.width}, the width of {model.name}")
        own = own_layer(sae.cfg.metadata, which)
        if own not in (None, layer):
            place = f"layer {own}" if sae.cfg.metadata.get("layer") is not None else sae.cfg.metadata["hook_name"]
            raise UserError(f"layer = {layer}: {which} was trained on {place}; measure it there")
        for name in ("W_enc", "b_enc", "W_dec", "b_dec", "threshold"):
            if not bool(getattr(sae, name).isfinite().all()):
                raise UserError(f"{which} has entries of {name} that are nan or infinite: must be finite numbers")
        yield which, sae


def own_layer(metadata: Mapping[str, Any], which: str) -> int | None:
    """After which layer an SAE reads the residual stream, by what it says of itself; none where it does not say."""
    if metadata.get("layer") is not None:
        return int(metadata["layer"])
    # SAEs from elsewhere have no layer, but the name of the place.
    hook = HOOK.fullmatch(str(metadata.get("hook_name")))
    if hook is None:
        return None
    if hook[2] not in ("resid_pre", "resid_post"):
        raise UserError(f"{which} was trained on {hook[0]}: only SAEs of the residual stream can be measured")
    return int(hook[1]) - (hook[2] == "resid_pre")


def check_contexts(contexts: Tensor, tokens: int = 1) -> None:
    """Refuse what are not token ids [n, L] of at least one context of at least so many tokens."""
    if contexts.ndim != 2 or contexts.is_floating_point() or not len(contexts) or contexts.shape[1] < tokens:
        raise UserError(
            f"contexts are {contexts.dtype} of shape {tuple(contexts.shape)}: must be token ids [n, L], at least one "
            f"context of at least {tokens} token{'s' * (tokens > 1)}"
        )
