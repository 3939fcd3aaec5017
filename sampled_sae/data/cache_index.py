"""What a cache holds: cache.json, and the records of several writers until all their shards are there.

cache.json              origin of the activations, and the shards that are whole
parts/2-of-4/part.json  shards of one of several writers; its lock is beside it. Removed when the cache is complete.

Readers see the shards of both. Every shard has the same bytes whoever writes it, so that no two writers can disagree.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from sampled_sae.config import Config, Count, Positive, Seed, first_difference, read_file, require, write_file
from sampled_sae.data import shards
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, remove_leftovers

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
            in_full = path.is_file() and path.stat().st_size == shards.size(shard.tokens, self.width)
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
