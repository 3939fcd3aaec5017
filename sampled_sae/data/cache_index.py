"""The files of a cache: cache.json, its shards, and the records of several writers until all their shards are there.

cache.json               origin of the activations, and the shards that are whole
shard-00000.safetensors  a tensor `activations` [tokens, d_in] in bfloat16, memory-mapped. Its header is written by
                         hand, so that a shard is written piece by piece and never held in memory.
parts/2-of-4/part.json   shards of one of several writers; its lock is beside it. Removed when the cache is complete.

Readers see the shards of both records. Every process would write a shard with the same bytes, so that no two
writers can disagree.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from sampled_sae.config import Config, Count, Positive, Seed, first_difference, read_file, require, write_file
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, remove_leftovers, replacing, writing

FORMAT: Final = "sampled-sae activations 1"
INDEX, PARTS, PART = "cache.json", "parts", "part.json"
SHARD_TOKENS = 1_000_000
WAIT = 60.0  # seconds to wait for another part that is writing cache.json


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


@dataclass(frozen=True, slots=True)
class Part(Config):
    """One of several processes that write a cache together."""

    number: Positive = 1
    """From 1 on."""
    of: Positive = 1

    def check(self) -> None:
        require(self.number <= self.of, "part", str(self), "must be I/N with I from 1 to N, such as 2/4")

    @classmethod
    def parse(cls, text: str) -> Part:
        """I/N, such as 2/4."""
        number, _, of = text.partition("/")
        right = number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)
        require(right, "part", text, "must be I/N with I from 1 to N, such as 2/4")
        return cls(int(number), int(of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def shards(self, count: int) -> range:
        """Its shards of so many: neighbors, since each start in the middle of a text costs some passes twice."""
        return range(count * (self.number - 1) // self.of, count * self.number // self.of)

    def is_written(self, cache: Path) -> bool:
        """Whether all of its shards are there."""
        index = Index.read(cache)
        return {*self.shards(len(index.config.sizes()))} <= {shard.number for shard in index.shards}

    def folder(self, cache: Path) -> Path:
        return cache / PARTS / f"{self.number}-of-{self.of}"


@dataclass(frozen=True, slots=True)
class Shard(Config):
    """One finished shard."""

    number: Count
    file: str
    tokens: Positive
    crc32: Count  # of the whole file


@dataclass(frozen=True, slots=True)
class _Record(Config):
    """What part.json holds."""

    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index(Config):
    """The content of cache.json."""

    format: Literal["sampled-sae activations 1"] = FORMAT
    description: dict[str, Any]
    width: Positive
    dtype: Literal["bfloat16"] = "bfloat16"
    tokens: Positive
    shard_tokens: Positive
    finished: bool = False
    shards: tuple[Shard, ...] = ()  # those that are whole, by number

    def check(self) -> None:
        # The count first: sizes of a damaged index may not fit into memory.
        finished = len(self.shards) == -(-self.tokens // self.shard_tokens)
        whole = [(shard.number, shard.tokens) for shard in self.shards]
        finished = finished and sorted(whole) == list(enumerate(self.config.sizes()))
        object.__setattr__(self, "finished", finished)

    @property
    def config(self) -> CacheConfig:
        return CacheConfig(self.tokens, self.shard_tokens)

    def tokens_of(self, number: int) -> int:
        """Tokens of a shard."""
        return min(self.shard_tokens, self.tokens - number * self.shard_tokens)

    def plus(self, more: Iterable[Shard]) -> Index:
        """The index with these shards too."""
        by_number = {shard.number: shard for shard in (*self.shards, *more)}
        return replace(self, shards=tuple(by_number[number] for number in sorted(by_number)))

    @classmethod
    def read(cls, folder: Path) -> Index:
        """cache.json with the shards of writers that are still at work."""
        index = cls.from_dict(read_file(folder / INDEX, "cache"), folder / INDEX)
        if index.finished:
            return index
        found = [shard for path in sorted(folder.glob(f"{PARTS}/*/{PART}")) for shard in _recorded(path)]
        return index.plus(shard for shard in found if shard.tokens == index.tokens_of(shard.number))

    def write(self, folder: Path) -> None:
        write_file(folder / INDEX, "cache", self.to_dict())

    def existing(self, folder: Path) -> Index:
        """Without the shards whose files are not there in full, or are not wanted."""

        def whole(shard: Shard) -> bool:
            path = path_of(folder, shard.number)
            in_full = path.is_file() and path.stat().st_size == shard_size(shard.tokens, self.width)
            return in_full and self.tokens_of(shard.number) == shard.tokens

        return replace(self, shards=tuple(filter(whole, self.shards)))


def _recorded(path: Path) -> tuple[Shard, ...]:
    try:
        return _Record.from_dict(read_file(path, "cache_part"), path).shards
    except UserError:
        if path.exists():
            raise
        return ()  # the cache is complete, and its parts are removed


def record(folder: Path, part: Part, done: Iterable[Shard]) -> None:
    """Note the shards that a part has written."""
    write_file(part.folder(folder) / PART, "cache_part", _Record(tuple(done)).to_dict())


def begin(folder: Path, config: CacheConfig, description: dict[str, Any], new: Callable[[], Index]) -> Index:
    """Write cache.json for several parts, unless another part has; returns the shards that are there already."""
    with alone_in(folder, WAIT):
        remove_leftovers(folder, INDEX)
        old = find(folder, config, description) or new()
        index = replace(old, tokens=config.tokens).existing(folder)
        if index != old or not (folder / INDEX).exists():
            index.write(folder)
    return index


def join_parts(folder: Path) -> None:
    """Write the whole cache.json if the shards of all parts are there."""
    if not (folder / PARTS).exists() or not Index.read(folder).finished:
        return
    with alone_in(folder, WAIT):
        remove_leftovers(folder, INDEX)
        index = Index.read(folder)
        if index.finished:
            index.write(folder)
            remove_parts(folder)


def remove_parts(folder: Path) -> None:
    """Remove the records of parts, which cache.json has now."""
    shutil.rmtree(folder / PARTS, ignore_errors=True)


def find(folder: Path, config: CacheConfig, description: dict[str, Any]) -> Index | None:
    """The index of what is in the folder already; refused if it is another cache."""
    if not (folder / INDEX).exists():
        if stray := next(folder.glob("shard-*.safetensors"), None):
            raise UserError(f"{stray}: a shard without its {INDEX}; choose another folder, or delete the shards")
        return None
    index = Index.read(folder)
    difference = first_difference(index.description, description) or first_difference(
        index.shard_tokens, config.shard_tokens, "shard_tokens"
    )
    if difference:
        raise UserError(f"{folder}: the cache there is another one: {difference}; choose another folder")
    held = max((shard.number * config.shard_tokens + shard.tokens for shard in index.shards), default=0)
    right = f"the cache in {folder} has {held} already; give at least as many, or choose another folder"
    require(held <= config.tokens, "tokens", config.tokens, right)
    return index


def path_of(folder: Path, number: int) -> Path:
    """The file of a shard."""
    return folder / f"shard-{number:05d}.safetensors"


# ---- shards -------------------------------------------------------------------------------------------

BYTES = 2  # of a number in bfloat16
ALIGNED = 64  # the first row begins at a multiple of this
CHUNK = 2**22
AGAIN = "write the cache again to restore it"


def shard_size(tokens: int, width: int) -> int:
    """Bytes of a shard on disk."""
    return len(_header(tokens, width)) + tokens * width * BYTES


def _header(tokens: int, width: int) -> bytes:
    """What comes before the rows: the length of the JSON, and the JSON, filled up with spaces."""
    entry = {"dtype": "BF16", "shape": [tokens, width], "data_offsets": [0, tokens * width * BYTES]}
    text = json.dumps({"activations": entry}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, pieces: Iterable[Tensor], tokens: int, width: int) -> int:
    """Write pieces [n, d] bfloat16, `tokens` rows in all, whole or not at all -> the CRC-32 of the file."""
    with replacing(path) as temporary:
        # Unbuffered: nothing is left to write, and to fail again, when a file on a full disk is closed.
        with writing(path):
            file = temporary.open("wb", buffering=0)
        with file:
            first = _header(tokens, width)
            append(file, path, first)
            crc32 = zlib.crc32(first)
            for piece in pieces:
                data = piece.contiguous().view(torch.int16).numpy().data.cast("B")
                append(file, path, data)
                crc32 = zlib.crc32(data, crc32)
    return crc32


def append(file: FileIO, path: Path, data: bytes | memoryview) -> None:
    """Write all of `data`; a refusal is about `path`, which the file is going to be."""
    rest = memoryview(data)
    with writing(path):
        while rest:
            rest = rest[file.write(rest) :]


def map_rows(path: Path, tokens: int, width: int) -> np.ndarray:
    """The rows [tokens, d_in] of a shard, as int16 because numpy has no bfloat16; read when they are used."""
    expected = shard_size(tokens, width)
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != expected:
                raise UserError(f"{path}: {found} bytes, expected {expected}: cut short or changed; {AGAIN}")
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise UserError(f"{path}: the shard is missing; {AGAIN}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    first = _header(tokens, width)
    if pages[: len(first)] != first:
        raise UserError(f"{path}: not the shard that was written here; delete it and {AGAIN}")
    return np.frombuffer(pages, np.int16, offset=len(first)).reshape(tokens, width)


def verify_shard(path: Path, crc32: int, stopped: Callable[[], bool] = lambda: False) -> None:
    """Refuse a shard whose bytes are not those that were written; given up when `stopped`."""
    found = 0
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK):
                found = zlib.crc32(chunk, found)
                if stopped():
                    return
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if found != crc32:
        raise UserError(
            f"{path}: its bytes have changed since it was written, or it is another shard; delete it and {AGAIN}"
        )
