"""Activations of any origin -> batches [B, d], the same ones for the same seed, from any step on.

Held-out tokens are set aside first and never trained on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from sampled_sae.utils.errors import UserError

END = object()
"""What an exhausted iterator gives; an item that is None is an error, not the end."""


@runtime_checkable
class Stream(Protocol):
    """What the trainer reads."""

    width: int
    heldout: Tensor
    """[n, d] tokens that no batch contains."""

    def batch(self, index: int) -> Tensor:
        """Batch number `index` [B, d]; asked for in rising order, not always from 0."""
        ...


@runtime_checkable
class Stored(Protocol):
    """Activations that are read by number, such as a cache on disk."""

    tokens: int

    @property
    def shape(self) -> tuple[int, int]: ...

    def __len__(self) -> int: ...

    def take(self, rows: Tensor) -> Tensor:
        """Rows [n] long -> [n, d]."""
        ...


class Endless(ABC):
    """A source that makes batch number `index` on demand, such as synthetic data."""

    @abstractmethod
    def batch(self, index: int, size: int, split: Literal["train", "heldout"] = "train") -> Tensor:
        """[size, d], a pure function of its arguments; the two splits share no sample."""


def check_batch(batch: Any, width: int | None, where: str) -> Tensor:
    """A batch [..., d] -> [n, d], or a clear line about what is wrong with it."""
    tensor = batch
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "fiub":
        native = batch.astype(np.float64 if batch.dtype.itemsize > 8 else batch.dtype.newbyteorder("="))
        tensor = torch.from_numpy(np.ascontiguousarray(native))
    if not isinstance(tensor, Tensor):
        raise UserError(f"{where} is a {type(batch).__name__}: must be a tensor or an array [B, d] or [B, L, d]")
    if tensor.ndim < 2 or not tensor.is_floating_point():
        raise UserError(
            f"{where} is {tensor.dtype} of shape {tuple(tensor.shape)}: must be floating point, [B, d] or [B, L, d]"
        )
    if width is not None and tensor.shape[-1] != width:
        raise UserError(f"{where} has width {tensor.shape[-1]}: the activations before it have width {width}")
    tensor = tensor.reshape(-1, tensor.shape[-1])
    # Smallest and largest tell of NaN and infinity too, in a tenth of the time of looking at each.
    if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
        row = int((~torch.isfinite(tensor)).any(dim=1).nonzero()[0])
        raise UserError(f"{where}: NaN or infinity (first in row {row}): activations must be finite")
    if tensor.dtype == torch.float64 and not torch.isfinite(tensor.float()).all():
        raise UserError(f"{where}: values beyond the range of float32, in which SAEs are trained; scale them down")
    return tensor


class ArrayStream:
    """All activations at hand, [N, d] or [N, L, d]: shuffled anew for each pass."""

    def __init__(self, activations: Tensor | np.ndarray | Stored, batch_size: int, heldout_tokens: int, seed: int):
        if len(activations.shape) < 2 or activations.shape[-1] < 1:
            raise UserError(f"activations have shape {tuple(activations.shape)}: must be [N, d] or [N, L, d]")
        self.width = int(activations.shape[-1])
        # What is in memory is looked at before any work; a memory map is looked at as it is read.
        self.rows: Tensor | np.ndarray | Stored
        if isinstance(activations, Tensor):
            self.rows = check_batch(activations, None, "activations")
        elif isinstance(activations, Stored):
            self.rows = activations
            self.metadata = getattr(activations, "description", {})
        else:
            self.rows = activations.reshape(-1, self.width)
        self.batch_size, self.seed = batch_size, seed
        kept_out = min(heldout_tokens, len(self.rows) // 10)
        order = self._permutation(len(self.rows), epoch=-1)
        self.training = order[kept_out:]
        self.batches = len(self.training) // batch_size
        if self.batches == 0:
            raise UserError(
                f"activations hold {len(self.rows)} tokens, {kept_out} of them held out: too few for one batch of "
                f"batch_size = {batch_size}"
            )
        self.heldout = self._take(order[:kept_out], "the held-out part of activations")
        self._epoch, self._order = -1, self.training

    def batch(self, index: int) -> Tensor:
        epoch, position = divmod(index, self.batches)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.training[self._permutation(len(self.training), epoch)]
        rows = self._order[position * self.batch_size : (position + 1) * self.batch_size]
        return self._take(rows, f"activations: batch {index}")

    def _permutation(self, n: int, epoch: int) -> Tensor:
        seeds = np.random.SeedSequence([self.seed % 2**63, epoch + 1]).generate_state(1, np.uint64)
        return torch.randperm(n, generator=torch.Generator().manual_seed(int(seeds[0]) >> 1))

    def _take(self, rows: Tensor, where: str) -> Tensor:
        if isinstance(self.rows, Tensor):
            return check_batch(self.rows[rows.to(self.rows.device)], self.width, where)
        if isinstance(self.rows, Stored):
            return check_batch(self.rows.take(rows), self.width, where)
        # A memory map is read from front to back, then put into the shuffled order.
        ascending, inverse = rows.sort()
        return check_batch(self.rows[ascending.numpy()], self.width, where)[inverse.argsort()]


class EndlessStream:
    """Fresh samples without end; batch number `index` is made on demand."""

    def __init__(self, source: Endless, batch_size: int, heldout_tokens: int):
        self.source, self.batch_size = source, batch_size
        first = check_batch(source.batch(0, max(1, heldout_tokens), split="heldout"), None, "the held-out batch")
        self.width = first.shape[1]
        self.heldout = first

    def batch(self, index: int) -> Tensor:
        return check_batch(self.source.batch(index, self.batch_size), self.width, f"activations: batch {index}")


class IterableStream:
    """An iterable of [B, d] or [B, L, d] batches of any size, cut anew into batches of `batch_size`.

    One that can be iterated again (a list, a data set) is read as often as needed; a generator once. Each
    pass must begin with the same tokens, for those are held out. To go on after an interruption, the tokens
    that were used are read and dropped, so the stream must repeat itself.
    """

    def __init__(self, batches: Iterable[Any], batch_size: int, heldout_tokens: int):
        self.source, self.batch_size = batches, batch_size
        self.iterator: Iterator[Any] = iter(batches)
        self.again = self.iterator is not iter(batches)
        self.spare: deque[Tensor] = deque()
        self.read = self.position = 0
        first = self._next()
        if first is None:
            raise UserError("activations: the stream is empty; it must give batches [B, d] or [B, L, d]")
        self.width = first.shape[1]
        self.spare.append(first)
        held = self._take(heldout_tokens) if heldout_tokens else first[:0]
        if held is None:
            raise UserError(
                f"activations: the stream ended within its first {heldout_tokens} tokens, which are held out; "
                "give more of them, or lower heldout_tokens"
            )
        self.heldout, self.held = held, heldout_tokens

    def batch(self, index: int) -> Tensor:
        while self.position < index:
            self._batch(index)
        return self._batch(index)

    def _batch(self, index: int) -> Tensor:
        batch = self._take(self.batch_size)
        if batch is None and self.again and self.position:
            self.iterator, self.spare = iter(self.source), deque()
            again = self._take(self.held)
            if again is None or not torch.equal(again, self.heldout[: self.held]):
                raise UserError(
                    "activations: a new pass over the stream begins with other tokens, so held-out tokens would be "
                    "trained on: give held-out tokens of your own (heldout), or a stream that repeats itself"
                )
            batch = self._take(self.batch_size)
        if batch is None:
            raise UserError(
                f"activations: the stream ended after {self.position} batches of {self.batch_size} tokens; "
                f"batch {index} was wanted: give more activations or fewer steps"
            )
        self.position += 1
        return batch

    def _next(self) -> Tensor | None:
        raw = next(self.iterator, END)
        if raw is END:
            return None
        self.read += 1
        width = getattr(self, "width", None)
        return check_batch(raw, width, f"activations: item {self.read - 1} of the stream")

    def _take(self, tokens: int) -> Tensor | None:
        """The next `tokens` tokens [tokens, d], or none if the stream ends before."""
        while sum(map(len, self.spare)) < tokens:
            batch = self._next()
            if batch is None:
                return None
            self.spare.append(batch)
        parts = []
        while tokens:
            first = self.spare.popleft()
            parts.append(first[:tokens])
            if len(first) > tokens:
                self.spare.appendleft(first[tokens:])  # a view: only what is used is copied
            tokens -= len(parts[-1])
        return torch.cat(parts) if parts else torch.empty(0, self.width)
