"""Activations on disk: bfloat16 in shards that are memory-mapped, written once and read by any number of runs.

cache.json holds their origin and the shards that are whole. Nothing in the folder depends on when it was written
or on how often that was interrupted.
"""

from __future__ import annotations

import json
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from sampled_sae.config import Config, Count, Positive, Seed, first_difference, read_file, require, write_file
from sampled_sae.data import shards
from sampled_sae.data.stream import END, ActivationSource, Rows, check_batch
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, remove_leftovers, writing
from sampled_sae.utils.progress import show

FORMAT: Final = "sampled-sae activations 1"
INDEX = "cache.json"
SHARD_TOKENS = 1_000_000
VERIFY_FIRST = 2**28
"""Bytes of a cache whose checksums are compared before it is read: about 0.3 s. Those of a larger one are compared at
about 1 GB/s on another core meanwhile, which delays no batch."""
Batches = Callable[[int], Iterator[Tensor]]  # the stream, [n, d] at a time, from the token of that number on


@dataclass(frozen=True, slots=True)
class CacheConfig(Config):
    """How much is kept, and in what pieces."""

    tokens: Positive
    """Tokens whose activations are kept."""
    shard_tokens: Positive = SHARD_TOKENS
    """Tokens per file; an interruption loses less than one file."""
    heldout_tokens: Positive = 65_536
    """Tokens at the start of the text that are left out."""
    seed: Seed = 0
    """Seed of the order."""

    def sizes(self) -> list[int]:
        """Tokens of each shard; only the last may have fewer."""
        whole, rest = divmod(self.tokens, self.shard_tokens)
        return [self.shard_tokens] * whole + [rest] * (rest > 0)


def bytes_needed(tokens: int, width: int, shard_tokens: int = SHARD_TOKENS) -> int:
    """What the shards of a cache take on disk."""
    return sum(shards.size(n, width) for n in CacheConfig(tokens, shard_tokens).sizes())


def write(
    source: ActivationSource,
    folder: str | Path,
    tokens: int,
    *,
    seed: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    heldout_tokens: int = 65_536,
    progress: bool = True,
) -> Path:
    """Write the activations of a source, without its held-out tokens, in the order in which it gives them."""
    CacheConfig(tokens, shard_tokens, heldout_tokens, seed)
    if (Path(folder) / INDEX).exists():  # it may have been begun with another size of the buffer
        source = source.as_begun(_Index.read(Path(folder)).description)
    streams = source.open(source.cache_batch, heldout_tokens, seed)
    if len(streams) != 1:
        raise UserError(f"hook points {', '.join(streams)}: a cache holds one; write one for each")
    [stream] = streams.values()

    def batches(start: int) -> Iterator[Tensor]:
        first, skip = divmod(start, stream.batch_size)
        yield stream.batch(first)[skip:]
        yield from map(stream.batch, count(first + 1))

    decides = ("buffer_tokens", "rolling", "seed", "digest")
    decided = {name: stream.identity[name] for name in decides if name in stream.identity}
    bar = show(tokens, what="harvest", unit="tokens", enabled=progress)
    try:
        write_cache(folder, batches, tokens, {**stream.metadata, **decided}, shard_tokens, bar.update)
    finally:
        bar.close()
        stream.close()
    return Path(folder)


def write_cache(
    folder: str | Path,
    batches: Batches,
    tokens: int,
    description: dict[str, Any],
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int], Any] = lambda done: None,
) -> None:
    """Write the first `tokens` activations of the stream, or those shards of them that are not there yet.

    `description` is plain JSON about their origin; a folder with another one is refused. A finished cache grows when
    more tokens are wanted. `progress` receives the number of the last token written.
    """
    folder, config = Path(folder), CacheConfig(tokens, shard_tokens)
    try:
        plain = json.loads(json.dumps(description, allow_nan=False))  # as it will be read again: tuples are lists
    except (TypeError, ValueError) as error:
        raise UserError(f"description = {description!r}: must be plain JSON ({error})") from None
    old = _existing(folder, config, plain)
    # Several runs may need the same cache at once: when it is there, none of them needs the lock.
    if old is not None and old.finished and old == _intact(old, config, folder):
        return
    with alone_in(folder):
        with writing(folder):
            for name in (INDEX, "shard-*"):
                remove_leftovers(folder, name)
        old, feed, sizes = _existing(folder, config, plain), None, config.sizes()
        if old is None:
            feed = _Feed(batches, 0, None)
            old = _Index(description=plain, width=feed.width, tokens=tokens, shard_tokens=shard_tokens)
        index = _intact(old, config, folder)
        missing = sorted(set(range(len(sizes))) - {shard.number for shard in index.shards})
        needed, free = sum(shards.size(sizes[n], index.width) for n in missing), shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(
                f"{folder}: the cache needs {needed / 1e9:.2f} GB more and {free / 1e9:.2f} GB are free; free some "
                "space, choose another folder or lower tokens"
            )
        index.write(folder)
        for number in missing:
            path, start, rows = _path(folder, number), number * shard_tokens, sizes[number]
            if feed is None or feed.position != start:
                feed = _Feed(batches, start, index.width)
            crc32 = shards.write(path, feed.pieces(rows, progress), rows, index.width)
            whole = (*index.shards, _Shard(number, path.name, rows, crc32))
            index = replace(index, shards=tuple(sorted(whole, key=lambda shard: shard.number)))
            index.write(folder)


def open_cache(folder: str | Path, verify: bool = False) -> CachedActivations:
    """Open a finished cache for reading.

    The size and header of each shard are checked. So are the checksums: of a cache of up to VERIFY_FIRST bytes, or
    with `verify`, before any row is read, of a larger one in a thread of its own while it is read.
    """
    folder = Path(folder)
    index = _Index.read(folder)
    if not index.finished:
        done = sum(shard.tokens for shard in index.shards)
        raise UserError(
            f"{folder}: the cache is not finished ({done} of {index.tokens} tokens); write it again with the "
            "same settings to continue it"
        )
    return CachedActivations(folder, index, verify)


class CachedActivations(Rows):
    """The rows [tokens, d_in] of a cache, read from disk on demand."""

    def __init__(self, folder: Path, index: _Index, verify: bool = False):
        self.folder, self.description = folder, index.description
        self.width, self.tokens = index.width, index.tokens
        self.shape = (self.tokens, self.width)
        sizes = index.config.sizes()
        self._shards = [shards.map_rows(_path(folder, number), n, self.width) for number, n in enumerate(sizes)]
        self._bounds = np.cumsum([0, *sizes])
        self._checksums = {shard.number: shard.crc32 for shard in index.shards}
        self._damage: UserError | None = None
        self._closed = threading.Event()
        if verify or bytes_needed(self.tokens, self.width, index.shard_tokens) <= VERIFY_FIRST:
            self._verify()
            if self._damage is not None:
                raise self._damage
        else:
            threading.Thread(target=self._verify, name="verify cache", daemon=True).start()

    def _verify(self) -> None:
        try:
            for number, crc32 in sorted(self._checksums.items()):
                shards.verify(_path(self.folder, number), crc32, self._closed.is_set)
        except UserError as error:
            self._damage = error

    def __len__(self) -> int:
        return self.tokens

    def close(self) -> None:
        self._closed.set()

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.description

    def identity(self) -> dict[str, Any]:
        """From the checksums of the shards, which are verified."""
        crc32 = zlib.crc32(json.dumps(sorted(self._checksums.items())).encode())
        return {"tokens": self.tokens, "d_in": self.width, "digest": f"{crc32:08x}"}

    def take(self, rows: Tensor) -> Tensor:
        """Rows by number [n] long, in any order -> [n, d_in] bfloat16 in that order."""
        if self._damage is not None:
            raise self._damage
        # Read from front to back: sequential reads are faster, and each shard is visited once.
        ascending, order = (part.numpy() for part in rows.cpu().sort())
        if len(rows) and not 0 <= ascending[0] <= ascending[-1] < self.tokens:
            raise IndexError(f"rows {ascending[0]} to {ascending[-1]} of a cache of {self.tokens} tokens")
        taken = np.empty((len(rows), self.width), np.int16)
        cuts = np.searchsorted(ascending, self._bounds)
        for number in np.flatnonzero(np.diff(cuts)):
            part = slice(cuts[number], cuts[number + 1])
            taken[order[part]] = self._shards[number][ascending[part] - self._bounds[number]]
        return torch.from_numpy(taken).view(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Shard(Config):
    """One finished shard."""

    number: Count
    file: str
    tokens: Positive
    crc32: Count  # of the whole file


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index(Config):
    """The content of cache.json."""

    format: Literal["sampled-sae activations 1"] = FORMAT
    description: dict[str, Any]
    width: Positive
    dtype: Literal["bfloat16"] = "bfloat16"
    tokens: Positive
    shard_tokens: Positive
    finished: bool = False
    shards: tuple[_Shard, ...] = ()  # those that are whole, by number

    def check(self) -> None:
        # The count first: sizes of a damaged index may not fit into memory.
        finished = len(self.shards) == -(-self.tokens // self.shard_tokens)
        whole = [(shard.number, shard.tokens) for shard in self.shards]
        finished = finished and sorted(whole) == list(enumerate(self.config.sizes()))
        object.__setattr__(self, "finished", finished)

    @property
    def config(self) -> CacheConfig:
        return CacheConfig(self.tokens, self.shard_tokens)

    @classmethod
    def read(cls, folder: Path) -> _Index:
        return cls.from_dict(read_file(folder / INDEX, "cache"), folder / INDEX)

    def write(self, folder: Path) -> None:
        write_file(folder / INDEX, "cache", self.to_dict())


class _Feed:
    """The stream from token number `position` on, as bfloat16 in the CPU's memory."""

    def __init__(self, batches: Batches, position: int, width: int | None):
        self.position, self._read = position, 0
        self._iterator = iter(batches(position))
        self._spare = self._next(width)
        self.width = self._spare.shape[1]

    def pieces(self, tokens: int, progress: Callable[[int], Any]) -> Iterator[Tensor]:
        """The next `tokens` tokens, [n, d] at a time."""
        while tokens:
            while not len(self._spare):
                self._spare = self._next(self.width)
            piece, self._spare = self._spare[:tokens], self._spare[tokens:]
            self.position += len(piece)
            tokens -= len(piece)
            yield piece
            progress(self.position)

    def _next(self, width: int | None) -> Tensor:
        raw = next(self._iterator, END)
        if raw is END:
            at = self.position
            right = f"give more activations, or set tokens = {at}" if at else "it must give batches [n, d]"
            raise UserError(f"activations: the stream ended after {at} tokens; {right}")
        where = f"activations: item {self._read} of the stream"
        self._read += 1
        return check_batch(raw, width, where).to(torch.bfloat16).cpu().contiguous()


def _existing(folder: Path, config: CacheConfig, description: dict[str, Any]) -> _Index | None:
    """What is in the folder already; refused if it is another cache."""
    if not (folder / INDEX).exists():
        if stray := next(folder.glob("shard-*.safetensors"), None):
            raise UserError(f"{stray}: a shard without its {INDEX}; choose another folder, or delete the shards")
        return None
    index = _Index.read(folder)
    difference = first_difference(index.description, description) or first_difference(
        index.shard_tokens, config.shard_tokens, "shard_tokens"
    )
    if difference:
        raise UserError(f"{folder}: the cache there is another one: {difference}; choose another folder")
    held = max((shard.number * config.shard_tokens + shard.tokens for shard in index.shards), default=0)
    right = f"the cache in {folder} has {held} already; give at least as many, or choose another folder"
    require(held <= config.tokens, "tokens", config.tokens, right)
    return index


def _intact(index: _Index, config: CacheConfig, folder: Path) -> _Index:
    """The index of what is now to be there, with the shards whose files are there in full."""
    wanted = dict(enumerate(config.sizes()))

    def whole(shard: _Shard) -> bool:
        path = _path(folder, shard.number)
        in_full = path.is_file() and path.stat().st_size == shards.size(shard.tokens, index.width)
        return in_full and wanted.get(shard.number) == shard.tokens

    return replace(index, tokens=config.tokens, shards=tuple(filter(whole, index.shards)))


def _path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"
