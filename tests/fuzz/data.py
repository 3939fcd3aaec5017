"""Caches, texts and files of activations."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import zstandard
from safetensors.torch import save_file

from sampled_sae.data.cache import open_cache, write_cache
from sampled_sae.data.cache_index import Index, Part
from sampled_sae.data.source import open_source
from sampled_sae.data.text import TextSource
from sampled_sae.evals.probing.data import load_file as load_labelled
from tests.fuzz.mutate import Damage, binary_damage, lines_damage, odd_arrays, other_archive
from tests.fuzz.target import File, Make, Target, rows, sealed, text_or_bytes


def build(root: Path) -> None:
    """Write the undamaged files."""
    data = rows().to(torch.bfloat16)
    write_cache(root / "cache", lambda start: iter([data[start:]]), 300, {"origin": "made up"}, shard_tokens=100)
    write_cache(root / "parts", lambda start: iter([data[start:]]), 300, {"origin": "made up"}, 100, part=Part(2, 2))
    _texts(root / "text")
    _arrays(root / "arrays")


def _texts(folder: Path) -> None:
    folder.mkdir()
    table = [{"text": f"Document {n} says é and \u4e2d.", "label": "ab"[n % 2], "split": "train"} for n in range(12)]
    lines = "".join(json.dumps(row) + "\n" for row in table).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
    (folder / "a.txt").write_text("Some text.\nMore é.\n", encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), folder / "a.parquet")
    (folder / "a.csv").write_text('text,label\n"one, two",a\n"two ""x""",b\nthree,a\n', encoding="utf-8")


def _arrays(folder: Path) -> None:
    folder.mkdir()
    data = rows(100)
    np.save(folder / "a.npy", data.numpy())
    np.savez(folder / "a.npz", data.numpy())
    torch.save({"a": data}, folder / "a.pt")
    save_file({"a": data}, folder / "a.safetensors")


def _cache(folder: Path) -> Any:
    cached = open_cache(folder)
    return cached.take(torch.arange(len(cached)))


def _parts(folder: Path) -> Any:
    return Index.read(folder).to_dict()


def _text(name: str) -> Callable[[Path], Any]:
    return lambda folder: list(TextSource(str(folder / name)).documents())


def _labelled(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        found = load_labelled(str(folder / name), 100)
        return found.texts, found.labels, found.splits

    return read


def _array(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        source = open_source(folder / name)
        [stream] = source.open(8, 16, 0).values()
        try:
            return stream.heldout, [stream.batch(n) for n in range(9)], dict(stream.identity) | {"modified": None}
        finally:
            stream.close()

    return read


def array_damage(content: bytes, draw: Any) -> Damage:
    if draw.random() < 0.3:
        new, where = odd_arrays(draw)
        return Damage(new, "bytes", where)
    if draw.random() < 0.1:
        return Damage(other_archive(draw), "bytes", "another archive")
    return binary_damage(content, draw)


def targets() -> list[Target]:
    """All of them."""
    kinds: dict[str, tuple[Make, Any]] = {
        "a.jsonl": (lines_damage, "lenient"),
        "a.txt": (text_or_bytes, "lenient"),
        "a.jsonl.gz": (binary_damage, "lenient"),
        "a.jsonl.zst": (binary_damage, "lenient"),
        "a.parquet": (binary_damage, "lenient"),
    }
    shards = ("shard-00000.safetensors", "shard-00002.safetensors")
    found = [
        Target("cache", "cache", sealed("cache.json", *shards), _cache, 3),
        Target("part of a cache", "parts", sealed("cache.json", "parts/2-of-2/part.json"), _parts),
    ]
    found += [Target(f"text {name}", "text", (File(name, *how),), _text(name)) for name, how in kinds.items()]
    kinds["a.csv"] = (text_or_bytes, "lenient")
    found += [
        Target(f"labelled {name}", "text", (File(name, *kinds[name]),), _labelled(name))
        for name in ("a.jsonl", "a.csv", "a.parquet")
    ]
    found += [
        Target(f"activations {name}", "arrays", (File(name, array_damage, "lenient"),), _array(name))
        for name in ("a.npy", "a.pt", "a.safetensors", "a.npz")
    ]
    return found
