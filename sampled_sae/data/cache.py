"""Activations on disk: bfloat16 in shards that are memory-mapped, written once and read by any number of runs.

cache.json holds their origin and the shards that are whole. Nothing in the folder of a complete cache depends on when
it was written, by how many processes, or on how often that was interrupted.
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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sampled_sae.data.cache_index import (
    INDEX,
    SHARD_TOKENS,
    CacheConfig,
    Index,
    Part,
    Shard,
    begin,
    find,
    join_parts,
    map_rows,
    path_of,
    record,
    remove_parts,
    shard_size,
    verify_shard,
    write_shard,
)
from sampled_sae.data.stream import END, ActivationSource, ActivationStream, Rows, check_batch, in_own_modes
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, remove_leftovers, writing
from sampled_sae.utils.progress import show

VERIFY_FIRST = 2**28
"""Bytes of a cache whose checksums are compared before it is read: about 0.3 s. Those of a larger one are compared at
about 1 GB/s on another core meanwhile, which delays no batch."""
Batches = Callable[[int], Iterator[Tensor]]  # the stream, [n, d] at a time, from the token of that number on


def bytes_needed(tokens: int, width: int, shard_tokens: int = SHARD_TOKENS) -> int:
    """What the shards of a cache take on disk."""
    return sum(shard_size(n, width) for n in CacheConfig(tokens, shard_tokens).sizes())


def write(
    source: ActivationSource,
    folder: str | Path,
    tokens: int,
    *,
    seed: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    heldout_tokens: int = 65_536,
    progress: bool = True,
    part: Part | None = None,
) -> Path:
    """Write the activations of a source, without its held-out tokens, in the order in which it gives them.

    `part` is one of several processes that write the cache together, each some of its shards.
    """
    config, folder = CacheConfig(tokens, shard_tokens, heldout_tokens, seed), Path(folder)
    stream, description = _open(source, folder, config)
    if part is not None and _begun_otherwise(folder, description):
        # Another part was faster, with another size of the buffer, which follows from the free memory.
        stream.close()
        stream, description = _open(source, folder, config)
    last = tokens if part is None else min(tokens, part.shards(len(config.sizes())).stop * shard_tokens)
    stream.end_at(-(-last // stream.batch_size))

    def batches(start: int) -> Iterator[Tensor]:
        first, skip = divmod(start, stream.batch_size)
        yield stream.batch(first)[skip:]
        yield from map(stream.batch, count(first + 1))

    bar = show(tokens, what="harvest", unit="tokens", enabled=progress)
    try:
        write_cache(folder, batches, tokens, description, shard_tokens, bar.update, part, stream.d_in)
    finally:
        bar.close()
        stream.close()
    return folder


def _open(source: ActivationSource, folder: Path, config: CacheConfig) -> tuple[ActivationStream, dict[str, Any]]:
    """The stream, and the description of its origin."""
    begun = (folder / INDEX).exists()  # perhaps with another size of the buffer
    source = source.as_begun(Index.read(folder).description) if begun else source.for_cache(config.tokens)
    streams = source.open(source.cache_batch, config.heldout_tokens, config.seed)
    if len(streams) != 1:
        raise UserError(f"hook points {', '.join(streams)}: a cache holds one; write one for each")
    [stream] = streams.values()
    decides = ("buffer_tokens", "rolling", "seed", "digest")
    decided = {name: stream.identity[name] for name in decides if name in stream.identity}
    return stream, {**stream.metadata, **decided}


def _begun_otherwise(folder: Path, description: dict[str, Any]) -> bool:
    name = "buffer_tokens"
    return (folder / INDEX).exists() and Index.read(folder).description.get(name) != description.get(name)


def write_cache(
    folder: str | Path,
    batches: Batches,
    tokens: int,
    description: dict[str, Any],
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int], Any] = lambda done: None,
    part: Part | None = None,
    width: int | None = None,
) -> None:
    """Write the first `tokens` activations of the stream, or those shards of them that are not there yet.

    `description` is plain JSON about their origin; a folder with another one is refused. A finished cache grows when
    more tokens are wanted. `progress` receives the number of the last token written. `part` writes only its own shards,
    beside other processes that write theirs. Without `width`, that of the first batch is taken.
    """
    folder, config = Path(folder), CacheConfig(tokens, shard_tokens)
    try:
        plain = json.loads(json.dumps(description, allow_nan=False))  # as it will be read again: tuples are lists
    except (TypeError, ValueError) as error:
        raise UserError(f"description = {description!r}: must be plain JSON ({error})") from None
    old = find(folder, config, plain)
    # Several runs may need the same cache at once: when it is there, none of them needs the lock.
    if old is not None and old.finished and old == replace(old, tokens=tokens).existing(folder):
        if part is not None:
            join_parts(folder)
        return
    writer = _Writer(folder, batches, config, progress, width)
    if part is None or part.of == 1:
        writer.write(plain)
    else:
        writer.write_part(plain, part)


@dataclass
class _Writer:
    """Writes shards of one cache."""

    folder: Path
    batches: Batches
    config: CacheConfig
    progress: Callable[[int], Any]
    width: int | None
    feed: _Feed | None = None

    def write(self, description: dict[str, Any]) -> None:
        """All shards that are missing."""
        with alone_in(self.folder):
            self._clean(INDEX, "shard-*")
            old = find(self.folder, self.config, description) or self._new(description)
            index = replace(old, tokens=self.config.tokens).existing(self.folder)
            missing = self._missing(index, range(len(self.config.sizes())))
            index.write(self.folder)
            for shard in map(self._shard, missing):
                index = index.plus([shard])
                index.write(self.folder)
            remove_parts(self.folder)

    def write_part(self, description: dict[str, Any], part: Part) -> None:
        """The shards of one part that are missing."""
        own = part.shards(len(self.config.sizes()))
        with alone_in(part.folder(self.folder)):
            index = begin(self.folder, self.config, description, lambda: self._new(description))
            self._clean(*(path_of(self.folder, number).name for number in own))
            done = [shard for shard in index.shards if shard.number in own]
            for shard in map(self._shard, self._missing(index, own)):
                done.append(shard)
                record(self.folder, part, done)
        join_parts(self.folder)

    def _new(self, description: dict[str, Any]) -> Index:
        if self.width is None:
            self.feed = _Feed(self.batches, 0, None)
            self.width = self.feed.width
        tokens, shard_tokens = self.config.tokens, self.config.shard_tokens
        return Index(description=description, width=self.width, tokens=tokens, shard_tokens=shard_tokens)

    def _clean(self, *names: str) -> None:
        with writing(self.folder):
            for name in names:
                remove_leftovers(self.folder, name)

    def _missing(self, index: Index, wanted: range) -> list[int]:
        """The shards to write; refused if the disk has no room for them."""
        self.width, there = index.width, {shard.number for shard in index.shards}
        missing = [number for number in wanted if number not in there]
        needed = sum(shard_size(index.tokens_of(number), index.width) for number in missing)
        with writing(self.folder):
            free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise UserError(
                f"{self.folder}: the cache needs {needed / 1e9:.2f} GB more and {free / 1e9:.2f} GB are free; free "
                "some space, choose another folder or lower tokens"
            )
        return missing

    def _shard(self, number: int) -> Shard:
        path, start = path_of(self.folder, number), number * self.config.shard_tokens
        rows = self.config.sizes()[number]
        if self.feed is None or self.feed.position != start:
            self.feed = _Feed(self.batches, start, self.width)
        crc32 = write_shard(path, self.feed.pieces(rows, self.progress), rows, self.feed.width)
        return Shard(number, path.name, rows, crc32)


def open_cache(folder: str | Path, verify: bool = False) -> CachedActivations:
    """Open a finished cache for reading.

    The size and header of each shard are checked. So are the checksums: of a cache of up to VERIFY_FIRST bytes, or
    with `verify`, before any row is read, of a larger one in a thread of its own while it is read.
    """
    folder = Path(folder)
    index = Index.read(folder)
    if not index.finished:
        done = sum(shard.tokens for shard in index.shards)
        raise UserError(
            f"{folder}: the cache is not finished ({done} of {index.tokens} tokens); write it again with the "
            "same settings to continue it"
        )
    return CachedActivations(folder, index, verify)


class CachedActivations(Rows):
    """The rows [tokens, d_in] of a cache, read from disk on demand."""

    def __init__(self, folder: Path, index: Index, verify: bool = False):
        self.folder, self.description = folder, index.description
        self.width, self.tokens = index.width, index.tokens
        self.shape = (self.tokens, self.width)
        sizes = index.config.sizes()
        self._shards = [map_rows(path_of(folder, number), n, self.width) for number, n in enumerate(sizes)]
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
                verify_shard(path_of(self.folder, number), crc32, self._closed.is_set)
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


class _Feed:
    """The stream from token number `position` on, as bfloat16 in the CPU's memory."""

    def __init__(self, batches: Batches, position: int, width: int | None):
        self.position, self._read = position, 0
        self._iterator = in_own_modes(batches(position))
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
