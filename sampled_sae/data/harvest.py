"""A language model and a text -> batches of activations, mixed across documents, the same ones for the same seed.

Contexts are taken in blocks. The activations of a block, less the positions and tokens that are left out, are
shuffled together and handed out in batches. Which batch holds what follows from its number alone: not from how many
contexts go through the model at once, and not from where a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sampled_sae.checks import numbers, require, whole_numbers
from sampled_sae.data.contexts import TextConfig, contexts
from sampled_sae.data.layers import LanguageModel
from sampled_sae.data.stream import check_batch
from sampled_sae.errors import UserError

SPARE = 0.02
"""Share of a block's tokens that may be left out for their norm before some of the others are used twice."""


@dataclass(frozen=True, slots=True)
class HarvestConfig:
    """Which activations are collected, and how they are mixed."""

    layer: int
    """The residual stream after this block, counted from 0."""
    text: TextConfig = field(default_factory=TextConfig)
    """How documents become contexts."""
    buffer_tokens: int = 2**19
    """Tokens that are shuffled together."""
    contexts_at_once: int = 32
    """Contexts in one pass through the model."""
    max_norm: float | None = 10.0
    """Leave out tokens whose norm is above so many times the median; none keeps them."""

    def __post_init__(self) -> None:
        whole_numbers(self, "layer", "buffer_tokens", "contexts_at_once")
        if self.max_norm is not None:
            numbers(self, "max_norm")
        require(isinstance(self.text, TextConfig), "text", self.text, "must be a TextConfig")
        require(self.contexts_at_once >= 1, "contexts_at_once", self.contexts_at_once, "must be at least 1")
        need = f"must hold at least one context of {self.text.length} tokens"
        require(self.buffer_tokens >= self.text.length, "buffer_tokens", self.buffer_tokens, need)
        require(self.max_norm is None or self.max_norm > 0, "max_norm", self.max_norm, "must be positive, or none")


class ContextBank:
    """All contexts of a text by number, read as far as they are asked for; after the last comes the first again."""

    def __init__(self, source: Iterator[Tensor]):
        self.source: Iterator[Tensor] | None = source
        self.read: list[Tensor] = []

    def has(self, count: int) -> int:
        """Read until there are `count` contexts, or all; returns how many there are."""
        while self.source is not None and len(self.read) < count:
            context = next(self.source, None)
            if context is None:
                self.source = None
            else:
                self.read.append(context.to(torch.int32))
        return len(self.read)

    def take(self, first: int, count: int, skip: int) -> Tensor:
        """`count` contexts [count, L] from number `first` on, where the first `skip` of the text do not count."""
        there = self.has(skip + first + count) - skip
        return torch.stack([self.read[skip + number % there] for number in range(first, first + count)])


class HarvestStream:
    """What the trainer reads: `batch(index)` [B, d], and held-out tokens that no batch contains."""

    def __init__(
        self,
        model: LanguageModel,
        documents: Iterator[str],
        config: HarvestConfig,
        *,
        batch_size: int,
        heldout_tokens: int = 65_536,
        seed: int = 0,
        text: str | None = None,
    ):
        """`text` is the name of the documents' source, for the record."""
        self.text = text
        self.model, self.config, self.batch_size, self.seed = model, config, batch_size, seed
        self.layer = model.check_layer(config.layer)
        self.width = model.width
        length, used = config.text.length, config.text.length - config.text.skip_first
        self.bank = ContextBank(contexts(documents, model.tokenizer, config.text))
        self.held_contexts = self._to_hold_out(-(-heldout_tokens // used))
        self.block_contexts = max(1, config.buffer_tokens // length)
        self.block_batches = int(self.block_contexts * used * (1 - SPARE)) // batch_size
        need = f"a block of buffer_tokens = {config.buffer_tokens} must hold one batch and {SPARE:.0%} more"
        require(self.block_batches >= 1, "batch_size", batch_size, need)
        self.limit = torch.inf
        held = self._activations(self.bank.take(0, self.held_contexts, skip=0))
        if config.max_norm is not None:
            self.limit = config.max_norm * float(held.float().norm(dim=1).median())
        self.heldout = self._within(held)[:heldout_tokens].float().cpu()
        self._block, self._number = held[:0], -1
        # On a CPU there is nothing to gain: model and trainer would share its cores.
        overlap = model.device.type == "cuda"
        self._ahead: tuple[int, Future[Tensor]] | None = None
        self._worker = ThreadPoolExecutor(1, "harvest") if overlap else None
        self._stream = torch.cuda.Stream(model.device) if overlap else None

    def _to_hold_out(self, wanted: int) -> int:
        """How many contexts are held out: of a short text a tenth, but one at least."""
        there = self.bank.has(10 * wanted)
        if there < 2:
            raise UserError(
                f"text holds {there} context of {self.config.text.length} tokens: two are needed at least, one of them "
                "to hold out; give more text or lower the context length"
            )
        return min(wanted, max(1, there // 10))

    def batch(self, index: int) -> Tensor:
        """Batch number `index` [B, d], in the model's dtype and on its device."""
        number, place = divmod(index, self.block_batches)
        if number != self._number:
            self._block, self._number = self._finished(number), number
        return self._block[place * self.batch_size : (place + 1) * self.batch_size]

    def _finished(self, number: int) -> Tensor:
        """Block `number`; the next one is begun meanwhile."""
        if self._worker is None:
            return self._harvest(number)
        if self._ahead is not None and self._ahead[0] == number:
            block = self._ahead[1].result()
        else:
            block = self._worker.submit(self._harvest, number).result()
        self._ahead = (number + 1, self._worker.submit(self._harvest, number + 1))
        # Its memory belongs to the harvest's own stream, which must not take it back while the trainer reads it.
        block.record_stream(torch.cuda.current_stream(block.device))
        return block

    def _harvest(self, number: int) -> Tensor:
        """The shuffled activations [tokens, d] of block `number`."""
        tokens = self.bank.take(number * self.block_contexts, self.block_contexts, skip=self.held_contexts)
        with self._beside():
            x = self._within(self._activations(tokens))
            if not len(x):
                raise UserError(f"max_norm = {self.config.max_norm}: leaves no token of block {number}; raise it")
            seeds = np.random.SeedSequence([self.seed % 2**63, number]).generate_state(1, np.uint64)
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(int(seeds[0]) >> 1))
            wanted = self.block_batches * self.batch_size
            # So many left out that the rest is too few: begin again with the first of them.
            order = order.repeat(-(-wanted // len(x)))[:wanted]
            return check_batch(x[order.to(x.device)], self.width, f"activations of layer {self.layer}, block {number}")

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU, work beside what the trainer does there; done when it is left."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _activations(self, tokens: Tensor) -> Tensor:
        """contexts [n, L] -> their activations [n * (L - skip_first), d], in order."""
        parts = []
        for part in tokens.split(self.config.contexts_at_once):
            stream = self.model.activations(part.long(), [self.layer])[self.layer]
            parts.append(stream[:, self.config.text.skip_first :].reshape(-1, self.width))
        return torch.cat(parts)

    def _within(self, x: Tensor) -> Tensor:
        """x [n, d] without the tokens whose norm is above the limit."""
        return x if self.limit == torch.inf else x[x.float().norm(dim=1) <= self.limit]

    @property
    def metadata(self) -> dict[str, Any]:
        """Where the activations come from, to be saved with each SAE; names as SAELens has them, and our own."""
        text = self.config.text
        return {
            "model_name": self.model.name,
            "hook_name": self.model.saelens_hook_name(self.layer),
            "hook_module": self.model.hook_name(self.layer),
            "layer": self.layer,
            "context_size": text.length,
            "prepend_bos": text.bos,
            "skip_first": text.skip_first,
            "text": self.text,
            "heldout_contexts": self.held_contexts,
            "max_norm": self.limit if self.limit < torch.inf else None,
        }


def tokens_to_steps(tokens: int, batch_size: int) -> int:
    """Whole batches in so many tokens."""
    require(tokens >= batch_size, "tokens", tokens, f"must be at least batch_size = {batch_size}")
    return tokens // batch_size
