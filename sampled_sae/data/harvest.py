"""A language model and contexts -> rounds of activations, mixed across documents, the same ones for the same seed.

The activations of a block of contexts, less the positions and tokens that are left out, are shuffled, mixed with those
of its neighbors (see `buffer`) and cut into batches. The content of a batch follows from its number alone: not from the
number of contexts in a pass through the model, nor the other layers collected with it, nor where a run was interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.data.buffer import HarvestConfig, Rounds, contexts_at_once, plan_rounds
from sampled_sae.data.contexts import ContextBank, contexts
from sampled_sae.data.stream import check_batch, permutation
from sampled_sae.hooks import HookPoint
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.progress import say, telling
from sampled_sae.utils.ranks import Group, current
from sampled_sae.utils.system import listening
from sampled_sae.utils.watch import tick

Found = tuple[Tensor, Tensor]  # activations [tokens, d_in] and their norms [tokens]
Block = dict[HookPoint, Tensor]  # the activations at each hook point, [tokens, d_in]


class HarvestStopped(Interrupted):
    """A stop was requested while a block was harvested: it is given up, to be harvested anew."""


class Passes(NamedTuple):
    """How contexts go through the model: `at_once` in a pass. Ranks take turns, so that the passes are the same ones
    whatever the number of ranks."""

    model: LanguageModel
    widths: Mapping[HookPoint, int]
    """Width of the activations at each hook point."""
    at_once: int
    skip_first: int
    compiled: bool
    group: Group
    """The ranks that share the passes."""

    def read(
        self, tokens: Tensor, wanted: Collection[HookPoint], stop: Callable[[], None], update: Callable[[int], None]
    ) -> dict[HookPoint, Found]:
        """contexts [n, L] -> at each `wanted` hook point the activations [n * (L - skip_first), d_in], in order, and
        their norms.

        Before each pass, `stop` may raise; after it, `update` gets the number of tokens so far.
        """
        each = tokens.shape[1] - self.skip_first
        rows, parts = len(tokens) * each, tokens.split(self.at_once)
        found: dict[HookPoint, Found] = {}
        for first in range(0, len(parts), self.group.size):
            stop()
            turn = parts[first : first + self.group.size]
            own = self._pass(turn[self.group.rank], first > 0) if self.group.rank < len(turn) else {}
            at = first * self.at_once * each
            for hook in self.widths:
                every = self._exchanged(hook, own.get(hook), self.at_once * each)
                if hook not in wanted:
                    continue
                if hook not in found:
                    x, norms = every[0]
                    found[hook] = x.new_empty(rows, x.shape[1]), norms.new_empty(rows)
                for number, part in enumerate(turn):
                    size, begin = len(part) * each, at + number * self.at_once * each
                    for whole, new in zip(found[hook], every[number], strict=True):
                        whole[begin : begin + size] = new[:size]
            tick()
            update(min(rows, at + sum(map(len, turn)) * each))
        return found

    def _pass(self, part: Tensor, later: bool) -> dict[HookPoint, Found]:
        """One pass through the model."""
        n = len(part)
        if self.compiled and n < self.at_once and later:  # a new shape is compiled anew
            part = torch.cat([part, part[:1].expand(self.at_once - n, -1)])
        found = {}
        for hook, stream in self.model.activations(part.long(), tuple(self.widths)).items():
            x = stream[:n, self.skip_first :].reshape(-1, stream.shape[-1])
            found[hook] = x, x.float().norm(dim=1)
        return found

    def _exchanged(self, hook: HookPoint, own: Found | None, rows: int) -> Sequence[Found]:
        """Each rank's pass of at most `rows` tokens; None if it had none."""
        if self.group.size == 1:
            assert own is not None
            return [own]
        model, sent = self.model, []
        shapes = ((rows, self.widths[hook]), model.dtype), ((rows,), torch.float32)
        for number, (shape, dtype) in enumerate(shapes):
            sent.append(torch.zeros(shape, dtype=dtype, device=model.device))
            if own is not None:
                sent[-1][: len(own[number])] = own[number]
        return list(zip(*map(self.group.gather, sent), strict=True))


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
        self._tells_short = progress and self.passes.group.rank == 0
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
        self._tell_if_short(number)
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

    def _tell_if_short(self, number: int) -> None:
        """Say once that the text is repeated, at the first block for which it is."""
        there = len(self.bank.read) - self.held_contexts
        if self._tells_short and there < (number + 1) * self.rounds.contexts:
            wanted = (self.rounds.number or number + 1) * self.rounds.contexts
            say(f"text: has {there:,} contexts of {self.config.context} tokens, {wanted:,} are wanted: it is repeated")
            self._tells_short = False

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
