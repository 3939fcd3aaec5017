"""Activations on disk: bfloat16 in shards that are memory-mapped, written once and read by any number of runs.

cache.json says what they are of, and which shards are whole. Nothing in the folder depends on when it was written
or on how often that was interrupted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sampled_sae.config import first_difference, require, whole_numbers
from sampled_sae.data import shards
from sampled_sae.data.stream import END, check_batch
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, read_json, write_json

FORMAT = "sampled-sae activations 1"
INDEX = "cache.json"
SHARD_TOKENS = 1_000_000
Batches = Callable[[int], Iterator[Tensor]]
"""Gives the stream of activations, [n, d] at a time, from the token of that number on."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much is kept, and in what pieces."""

    tokens: int
    """Tokens whose activations are kept."""
    shard_tokens: int = SHARD_TOKENS
    """Tokens a file; what an interruption may lose is less than one file."""

    def __post_init__(self) -> None:
        whole_numbers(self, "tokens", "shard_tokens")
        require(self.tokens >= 1, "tokens", self.tokens, "must be at least 1")
        require(self.shard_tokens >= 1, "shard_tokens", self.shard_tokens, "must be at least 1")

    def sizes(self) -> list[int]:
        """Tokens of each shard; only the last may have fewer."""
        whole, rest = divmod(self.tokens, self.shard_tokens)
        return [self.shard_tokens] * whole + [rest] * (rest > 0)


def bytes_needed(tokens: int, width: int, shard_tokens: int = SHARD_TOKENS) -> int:
    """What the shards of a cache take on disk."""
    return sum(shards.size(n, width) for n in CacheConfig(tokens, shard_tokens).sizes())


def write_cache(
    folder: str | Path,
    batches: Batches,
    tokens: int,
    description: dict[str, Any],
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int], Any] | None = None,
) -> None:
    """Write the first `tokens` activations of the stream, or those shards of them that are not there yet.

    `description` is plain JSON that says what they are of; a folder with another one is refused. A finished cache
    grows when more tokens are asked for. `progress` is told the number of the token that was reached.
    """
    folder, config, plain = Path(folder), CacheConfig(tokens, shard_tokens), _plain(description)
    # Several runs may ask for the same cache at once: when it is there, none of them needs the lock.
    if _is_complete(folder, config, plain):
        return
    with alone_in(folder):
        _write_missing(folder, batches, config, plain, progress or (lambda done: None))


def open_cache(folder: str | Path, verify: bool = False) -> CachedActivations:
    """Open a finished cache for reading; each shard's size is checked, with `verify` all of its bytes."""
    folder = Path(folder)
    index = _Index.read(folder)
    if not index.finished:
        done = sum(shard.tokens for shard in index.shards.values())
        raise UserError(
            f"{folder}: the cache is not finished ({done} of {index.config.tokens} tokens); write it again with the "
            "same settings, it goes on from there"
        )
    cached = CachedActivations(folder, index)
    if verify:
        for number, shard in sorted(index.shards.items()):
            shards.verify(_path(folder, number), shard.crc32)
    return cached


def verify_cache(folder: str | Path) -> None:
    """Read every byte of a cache and compare the checksums; the first damaged shard gets a clear line."""
    open_cache(folder, verify=True)


class CachedActivations:
    """The rows [tokens, d] of a cache, read from disk as they are asked for."""

    def __init__(self, folder: Path, index: _Index):
        self.folder, self.description = folder, index.description
        self.width, self.tokens = index.width, index.config.tokens
        sizes = index.config.sizes()
        self._shards = [shards.map_rows(_path(folder, number), n, self.width) for number, n in enumerate(sizes)]
        self._bounds = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return self.tokens

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens, self.width

    def take(self, rows: Tensor) -> Tensor:
        """Rows by number [n] long, in any order -> [n, d] bfloat16 in that order."""
        # Read from front to back: the disk likes it, and each shard is visited once.
        ascending, order = (part.numpy() for part in rows.cpu().sort())
        if len(rows) and not 0 <= ascending[0] <= ascending[-1] < self.tokens:
            raise IndexError(f"rows {ascending[0]} to {ascending[-1]} of a cache of {self.tokens} tokens")
        taken = np.empty((len(rows), self.width), np.int16)
        cuts = np.searchsorted(ascending, self._bounds)
        for number in np.flatnonzero(np.diff(cuts)):
            part = slice(cuts[number], cuts[number + 1])
            taken[order[part]] = self._shards[number][ascending[part] - self._bounds[number]]
        return torch.from_numpy(taken).view(torch.bfloat16)


class _Shard(NamedTuple):
    tokens: int
    crc32: int
    """Of the whole file."""


@dataclass(frozen=True, slots=True)
class _Index:
    """What cache.json says."""

    description: dict[str, Any]
    width: int
    config: CacheConfig
    shards: dict[int, _Shard]
    """Those that are whole, by number."""

    @property
    def finished(self) -> bool:
        return {number: shard.tokens for number, shard in self.shards.items()} == dict(enumerate(self.config.sizes()))

    @classmethod
    def read(cls, folder: Path) -> _Index:
        raw = read_json(folder / INDEX)
        try:
            if raw["format"] != FORMAT or raw["dtype"] != "bfloat16":
                raise ValueError
            config = CacheConfig(raw["tokens"], raw["shard_tokens"])
            whole = {shard["number"]: _Shard(shard["tokens"], shard["crc32"]) for shard in raw["shards"]}
            return cls(raw["description"], raw["width"], config, whole)
        except (KeyError, TypeError, ValueError, UserError):
            raise UserError(f"{folder / INDEX}: not the index of a cache of activations of this program") from None

    def write(self, folder: Path) -> None:
        whole = [
            {"number": number, "file": _path(folder, number).name, "tokens": shard.tokens, "crc32": shard.crc32}
            for number, shard in sorted(self.shards.items())
        ]
        content = {
            "format": FORMAT,
            "description": self.description,
            "width": self.width,
            "dtype": "bfloat16",
            "tokens": self.config.tokens,
            "shard_tokens": self.config.shard_tokens,
            "finished": self.finished,
            "shards": whole,
        }
        write_json(folder / INDEX, content)


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
            piece = self._spare[:tokens]
            yield piece
            self._spare = self._spare[len(piece) :]
            self.position += len(piece)
            tokens -= len(piece)
            progress(self.position)

    def _next(self, width: int | None) -> Tensor:
        raw = next(self._iterator, END)
        if raw is END:
            at = self.position
            right = f"give more activations, or set tokens = {at}" if at else "it must give batches [n, d]"
            raise UserError(f"activations: the stream ended after {at} tokens; {right}")
        where = f"activations: item {self._read} of the stream"
        self._read += 1
        batch = check_batch(raw, width, where).detach().to(torch.bfloat16)
        # What was finite can only have become infinite, and the ends show that; isfinite takes ten times as long.
        if batch.numel() and torch.stack(torch.aminmax(batch)).isinf().any():
            raise UserError(f"{where}: values beyond the range of bfloat16, in which they are kept; scale them down")
        return batch.cpu().contiguous()


def _plain(description: dict[str, Any]) -> dict[str, Any]:
    """As it will be read again: tuples are lists in JSON."""
    try:
        return json.loads(json.dumps(description, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(f"description = {description!r}: must be plain JSON ({error})") from None


def _is_complete(folder: Path, config: CacheConfig, description: dict[str, Any]) -> bool:
    index = _existing(folder, config, description)
    return index is not None and index.config == config and index.finished and index == _without_damaged(index, folder)


def _existing(folder: Path, config: CacheConfig, description: dict[str, Any]) -> _Index | None:
    """What is in the folder already; refused if it is another cache."""
    if not (folder / INDEX).exists():
        if stray := next(folder.glob("shard-*.safetensors"), None):
            raise UserError(f"{stray}: a shard without its {INDEX}; choose another folder, or delete the shards")
        return None
    index = _Index.read(folder)
    difference = first_difference(index.description, description) or first_difference(
        index.config.shard_tokens, config.shard_tokens, "shard_tokens"
    )
    if difference:
        raise UserError(f"{folder}: the cache there is another one: {difference}; choose another folder")
    held = max((number * config.shard_tokens + shard.tokens for number, shard in index.shards.items()), default=0)
    right = f"the cache in {folder} has {held} already; ask for at least as many, or choose another folder"
    require(held <= config.tokens, "tokens", config.tokens, right)
    return index


def _without_damaged(index: _Index, folder: Path) -> _Index:
    """Only the shards whose files are there in full, and as long as they are now to be."""
    wanted = dict(enumerate(index.config.sizes()))

    def whole(number: int, shard: _Shard) -> bool:
        path = _path(folder, number)
        in_full = path.is_file() and path.stat().st_size == shards.size(shard.tokens, index.width)
        return in_full and wanted.get(number) == shard.tokens

    return replace(index, shards={number: shard for number, shard in index.shards.items() if whole(number, shard)})


def _write_missing(
    folder: Path, batches: Batches, config: CacheConfig, description: dict[str, Any], progress: Callable[[int], Any]
) -> None:
    shards.remove_leftovers(folder)
    old, feed, sizes = _existing(folder, config, description), None, config.sizes()
    if old is None:
        feed = _Feed(batches, 0, None)
        old = _Index(description, feed.width, config, {})
    index = _without_damaged(replace(old, config=config), folder)
    missing = [number for number in range(len(sizes)) if number not in index.shards]
    _check_space(folder, sum(shards.size(sizes[number], index.width) for number in missing))
    index.write(folder)
    for number in missing:
        start, tokens = number * config.shard_tokens, sizes[number]
        if feed is None or feed.position != start:
            feed = _Feed(batches, start, index.width)
        crc32 = shards.write(_path(folder, number), feed.pieces(tokens, progress), tokens, index.width)
        index = replace(index, shards={**index.shards, number: _Shard(tokens, crc32)})
        index.write(folder)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: the cache needs {needed / 1e9:.2f} GB more and {free / 1e9:.2f} GB are free; free some space, "
            "choose another folder or lower tokens"
        )


def _path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"
