"""A language model and a text -> batches of activations, mixed across documents, the same ones for the same seed.

Contexts are taken in blocks. The activations of a block, less the positions and tokens that are left out, are
shuffled, mixed with those of its neighbors (`rounds`) and cut into batches. The content of a batch follows from its
number alone: not from the number of contexts in a pass through the model, nor the other layers collected with it, nor
where a run was interrupted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sampled_sae.config import Config, hints
from sampled_sae.data.buffer import (
    SMALLEST,
    HarvestConfig,
    bytes_needed,
    contexts_at_once,
    enough_buffer,
    worth_compiling,
)
from sampled_sae.data.contexts import ContextBank, contexts, warn_without_bos
from sampled_sae.data.passes import Passes
from sampled_sae.data.rounds import Rounds, plan_rounds
from sampled_sae.data.stream import ActivationSource, ActivationStream, check_batch, permutation
from sampled_sae.data.text import Text, TextList, TextSource, as_text
from sampled_sae.hooks import HookPoint
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.models.load import load_model
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.progress import telling
from sampled_sae.utils.ranks import current
from sampled_sae.utils.system import listening, readable

Block = dict[HookPoint, Tensor]  # the activations at each hook point, [tokens, d_in]


class HarvestStopped(Interrupted):
    """A stop was requested while a block was harvested: it is given up, to be harvested anew."""


def model_activations(
    model: LanguageModel | str | Path | tuple[Any, Any],
    text: Text,
    layer: int | Sequence[int] | None = None,
    *,
    hook: str | Sequence[str] | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
    **settings: Any,
) -> ModelActivations:
    """A language model and a text -> a source of activations, at the residual stream after one or several blocks
    (`layer`, counted from 0) or at hook points by name (`hook`); `settings` are fields of `HarvestConfig`.

    A model that is given by name is loaded, after a look whether the text is there.
    """
    layers = [] if layer is None else list(layer) if isinstance(layer, Iterable) else [layer]
    hooks = [] if hook is None else [hook] if isinstance(hook, str) else list(hook)
    if not layers and not hooks:
        raise UserError("layer: is missing; give the number of a block, or the name of a module as hook")
    try:
        config = HarvestConfig(hooks=(*layers, *hooks), **settings)
    except TypeError:
        known = set(hints(HarvestConfig)) - {"hooks"}
        wrong = next(iter(settings.keys() - known), "hooks")
        raise UserError(f"{wrong}: is no setting of activations; must be one of {', '.join(sorted(known))}") from None
    source = as_text(text)
    source.documents()
    if not isinstance(model, LanguageModel):
        model = load_model(model, device, dtype, layers)
    return ModelActivations(model, source, config, progress)


@dataclass(frozen=True, slots=True)
class ModelOrigin(Config):
    """A language model by name, and a text."""

    model: str
    dtype: str
    text: TextSource
    source: HarvestConfig

    def reopen(self, device: str) -> ModelActivations:
        dtype = getattr(torch, self.dtype, None)
        self.text.documents()
        layers = [hook for hook in self.source.hooks if isinstance(hook, int)]
        return ModelActivations(load_model(self.model, device, dtype, layers), self.text, self.source, progress=True)


@dataclass(frozen=True)
class ModelActivations(ActivationSource):
    """The activations of a language model on a text; all hook points come from the same passes through the model."""

    model: LanguageModel
    text: TextSource | TextList
    config: HarvestConfig
    progress: bool = False
    """Whether to print how far the collection is before the first step, if that takes long."""

    def __post_init__(self) -> None:
        for hook in self.config.hooks:
            self.model.hook_point(hook)

    def open(
        self, batch_size: int, heldout_tokens: int, seed: int, steps: int | None = None
    ) -> dict[str, HarvestStream]:
        """One stream for each hook point. With `steps`, no more tokens are held than these steps take."""
        model, config = self.model, self.config
        if config.bos == "auto":
            config = replace(config, bos=model.bos)
        config = replace(config, rolling=config.rolling is not False)
        size = enough_buffer(model, config, batch_size, steps)
        size = int(current().all.gather(torch.tensor(size)).min())  # ranks may have more or less free memory
        config = replace(config, buffer_tokens=size)
        if config.compile == "auto":
            tokens = None if steps is None else steps * batch_size
            config = replace(config, compile=worth_compiling(model, config, tokens))
        if self.progress and current().first:
            need = f"{readable(model.bytes)} for the model, {readable(bytes_needed(model, config))} for its activations"
            print(f"{model.name}: {need}, on {model.device}", file=sys.stderr)
        if not config.bos and current().first:
            warn_without_bos(model)
        shown = self.progress and current().first
        harvest = Harvest(model, self.text.documents(), config, batch_size, heldout_tokens, seed, steps, shown)
        return {hook.name: HarvestStream(harvest, hook, self.text) for hook in harvest.hooks}

    @property
    def origin(self) -> ModelOrigin | None:
        if not isinstance(self.text, TextSource):
            return None
        return ModelOrigin(self.model.name, str(self.model.dtype).removeprefix("torch."), self.text, self.config)

    def as_begun(self, record: Mapping[str, Any]) -> ModelActivations:
        """The buffer's order as in the record of a run or cache, if it is not set, and its size, if that is no larger
        than what is set: a run holds no more than its steps need, and an extension has more of them."""
        config, size = self.config, record.get("buffer_tokens")
        if not isinstance(size, int):
            return self
        rolling = record.get("rolling", False) if config.rolling == "auto" else config.rolling
        return replace(
            self, config=replace(config, buffer_tokens=min(config.buffer_tokens or size, size), rolling=rolling)
        )

    @property
    def cache_batch(self) -> int:
        """Tokens per batch when the activations are written to a cache."""
        config = self.config
        size, share = config.buffer_tokens or SMALLEST, (config.context - config.skip_first) / config.context
        return min(4096, size // 2 if config.rolling is False else max(1, int(size * share / 5)))


class Harvest:
    """Rounds of batches by number; on a GPU the next one is collected while this one is used."""

    def __init__(
        self,
        model: LanguageModel,
        documents: Iterator[str],
        config: HarvestConfig,
        batch_size: int,
        heldout_tokens: int,
        seed: int,
        steps: int | None = None,
        progress: bool = False,
    ):
        """`config` must have a size of the buffer. Without `steps` there is no last round."""
        assert config.buffer_tokens is not None
        self.model, self.config, self.batch_size, self.seed = model, config, batch_size, seed
        self.hooks = tuple(model.hook_point(hook) for hook in config.hooks)
        held, used = max(1, config.buffer_tokens // config.context), config.context - config.skip_first
        self.rounds: Rounds = plan_rounds(held, used, batch_size, steps, config.rolling is not False)
        passes = -(-self.rounds.contexts // contexts_at_once(model, config))
        at_once = -(-self.rounds.contexts // passes)  # passes of about the same size
        if config.compile is True:
            model.compile((at_once, config.context))
        widths = {hook: model.width_at(hook) for hook in self.hooks}
        self.passes = Passes(model, widths, at_once, config.skip_first, config.compile is True, current().harvest)
        self.left_out: set[HookPoint] = set()  # hook points that no SAE of this rank needs
        self.bank = ContextBank(contexts(documents, model.tokenizer, config))
        self.limits: dict[HookPoint, float] = {}
        self._progress, self._stop = progress, threading.Event()
        self._to_stop: set[HookPoint] = set()  # their streams have yet to raise: a block was given up
        self.heldout = self._hold_out(heldout_tokens)
        self._round: tuple[int, Block] = (-1, {})
        self._held: dict[tuple[int, int], Block] = {}  # parts of blocks that wait for their round
        # On a CPU there is nothing to gain: model and trainer would share its cores.
        overlap = model.device.type == "cuda"
        self._reader = ThreadPoolExecutor(1, "tokenize") if overlap else None
        self._read_text(0, 1)
        self._ahead: tuple[int, Future[Block]] | None = None
        self._worker = ThreadPoolExecutor(1, "harvest") if overlap else None
        self._stream = torch.cuda.Stream(model.device) if overlap else None

    def close(self) -> None:
        """Let go of activations and of the threads that read ahead; a later round may still be needed."""
        self._round, self._ahead = (-1, {}), None
        if self._worker is not None:
            # What some ranks have begun, all of them must finish.
            self._worker.shutdown(wait=True, cancel_futures=self.passes.group.size == 1)
            self._worker = ThreadPoolExecutor(1, "harvest")
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)
            self._reader = ThreadPoolExecutor(1, "tokenize")
        self._held = {}

    def _hold_out(self, wanted: int) -> Block:
        """The first `wanted` tokens of the held-out contexts; their median norm sets the limit at each hook point."""
        config = self.config
        count = -(-wanted // (config.context - config.skip_first))
        group, there = self.passes.group, 0
        with group.together():
            there = self.bank.has(10 * count) if group.rank == 0 else 0
        there = int(group.broadcast(torch.tensor(there)))
        if there < 2:
            raise UserError(
                f"text holds {there} context of {config.context} tokens: two are needed at least, one of them "
                "to hold out; give more text or lower the context length"
            )
        self.held_contexts = min(count, max(1, there // 10))  # of a short text a tenth, but one at least
        tokens, factor = self._contexts(0, self.held_contexts, 0), config.high_norm_factor
        held = self._read(tokens, "held-out tokens" if self._progress else None)
        self.limits = {
            hook: torch.inf if factor is None else factor * float(norms.median()) for hook, (_, norms) in held.items()
        }
        return {hook: x[norms <= self.limits[hook]][:wanted].float().cpu() for hook, (x, norms) in held.items()}

    def round(self, number: int, hook: HookPoint) -> Block:
        """Round `number`, for the stream at `hook`; on a GPU the next one is started. Ctrl-C stops it."""
        if self._round[0] != number:
            if hook in self._to_stop:
                self._to_stop.remove(hook)
                raise HarvestStopped(f"stopped while round {number} was harvested")
            self._round = (-1, {})  # its memory is needed for the next but one
            with listening() as self._stop:
                try:
                    self._round = (number, self._finished(number))
                except HarvestStopped:
                    self._to_stop = set(self.hooks) - {hook}
                    raise
            self._progress, self._to_stop = False, set()
        return self._round[1]

    def _finished(self, number: int) -> Block:
        if self._worker is None:
            return self._harvest_round(number)
        ahead, self._ahead = self._ahead, None
        ready = ahead is not None and ahead[0] == number
        block = (ahead[1] if ahead and ready else self._worker.submit(self._harvest_round, number)).result()
        # Several ranks begin the next round together, whichever of them was asked to stop; they stop within it.
        if (self.passes.group.size > 1 or not self._stop.is_set()) and number + 1 != self.rounds.number:
            self._ahead = (number + 1, self._worker.submit(self._harvest_round, number + 1))
        # Its memory belongs to the harvest's own stream, which must not take it back while the trainer reads it.
        for x in block.values():
            x.record_stream(torch.cuda.current_stream(x.device))
        return block

    def _harvest_round(self, number: int) -> Block:
        """The activations of round `number`; what its blocks have for later rounds is held."""
        self._held = {of: part for of, part in self._held.items() if self.rounds.round_of(*of) >= number}
        wanted = self.rounds.parts_of(number)
        with torch.cuda.stream(self._stream):  # beside the training; without a stream this does nothing
            for block in sorted({block for block, part in wanted if (block, part) not in self._held}):
                self._harvest_block(block, number)
            parts = [self._held.pop(of) for of in wanted]
            needed = [hook for hook in self.hooks if hook not in self.left_out]
            mixed = {hook: self.rounds.mixed([part[hook] for part in parts], self.seed, number) for hook in needed}
        if self._stream is not None:
            self._stream.synchronize()
        return mixed

    def _read_text(self, *blocks: int) -> None:
        """Have the text of these blocks tokenized beside what comes next; errors are raised when it is taken."""
        for block in blocks:
            wanted = self.rounds.number is None or block < self.rounds.number
            if self._reader is not None and wanted and self.passes.group.rank == 0:
                self._reader.submit(self.bank.has, self.held_contexts + (block + 1) * self.rounds.contexts)

    def _harvest_block(self, number: int, first_round: int) -> None:
        """Hold the shuffled activations of block `number`, the parts for rounds from `first_round` on."""
        tokens = self._contexts(number * self.rounds.contexts, self.rounds.contexts, self.held_contexts)
        self._read_text(number + 1, number + 2)
        found = self._read(tokens, f"activations for the buffer, part {number + 1}" if self._progress else None)
        sizes = self.rounds.cuts(self.rounds.batches * self.batch_size)
        parts: list[Block] = [{} for _ in sizes]
        for hook in [hook for hook in self.hooks if hook in found]:
            x, norms = found.pop(hook)
            what = f"activations of {hook.name}, block {number}"
            usable = (norms <= self.limits[hook]).nonzero().view(-1)
            if not len(usable):
                factor = self.config.high_norm_factor
                raise UserError(f"high_norm_factor = {factor}: leaves no token of the {what}; raise it")
            order = permutation(len(usable), self.seed, number)
            # So many left out that the rest is too few: begin again with the first of them.
            order = order.repeat(-(-sum(sizes) // len(usable)))[: sum(sizes)].to(x.device)
            for part, (block, rows) in enumerate(zip(parts, order.split(sizes), strict=True)):
                if self.rounds.round_of(number, part) >= first_round:
                    block[hook] = check_batch(x[usable[rows]], None, what)
        for part, block in enumerate(parts):
            if self.rounds.round_of(number, part) >= first_round:
                self._held[number, part] = block

    def _read(self, tokens: Tensor, shown: str | None = None) -> dict[HookPoint, tuple[Tensor, Tensor]]:
        """contexts [n, L] -> at each hook point that is needed the activations [n * (L - skip_first), d_in], in order,
        and their norms."""
        rows = len(tokens) * (tokens.shape[1] - self.config.skip_first)
        update: Callable[[int], None] = telling(rows, shown) if shown else (lambda done: None)
        return self.passes.read(tokens, set(self.hooks) - self.left_out, self._look, update)

    def _look(self) -> None:
        """Stop between two passes through the model; all ranks stop before the same one."""
        if self.passes.group.any(self._stop.is_set()):
            raise HarvestStopped("stopped between two passes through the model")

    def _contexts(self, first: int, count: int, skip: int) -> Tensor:
        """Contexts [count, L] of the text, see `ContextBank.take`; the first rank reads it."""
        group = self.passes.group
        tokens = torch.empty(count, self.config.context, dtype=torch.int32)
        with group.together():
            tokens = self.bank.take(first, count, skip) if group.rank == 0 else tokens
        return group.broadcast(tokens)


class HarvestStream(ActivationStream):
    """One hook point of a harvest."""

    def __init__(self, harvest: Harvest, hook: HookPoint, text: TextSource | TextList):
        self.harvest, self.hook, self.text = harvest, hook, text
        self.batch_size = harvest.batch_size
        self.heldout, self.limit = harvest.heldout[hook], harvest.limits[hook]
        self.d_in = self.heldout.shape[1]

    def leave_out(self) -> None:
        self.harvest.left_out.add(self.hook)

    def memory_estimate(self) -> int:
        """Its share of the harvest's bytes on the model's device."""
        return bytes_needed(self.harvest.model, self.harvest.config) // len(self.harvest.hooks)

    def batch(self, index: int) -> Tensor:
        """Batch number `index` [batch_size, d_in], in the model's dtype and on its device."""
        number, place = divmod(index, self.harvest.rounds.batches)
        block = self.harvest.round(number, self.hook)
        rows = block[self.hook] if self.hook in block else torch.empty(0, self.d_in)
        return rows[place * self.batch_size : (place + 1) * self.batch_size]

    def close(self) -> None:
        self.harvest.close()

    @property
    def identity(self) -> dict[str, Any]:
        config, factor = self.harvest.config, self.harvest.config.high_norm_factor
        return {
            "model_name": self.harvest.model.name,
            **self._where(),
            "text": self.text.name,
            "part": self.text.part,
            "context": config.context,
            "bos": config.bos,
            "skip_first": config.skip_first,
            "end_of_text": config.end_of_text,
            "high_norm_factor": None if factor == torch.inf else factor,
            "buffer_tokens": config.buffer_tokens,
            **({"rolling": True} if config.rolling else {}),  # runs of earlier versions have no such field
            "seed": self.harvest.seed,
        }

    @property
    def metadata(self) -> dict[str, Any]:
        """Names as SAELens has them, and our own."""
        model, config = self.harvest.model, self.harvest.config
        return {
            "model_name": model.name,
            "hook_name": model.saelens_hook_name(self.hook),
            "hook_module": self.hook.module,
            **self._where(),
            "context_size": config.context,
            "prepend_bos": config.bos,
            "skip_first": config.skip_first,
            "text": self.text.name,
            "heldout_contexts": self.harvest.held_contexts,
            "high_norm_limit": self.limit if self.limit < torch.inf else None,
        }

    def _where(self) -> dict[str, Any]:
        """The layer for the residual stream after a block, else the hook point's name."""
        return {"hook_point": self.hook.name} if self.hook.layer is None else {"layer": self.hook.layer}
