"""The contexts of a text by number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


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
