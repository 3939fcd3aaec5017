"""Contexts -> their activations at several hook points, by passes through a language model that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.hooks import HookPoint
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.ranks import Group
from sampled_sae.utils.watch import tick

Found = tuple[Tensor, Tensor]  # activations [tokens, d_in] and their norms [tokens]


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
