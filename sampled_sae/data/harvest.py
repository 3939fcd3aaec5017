"""A language model and a text -> batches of activations, mixed across documents, the same ones for the same seed.

Contexts are taken in blocks. The activations of a block, less the positions and tokens that are left out, are
shuffled together and handed out in batches. Which batch holds what follows from its number alone: not from how many
contexts go through the model at once, nor which other layers are collected with it, nor where a run was interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sampled_sae.config import numbers, require, whole_numbers
from sampled_sae.data.contexts import ContextBank, TextConfig, contexts
from sampled_sae.data.stream import check_batch
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.progress import telling
from sampled_sae.utils.system import listening


class HarvestStopped(Interrupted):
    """Somebody asked to stop while a block was harvested: it is given up, to be harvested anew."""


SPARE = 0.02
"""Share of a block's tokens that may be left out for their norm before some of the others are used twice."""
AT_ONCE = {"cuda": 2**16, "cpu": 2**14}
"""Tokens in one pass through the model, by kind of device, if no number of contexts is asked for."""
Block = dict[int, Tensor]
"""The activations of each layer, [tokens, d]."""


@dataclass(frozen=True, slots=True)
class HarvestConfig:
    """Which activations are collected, and how they are mixed."""

    layers: tuple[int, ...]
    """The residual stream after each of these blocks, counted from 0."""
    text: TextConfig = field(default_factory=TextConfig)
    """How documents become contexts."""
    buffer_tokens: int = 2**19
    """Tokens that are shuffled together."""
    contexts_at_once: int | None = None
    """Contexts in one pass through the model; none means 65,536 tokens' worth on a GPU, 16,384 elsewhere."""
    max_norm: float | None = 10.0
    """Leave out tokens whose norm is above so many times the median; none keeps them."""

    def __post_init__(self) -> None:
        whole_numbers(self, "buffer_tokens")
        if self.contexts_at_once is not None:
            whole_numbers(self, "contexts_at_once")
            require(self.contexts_at_once >= 1, "contexts_at_once", self.contexts_at_once, "must be at least 1")
        if self.max_norm is not None:
            numbers(self, "max_norm")
        distinct = len(set(self.layers)) == len(self.layers) > 0
        require(distinct, "layers", self.layers, "must name at least one layer, each once")
        require(isinstance(self.text, TextConfig), "text", self.text, "must be a TextConfig")
        need = f"must hold at least one context of {self.text.length} tokens"
        require(self.buffer_tokens >= self.text.length, "buffer_tokens", self.buffer_tokens, need)
        require(self.max_norm is None or self.max_norm > 0, "max_norm", self.max_norm, "must be positive, or none")


def open_harvest(
    model: LanguageModel,
    documents: Iterator[str],
    config: HarvestConfig,
    *,
    batch_size: int,
    heldout_tokens: int = 65_536,
    seed: int = 0,
    text: str | None = None,
    part: str | None = None,
    progress: bool = False,
) -> dict[int, HarvestStream]:
    """What the trainer reads, for each layer; all layers come from the same passes through the model.

    `text` is the name of the documents' source, for the record, and `part` which part of it (split, subset) they are.
    `progress` tells how far it is with what has to be there before the first step, if that takes long.
    """
    harvest = Harvest(model, documents, config, batch_size, heldout_tokens, seed, progress)
    return {layer: HarvestStream(harvest, layer, text, part) for layer in harvest.layers}


def contexts_at_once(model: LanguageModel, config: HarvestConfig) -> int:
    """Contexts in one pass through the model."""
    tokens = AT_ONCE.get(model.device.type, AT_ONCE["cpu"])
    return config.contexts_at_once or max(1, tokens // config.text.length)


def enough_buffer(config: HarvestConfig, batch_size: int, steps: int) -> int:
    """buffer_tokens, or as many as so many steps take if that is less: no more is harvested than is trained on."""
    used = config.text.length - config.text.skip_first
    contexts = max(1, int(steps * batch_size / (used * (1 - SPARE))))
    while _batches(contexts, used, batch_size) < steps:  # for what rounding takes
        contexts += 1
    return min(config.buffer_tokens, contexts * config.text.length)


def _batches(contexts: int, used: int, batch_size: int) -> int:
    """Batches in a block of so many contexts with so many tokens in use each."""
    return int(contexts * used * (1 - SPARE)) // batch_size


def bytes_needed(model: LanguageModel, config: HarvestConfig) -> int:
    """What a harvest takes on the model's device at its peak, beside the model's weights."""
    blocks = 3 if model.device.type == "cuda" else 2  # in use, before and after its shuffle
    width, length = model.width * model.dtype.itemsize, config.text.length
    kept = len(config.layers) * blocks * max(config.buffer_tokens, length) * width
    # Of one pass through a block, usually: a feed-forward layer four times as wide, thrice, and copies of the stream.
    return kept + contexts_at_once(model, config) * length * width * (20 + len(config.layers))


class Harvest:
    """Blocks of activations by number; on a GPU the next one is collected while this one is used."""

    def __init__(
        self,
        model: LanguageModel,
        documents: Iterator[str],
        config: HarvestConfig,
        batch_size: int,
        heldout_tokens: int,
        seed: int,
        progress: bool = False,
    ):
        self.model, self.config, self.batch_size, self.seed = model, config, batch_size, seed
        self.layers = tuple(model.check_layer(layer) for layer in config.layers)
        length, used = config.text.length, config.text.length - config.text.skip_first
        self.at_once = contexts_at_once(model, config)
        self.block_contexts = max(1, config.buffer_tokens // length)
        self.block_batches = _batches(self.block_contexts, used, batch_size)
        need = f"a block of buffer_tokens = {config.buffer_tokens} must hold one batch and {SPARE:.0%} more"
        require(self.block_batches >= 1, "batch_size", batch_size, need)
        self.bank = ContextBank(contexts(documents, model.tokenizer, config.text))
        self.held_contexts = self._to_hold_out(-(-heldout_tokens // used))
        self.limits = dict.fromkeys(self.layers, torch.inf)
        self._progress, self._asked = progress, threading.Event()
        self._to_tell: set[int] = set()  # layers that are yet to hear that the block which they share was given up
        self.heldout = self._hold_out(heldout_tokens)
        self._block: tuple[int, Block] = (-1, {})
        # On a CPU there is nothing to gain: model and trainer would share its cores.
        overlap = model.device.type == "cuda"
        self._ahead: tuple[int, Future[Block]] | None = None
        self._worker = ThreadPoolExecutor(1, "harvest") if overlap else None
        self._stream = torch.cuda.Stream(model.device) if overlap else None

    def close(self) -> None:
        """Let go of blocks and of the thread that reads ahead."""
        self._block, self._ahead = (-1, {}), None
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._worker = ThreadPoolExecutor(1, "harvest")  # it may still be asked for a block

    def _to_hold_out(self, wanted: int) -> int:
        """How many contexts are held out: of a short text a tenth, but one at least."""
        there = self.bank.has(10 * wanted)
        if there < 2:
            raise UserError(
                f"text holds {there} context of {self.config.text.length} tokens: two are needed at least, one of them "
                "to hold out; give more text or lower the context length"
            )
        return min(wanted, max(1, there // 10))

    def _hold_out(self, wanted: int) -> Block:
        """The first `wanted` tokens of the held-out contexts; their median norm sets the limit of each layer."""
        tokens, factor = self.bank.take(0, self.held_contexts, skip=0), self.config.max_norm
        held = self._read(tokens, "held-out tokens" if self._progress else None)
        for layer, (_, norms) in held.items():
            self.limits[layer] = torch.inf if factor is None else factor * float(norms.median())
        return {layer: x[norms <= self.limits[layer]][:wanted].float().cpu() for layer, (x, norms) in held.items()}

    def block(self, number: int, layer: int) -> Block:
        """Block `number`, for the stream of `layer`; on a GPU the next one is begun. Ctrl-C gives it up."""
        if self._block[0] != number:
            if layer in self._to_tell:
                self._to_tell.remove(layer)
                raise HarvestStopped(f"stopped while block {number} was harvested")
            self._block = (-1, {})  # its memory is wanted for the next but one
            with listening() as self._asked:
                try:
                    self._block = (number, self._finished(number))
                except HarvestStopped:
                    self._to_tell = set(self.layers) - {layer}
                    raise
            self._progress, self._to_tell = False, set()
        return self._block[1]

    def _finished(self, number: int) -> Block:
        tell = f"activations of block {number}" if self._progress else None
        if self._worker is None:
            return self._harvest(number, tell)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == number:
            block = ahead[1].result()
        else:
            block = self._worker.submit(self._harvest, number, tell).result()
        if not self._asked.is_set():
            self._ahead = (number + 1, self._worker.submit(self._harvest, number + 1))
        # Its memory belongs to the harvest's own stream, which must not take it back while the trainer reads it.
        for x in block.values():
            x.record_stream(torch.cuda.current_stream(x.device))
        return block

    def _harvest(self, number: int, tell: str | None = None) -> Block:
        """The shuffled activations of block `number`; `tell` names them where somebody waits for them."""
        tokens = self.bank.take(number * self.block_contexts, self.block_contexts, skip=self.held_contexts)
        seeds = np.random.SeedSequence([self.seed % 2**63, number]).generate_state(1, np.uint64)
        with self._beside():
            block, found = {}, self._read(tokens, tell)
            for layer in self.layers:
                x, norms = found.pop(layer)
                what = f"activations of layer {layer}, block {number}"
                order = self._order((norms <= self.limits[layer]).nonzero().view(-1), int(seeds[0]) >> 1, what)
                block[layer] = check_batch(x[order], self.model.width, what)
            return block

    def _order(self, usable: Tensor, seed: int, what: str) -> Tensor:
        """Row numbers [n] -> as many as the block's batches take, shuffled."""
        if not len(usable):
            raise UserError(f"max_norm = {self.config.max_norm}: leaves no token of the {what}; raise it")
        order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed))
        wanted = self.block_batches * self.batch_size
        # So many left out that the rest is too few: begin again with the first of them.
        return usable[order.repeat(-(-wanted // len(usable)))[:wanted].to(usable.device)]

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU, work beside what the trainer does there; done when it is left."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _read(self, tokens: Tensor, tell: str | None = None) -> dict[int, tuple[Tensor, Tensor]]:
        """contexts [n, L] -> for each layer the activations [n * (L - skip_first), d], in order, and their norms."""
        skip = self.config.text.skip_first
        rows, each = len(tokens) * (tokens.shape[1] - skip), tokens.shape[1] - skip
        place: dict[str, Any] = {"device": self.model.device}
        found = {
            layer: (
                torch.empty(rows, self.model.width, dtype=self.model.dtype, **place),
                torch.empty(rows, dtype=torch.float32, **place),
            )
            for layer in self.layers
        }
        update: Callable[[int], None] = telling(rows, tell) if tell else (lambda done: None)
        for number, part in enumerate(tokens.split(self.at_once)):
            if self._asked.is_set():
                raise HarvestStopped("stopped between two passes through the model")
            first = number * self.at_once * each
            for layer, stream in self.model.activations(part.long(), self.layers).items():
                x, norms = found[layer]
                new = stream[:, skip:].reshape(-1, self.model.width)
                x[first : first + len(new)] = new
                norms[first : first + len(new)] = new.float().norm(dim=1)
            update(min(rows, first + len(part) * each))
        return found


class HarvestStream:
    """One layer of a harvest: `batch(index)` [B, d], and held-out tokens that no batch contains."""

    def __init__(self, harvest: Harvest, layer: int, text: str | None = None, part: str | None = None):
        self.harvest, self.layer, self.text, self.part = harvest, layer, text, part
        self.width, self.batch_size = harvest.model.width, harvest.batch_size
        self.heldout, self.limit = harvest.heldout[layer], harvest.limits[layer]
        self.memory = bytes_needed(harvest.model, harvest.config) // len(harvest.layers)
        """Its share of what the harvest takes on the model's device."""

    def batch(self, index: int) -> Tensor:
        """Batch number `index` [B, d], in the model's dtype and on its device."""
        number, place = divmod(index, self.harvest.block_batches)
        block = self.harvest.block(number, self.layer)[self.layer]
        return block[place * self.batch_size : (place + 1) * self.batch_size]

    def close(self) -> None:
        """Let go of what is held for the next batches."""
        self.harvest.close()

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the batches: a run goes on only with the same."""
        config = self.harvest.config
        text = {"length": config.text.length, "bos": config.text.bos, "skip_first": config.text.skip_first}
        return {
            "model_name": self.harvest.model.name,
            "layer": self.layer,
            "text": self.text,
            "part": self.part,
            **text,
            "end_of_text": config.text.end_of_text,
            "high_norm_factor": config.max_norm,
            "buffer_tokens": config.buffer_tokens,
            "seed": self.harvest.seed,
        }

    @property
    def metadata(self) -> dict[str, Any]:
        """Where the activations come from, to be saved with each SAE; names as SAELens has them, and our own."""
        model, text = self.harvest.model, self.harvest.config.text
        return {
            "model_name": model.name,
            "hook_name": model.saelens_hook_name(self.layer),
            "hook_module": model.hook_name(self.layer),
            "layer": self.layer,
            "context_size": text.length,
            "prepend_bos": text.bos,
            "skip_first": text.skip_first,
            "text": self.text,
            "heldout_contexts": self.harvest.held_contexts,
            "high_norm_limit": self.limit if self.limit < torch.inf else None,
        }


def tokens_to_steps(tokens: int, batch_size: int) -> int:
    """Whole batches in so many tokens."""
    require(tokens >= batch_size, "tokens", tokens, f"must be at least batch_size = {batch_size}")
    return tokens // batch_size
