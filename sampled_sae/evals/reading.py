"""Contexts through the model once: activations at counted positions, firings of many SAEs; checks of the input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.hooks import Where, saved_hook
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.method.codes import SparseCodes, starts
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError

MAX_FIRINGS = 2**27  # firings held at one time: 12 bytes each, and about five times that while they are sorted
SURVEYED = 64  # contexts that give the median norm
MAX_CODES = 2**26  # codes that are computed at one time
Tick = Callable[[int], None]  # called with the number of contexts read since its last call


class Steps:
    """Adds up finished parts of a total and reports them."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int):
        self.progress, self.total, self.done = progress, total, 0

    def add(self, more: int) -> None:
        self.done = min(self.total, self.done + more)
        if self.progress is not None:
            self.progress(self.done, self.total)

    def within(self, parts: int, whole: int) -> Callable[[int], None]:
        """A function of the number of finished items that adds `parts` in all when `whole` items are finished."""
        counted = 0

        def done(items: int) -> None:
            nonlocal counted
            now = parts * items // max(1, whole)
            if now > counted:
                self.add(now - counted)
                counted = now

        return done

    def finish(self) -> None:
        self.add(self.total - self.done)


class Piece(NamedTuple):
    """The counted tokens of some contexts."""

    contexts: int  # number of contexts
    positions: Tensor  # [t] int64: flat positions in the text, on the host
    x: Tensor  # [t, d_in]: the activations there


class Streams:
    """The activations at a hook point, at the counted positions of contexts [n, L], from the first context on.

    Tokens with a norm above `norm_factor` times the median of the first contexts do not count. The residual stream is
    kept in host memory if it fits into `keep_gib`; otherwise each iteration computes it again.
    """

    def __init__(
        self,
        model: LanguageModel,
        layer: Where,
        contexts: Tensor,
        counted: Tensor,
        *,
        norm_factor: float = math.inf,
        at_once: int = 16,
        keep_gib: float = 4.0,
    ):
        self.model, self.layer = model, model.where(layer)
        self.contexts, self.counted, self.at_once = contexts, counted, at_once
        size = int(counted.sum()) * model.width_at(layer) * torch.empty((), dtype=model.dtype).element_size()
        self._keep = size <= keep_gib * 2**30
        self._kept: list[Piece] = []
        self.limit = self._limit(norm_factor)  # norm above which a token does not count
        self.high_norm = 0  # number of tokens above it, known after the first iteration

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
            positions = chosen.flatten().nonzero().squeeze(1)[low] + first * length
            piece = Piece(len(chosen), positions, stream[low.to(stream.device)])
            high += len(low) - len(positions)
            if self._keep:
                self._kept.append(piece._replace(x=piece.x.cpu()))
            yield piece
        self.high_norm = max(self.high_norm, high)

    def _read(self, first: int, last: int) -> Tensor:
        stream = self.model.activations(self.contexts[first:last], [self.layer])[self.layer]
        if not bool(stream.isfinite().all()):
            raise not_finite(self.model, self.layer)
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


def not_finite(model: LanguageModel, layer: Where) -> UserError:
    """The error of a model whose activations overflow."""
    why = f"gives activations that are nan or infinite in {model.dtype}; load it in float32"
    return UserError(f"layer = {layer}: {model.name} {why}")


def skipped(skip_first: int | None, sae: InferenceConfig) -> int:
    """Positions to exclude at the start of each context: as given, by default those that training excluded."""
    return int(sae.metadata.get("skip_first") or 0) if skip_first is None else skip_first


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
    """For each SAE the number of counted tokens on which each latent fires: [d_sae] int64 on the host."""
    totals = [torch.zeros(sae.d_sae, dtype=torch.int64, device=sae.device) for sae in saes]
    for contexts, _, x in streams:
        for sae, total in zip(saes, totals, strict=True):
            for piece in x.split(max(1, min(tokens_at_once, MAX_CODES // sae.d_sae))):
                total += (sae.encode(piece) > 0).sum(0)
        if tick is not None:
            tick(contexts)
    return [total.cpu() for total in totals]


class Firings(NamedTuple):
    """Where latents of one SAE fire in a text of contexts [n, L]: by latent, then by position. On the host."""

    latent: Tensor  # [f] int32, ascending
    position: Tensor  # [f] int32: flat position in the text, ascending within a latent
    value: Tensor  # [f] float32, all positive
    start: Tensor  # [d_sae + 1] int64: index of each latent's first firing, and the end of the last
    shape: tuple[int, int]  # (n, L) of the contexts
    latents: Sequence[int]  # latents that were read, in the order given; the others have no firings

    @staticmethod
    def sort(codes: SparseCodes, shape: Sequence[int], latents: Sequence[int] | None = None) -> Firings:
        """Codes of all positions [n * L, d_sae] of a text, of the given latents or of all."""
        latent, order = codes.latent.int().sort(stable=True)
        start = starts(latent, codes.d_sae + 1)
        read = range(codes.d_sae) if latents is None else latents
        return Firings(latent, codes.token[order].int(), codes.value[order].float(), start, (shape[0], shape[1]), read)

    @property
    def d_sae(self) -> int:
        """Number of latents of the SAE."""
        return len(self.start) - 1

    @property
    def fired(self) -> Tensor:
        """[d_sae] int64: number of tokens on which each latent fires."""
        return self.start.diff()

    @property
    def maximum(self) -> Tensor:
        """[d_sae]: largest activation of each latent, 0 for latents that do not fire."""
        return torch.zeros(self.d_sae).scatter_reduce(0, self.latent.long(), self.value, "amax")

    def of(self, latent: int) -> tuple[Tensor, Tensor]:
        """One latent's flat positions [f] int64, ascending, and activations [f]."""
        inside = slice(*self.start[latent : latent + 2].tolist())
        return self.position[inside].long(), self.value[inside]

    def count(self, latent: int) -> int:
        """Number of tokens on which one latent fires."""
        return int(self.start[latent + 1] - self.start[latent])

    def dense(self, latent: int) -> Tensor:
        """One latent's activation at every position, [n, L]."""
        position, value = self.of(latent)
        flat = torch.zeros(self.shape[0] * self.shape[1])
        flat[position] = value
        return flat.view(self.shape)


@torch.no_grad()
def collect_firings(
    saes: Sequence[SAE],
    streams: Streams,
    latents: Sequence[Sequence[int]] | None = None,
    tokens_at_once: int = 2048,
    tick: Tick | None = None,
) -> list[Firings]:
    """Firings of each SAE at the counted tokens: of its own list of latents, or of all."""
    given: Sequence[Sequence[int] | None] = latents or [None] * len(saes)
    chosen = [None if own is None else torch.tensor([*own], dtype=torch.int64) for own in given]
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in saes]
    held = read = 0
    for contexts, positions, x in streams:
        for sae, some, kept in zip(saes, chosen, found, strict=True):
            width = sae.d_sae if some is None else len(some)
            codes = sae.encode_sparse(x, some, min(MAX_CODES, tokens_at_once * width))
            position = positions[codes.token.cpu()].int()
            kept.append((position, codes.latent.int().cpu(), codes.value.float().cpu()))
            held += len(position)
        read += contexts
        if held > MAX_FIRINGS:
            raise UserError(
                f"{held:,} firings after {read:,} contexts are more than can be held; "
                "read fewer tokens, latents or SAEs"
            )
        if tick is not None:
            tick(contexts)
    firings = []
    for sae, kept, own in zip(saes, found, given, strict=True):
        position, latent, value = (torch.cat(parts) for parts in zip(*kept, strict=True))
        if not bool(value.isfinite().all()):
            raise UserError("the SAE gives codes that are nan or infinite: its weights are damaged")
        codes = SparseCodes(position, latent, value, streams.contexts.numel(), sae.d_sae)
        firings.append(Firings.sort(codes, streams.contexts.shape, own))
    return firings


def token_text(token: int, tokenizer: Any) -> str:
    """A token as it is in a text, with its leading space and line ends."""
    text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    piece = tokenizer.convert_ids_to_tokens(token)
    # Some tokenizers drop the space of a token that stands alone.
    return f" {text}" if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" ") else text


def checked(saes: Sequence[SAE], model: LanguageModel, layer: Where) -> Iterator[tuple[str, SAE]]:
    """Each SAE with its name in error messages; UserError if there is none, or if one has another width, another hook
    point or weights that are not finite."""
    if not saes:
        raise UserError("saes = []: must name at least one SAE")
    width = model.width_at(layer)
    for number, sae in enumerate(saes):
        which = "sae" if len(saes) == 1 else f"saes[{number}]"
        if sae.d_in != width:
            where = "" if isinstance(layer, int) else f" at {layer}"
            raise UserError(f"{which} has width {sae.d_in}: must be {width}, the width of {model.name}{where}")
        own = saved_hook(sae.cfg.metadata)
        if own is not None and own != layer and _elsewhere(model, own, layer):
            name = f"layer {own}" if sae.cfg.metadata.get("layer") is not None else sae.cfg.metadata["hook_name"]
            raise UserError(f"layer = {layer}: {which} was trained on {name}; measure it there")
        for name, tensor in sae.state_dict().items():
            if name != "threshold_ema" and not bool(tensor.isfinite().all()):
                raise UserError(f"{which} has entries of {name} that are nan or infinite: must be finite numbers")
        yield which, sae


def _elsewhere(model: LanguageModel, own: Where, layer: Where) -> bool:
    """Whether an SAE's own hook point is another one; one that the model does not know is not."""
    try:
        return model.where(own) != layer
    except UserError:
        return isinstance(own, int)


def check_contexts(contexts: Tensor, tokens: int = 1) -> None:
    """UserError unless these are token ids [n, L] of at least one context of at least `tokens` tokens."""
    if contexts.ndim != 2 or contexts.is_floating_point() or not len(contexts) or contexts.shape[1] < tokens:
        raise UserError(
            f"contexts are {contexts.dtype} of shape {tuple(contexts.shape)}: must be token ids [n, L], at least one "
            f"context of at least {tokens} token{'s' * (tokens > 1)}"
        )
