"""Activations of any origin -> batches [batch_size, d_in], the same ones for the same seed, from any step on.

Held-out tokens are set aside first and never trained on.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from sampled_sae.utils.errors import UserError

END = object()  # what an exhausted iterator gives; an item that is None is an error, not the end
LARGEST = 1e17  # magnitude of an activation: a squared norm over any common width still fits into float32
FLOATS = "must be floating point: float16, bfloat16, float32 or float64"
DIGEST_BYTES = 2**27
"""Larger arrays are identified by as many bytes of evenly spaced rows. Hashing them takes about 0.2 s."""


@runtime_checkable
class ActivationStream(Protocol):
    """Batches by number. Inherit from it: what has a default here is optional."""

    d_in: int
    batch_size: int
    heldout: Tensor
    """[n, d_in] tokens that no batch contains."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What decides the batches, as plain JSON; a run is resumed only with the same."""
        return {}

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What is saved with each SAE about the origin of its activations, as plain JSON."""
        return {}

    @abstractmethod
    def batch(self, index: int) -> Tensor:
        """Batch number `index` [batch_size, d_in], a function of the index alone; read in rising order, not always
        from 0. On several ranks this is a collective call."""

    def row(self, index: int, position: int) -> str:
        """Where row `position` of batch `index` comes from, for an error."""
        return f"row {position} of the batch"

    def leave_out(self) -> None:
        """No batch is needed on this rank: `batch` only takes part in what the ranks do together."""
        return

    def end_at(self, steps: int) -> None:
        """No batch is needed from number `steps` on: none has to be prepared."""
        return

    def memory_estimate(self) -> int:
        """Peak bytes on the training device, without the batch itself."""
        return 0

    def close(self) -> None:
        """Release buffers and threads."""
        return


@runtime_checkable
class ActivationSource(Protocol):
    """Activations before batch size, seed and length of the training are known: returned by `activations`, opened by
    `train`, once for each pass over the SAEs."""

    @property
    def cache_batch(self) -> int:
        """Tokens per batch when the activations are written to a cache."""
        return 4096

    @abstractmethod
    def open(
        self, batch_size: int, heldout_tokens: int, seed: int, steps: int | None = None
    ) -> Mapping[str, ActivationStream]:
        """One stream for each hook point; where there are several, the name is also the name of the run's folder."""

    @property
    def origin(self) -> Origin | None:
        """What opens the same source again later; None if only the caller can."""
        return None

    def for_cache(self, tokens: int) -> ActivationSource:
        """The source with what it chooses itself as suits a cache of so many tokens."""
        return self

    def as_begun(self, record: Mapping[str, Any]) -> ActivationSource:
        """The source with what it chooses itself as in a run whose streams had the identity `record`."""
        return self


class Origin(Protocol):
    """Where activations come from, as plain settings."""

    def reopen(self, device: str) -> ActivationSource:
        """The source, on that device."""


class Rows(ABC):
    """Activations [tokens, d_in] that are read by row number: an array, a file, a cache on disk."""

    shape: tuple[int, int]
    modified: float | None = None
    """Time of the last change of a file."""
    length: int | None = None
    """Tokens per sequence, of activations [N, L, d_in]."""
    device: torch.device = torch.device("cpu")
    """Where `take` takes row numbers without a copy."""

    @abstractmethod
    def take(self, rows: Tensor) -> Tensor:
        """Row numbers [n] long, in any order -> [n, d_in] in that order."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """See `ActivationStream`."""
        return {}

    def close(self) -> None:  # noqa: B027 (optional)
        """Release threads."""

    def row(self, number: int) -> str:
        """Name of a row for an error."""
        return f"row {number}" if self.length is None else "row {}, position {}".format(*divmod(number, self.length))

    def identity(self) -> dict[str, Any]:
        """Shape and a digest over the whole range; where that is a sample, also the time of the last change."""
        tokens, d_in = self.shape
        every = max(1, -(-tokens * d_in * self.take(torch.zeros(1, dtype=torch.long)).itemsize // DIGEST_BYTES))
        crc32 = 0
        for rows in torch.arange(0, tokens, every).split(4096):
            crc32 = zlib.crc32(self.take(rows).contiguous().cpu().view(torch.uint8).numpy().data, crc32)
        found = {"tokens": tokens, "d_in": d_in, "digest": f"{crc32:08x}"}
        return found if every == 1 or self.modified is None else found | {"modified": self.modified}


class Endless(ABC):
    """A source that makes batch number `index` on demand, such as synthetic data."""

    @abstractmethod
    def batch(self, index: int, size: int, split: Literal["train", "heldout"] = "train") -> Tensor:
        """[size, d_in], a pure function of its arguments; the two splits share no sample."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """See `ActivationStream`."""
        return {}


def check_batch(
    batch: Any, d_in: int | None, where: str, row: Callable[[int], str] = "row {}".format, wait: bool = True
) -> Tensor:
    """A batch [..., d_in] -> [n, d_in], without gradients, or one line about what is wrong with it.

    `row` names one of its rows in that line. Without `wait`, values on a GPU are left to the run, which checks those of
    many batches at once: to look at them here would wait for the GPU.
    """
    tensor = as_tensor(batch, where)
    if tensor.ndim < 2:
        raise UserError(f"{where} of shape {tuple(tensor.shape)}: must be [N, d_in] or [N, L, d_in]")
    if d_in is not None and tensor.shape[-1] != d_in:
        raise UserError(f"{where} has width {tensor.shape[-1]}: the activations before it have width {d_in}")
    tensor = tensor.reshape(-1, tensor.shape[-1])
    if not wait and tensor.device.type != "cpu":
        return tensor
    # Smallest and largest show NaN and infinity too, in a tenth of the time of a look at each value.
    if tensor.numel() and not bool((torch.stack(torch.aminmax(tensor)).double().abs() <= LARGEST).all()):
        bad = ~(tensor.double().abs() <= LARGEST)
        number = int(bad.any(dim=1).nonzero()[0])
        raise bad_value(float(tensor[number][bad[number]][0]), where, row(number))
    return tensor


def bad_value(value: float, where: str, row: str) -> UserError:
    """One line about an activation that cannot be trained on."""
    if not np.isfinite(value):
        return UserError(f"{where}: NaN or infinity (first in {row}): activations must be finite")
    return UserError(
        f"{where}: {value:.3g} in {row}: its square is beyond the range of float32, in which SAEs are trained; remove "
        "such tokens, or scale the activations down"
    )


def as_tensor(batch: Any, where: str) -> Tensor:
    """A tensor or array -> a dense tensor of float16, bfloat16, float32 or float64 without gradients."""
    tensor = batch
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "fiub":
        native = batch.astype(np.float64 if batch.dtype.itemsize > 8 else batch.dtype.newbyteorder("="))
        tensor = torch.from_numpy(np.ascontiguousarray(native).reshape(batch.shape))
    if not isinstance(tensor, Tensor):
        kind = f"an array of {batch.dtype}" if isinstance(batch, np.ndarray) else f"a {type(batch).__name__}"
        raise UserError(f"{where} is {kind}: must be a tensor or an array [N, d_in] or [N, L, d_in]")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise UserError(f"{where} is a {kind} tensor: must be dense, such as .to_dense() returns")
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise UserError(f"{where} is {tensor.dtype} of shape {tuple(tensor.shape)}: {FLOATS}")
    return tensor.detach()


def permutation(n: int, seed: int, number: int) -> Tensor:
    """The numbers 0 to n - 1 in random order, [n] long; decided by the arguments alone."""
    seeds = np.random.SeedSequence([seed % 2**63, number]).generate_state(1, np.uint64)
    return torch.randperm(n, generator=torch.Generator().manual_seed(int(seeds[0]) >> 1))


def held_out(tokens: int, wanted: int, batch_size: int) -> int:
    """Number of held-out tokens of an array, at most a tenth of it; the rest must be enough for a batch."""
    kept_out = min(wanted, tokens // 10)
    if tokens - kept_out < batch_size:
        raise UserError(
            f"activations hold {tokens} tokens, {kept_out} of them held out: too few for one batch of "
            f"batch_size = {batch_size}"
        )
    return kept_out


class ArrayStream(ActivationStream):
    """All activations at hand: shuffled anew for each pass."""

    def __init__(self, activations: Rows, batch_size: int, heldout_tokens: int, seed: int):
        self.rows, self.batch_size, self.seed = activations, batch_size, seed
        tokens, self.d_in = activations.shape
        kept_out = held_out(tokens, heldout_tokens, batch_size)
        order = permutation(tokens, seed, 0)
        self.training = order[kept_out:]
        self.batches = len(self.training) // batch_size
        self.heldout = self._take(order[:kept_out], "the held-out part of activations")
        self._epoch, self._order = -1, self.training

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.rows.identity()

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.rows.metadata

    def batch(self, index: int) -> Tensor:
        epoch, position = divmod(index, self.batches)
        if epoch != self._epoch:
            self._epoch = epoch
            order = self.training[permutation(len(self.training), self.seed, epoch + 1)]
            self._order = order.to(self.rows.device)
        rows = self._order[position * self.batch_size : (position + 1) * self.batch_size]
        return self._take(rows, f"activations: batch {index}")

    def row(self, index: int, position: int) -> str:
        epoch, batch = divmod(index, self.batches)
        order = permutation(len(self.training), self.seed, epoch + 1)
        return self.rows.row(int(self.training[order[batch * self.batch_size + position]]))

    def close(self) -> None:
        self.rows.close()

    def _take(self, rows: Tensor, where: str) -> Tensor:
        return check_batch(self.rows.take(rows), self.d_in, where, lambda n: self.rows.row(int(rows[n])), wait=False)


class EndlessStream(ActivationStream):
    """Fresh samples without end; batch number `index` is made on demand."""

    def __init__(self, source: Endless, batch_size: int, heldout_tokens: int):
        self.source, self.batch_size = source, batch_size
        self.heldout = check_batch(source.batch(0, max(1, heldout_tokens), split="heldout"), None, "the held-out batch")
        self.d_in = self.heldout.shape[1]

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.source.identity

    def batch(self, index: int) -> Tensor:
        batch = self.source.batch(index, self.batch_size)
        return check_batch(batch, self.d_in, f"activations: batch {index}", wait=False)


class IterableStream(ActivationStream):
    """An iterable of [N, d_in] or [N, L, d_in] batches of any size, cut anew into batches of `batch_size`.

    One that can be iterated again (a list, a data set) is read as often as needed; a generator once. Each
    pass must begin with the same tokens, for those are held out. To continue after an interruption, the tokens
    that were used are read and dropped, so the stream must repeat itself.
    """

    def __init__(self, batches: Iterable[Any], batch_size: int, heldout_tokens: int, key: str | None = None):
        """`key` names the activations in items that are dictionaries."""
        self.source, self.batch_size, self.key = batches, batch_size, key
        iterator = iter(batches)
        self.again = iterator is not iter(batches)
        self.iterator = in_own_modes(iterator)
        self.spare: deque[Tensor] = deque()
        self.read = self.position = self.tokens = 0
        first = self._next(None)
        if first is None:
            raise UserError("activations: the stream is empty; it must give batches [N, d_in] or [N, L, d_in]")
        self.d_in = first.shape[1]
        self.spare.append(first)
        held = self._take(heldout_tokens) if heldout_tokens else first[:0]
        if held is None:
            raise UserError(
                f"activations: the stream ended within its first {heldout_tokens} tokens, which are held out; "
                "give more of them, or lower heldout_tokens"
            )
        self.heldout, self.held = held, heldout_tokens

    def batch(self, index: int) -> Tensor:
        while True:
            batch = self._take(self.batch_size)
            if batch is None and self.again and self.position:
                self.iterator, self.spare = in_own_modes(self.source), deque()
                self.read = self.tokens = 0
                again = self._take(self.held)
                if again is None or not torch.equal(again, self.heldout[: self.held]):
                    raise UserError(
                        "activations: a new pass over the stream begins with other tokens, so held-out tokens would "
                        "be trained on: give held-out tokens of your own (heldout), or a stream that repeats itself"
                    )
                batch = self._take(self.batch_size)
            if batch is None:
                raise UserError(
                    f"activations: the stream ended after {self.position} steps of {self.batch_size} tokens: give more "
                    "activations or fewer steps"
                )
            self.position += 1
            if self.position > index:
                return batch

    def _next(self, d_in: int | None) -> Tensor | None:
        raw = next(self.iterator, END)
        if raw is END:
            return None
        self.read += 1
        where, before = f"activations: item {self.read - 1} of the stream", self.tokens
        batch = check_batch(
            self._chosen(raw, where), d_in, where, lambda n: f"its row {n}, row {before + n} of the stream", wait=False
        )
        self.tokens += len(batch)
        return batch

    def _chosen(self, raw: Any, where: str) -> Any:
        """The activations in an item: a DataLoader gives tuples, or dictionaries of columns."""
        if isinstance(raw, list | tuple) and len(raw) == 1:
            return raw[0]
        if not isinstance(raw, Mapping):
            return raw
        if self.key is None and len(raw) == 1:
            return next(iter(raw.values()))
        if self.key not in raw:
            raise UserError(f"key = {self.key!r}: {where} has {', '.join(map(str, raw))}; name one of them")
        return raw[self.key]

    def _take(self, tokens: int) -> Tensor | None:
        """The next `tokens` tokens [tokens, d_in], or none if the stream ends before."""
        while sum(map(len, self.spare)) < tokens:
            batch = self._next(self.d_in)
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
        return torch.cat(parts) if parts else torch.empty(0, self.d_in)


def in_own_modes(items: Iterable[Any]) -> Iterator[Any]:
    """The items of an iterable. A generator that stops within `torch.inference_mode()` or `torch.no_grad()` would leave
    these on for everyone else; here it has them to itself, and finds them again when it goes on."""
    iterator, inference, grad = iter(items), torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    while True:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            item = next(iterator, END)
            inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        if item is END:
            return
        yield item
