"""One file of a cache: a safetensors file with one tensor `activations` [tokens, d_in] in bfloat16, memory-mapped.

The header is written by hand, so that a shard is written piece by piece and never held in memory.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import replacing, writing

BYTES = 2  # of a number in bfloat16
ALIGNED = 64  # the first row begins at a multiple of this
CHUNK = 2**22
AGAIN = "write the cache again to restore it"


def size(tokens: int, width: int) -> int:
    """Bytes of a shard on disk."""
    return len(header(tokens, width)) + tokens * width * BYTES


def header(tokens: int, width: int) -> bytes:
    """What comes before the rows: the length of the JSON, and the JSON, filled up with spaces."""
    entry = {"dtype": "BF16", "shape": [tokens, width], "data_offsets": [0, tokens * width * BYTES]}
    text = json.dumps({"activations": entry}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, pieces: Iterable[Tensor], tokens: int, width: int) -> int:
    """Write pieces [n, d] bfloat16, `tokens` rows in all, whole or not at all -> the CRC-32 of the file."""
    with replacing(path) as temporary:
        # Unbuffered: nothing is left to write, and to fail again, when a file on a full disk is closed.
        with writing(path):
            file = temporary.open("wb", buffering=0)
        with file:
            first = header(tokens, width)
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
    expected = size(tokens, width)
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
    first = header(tokens, width)
    if pages[: len(first)] != first:
        raise UserError(f"{path}: not the shard that was written here; delete it and {AGAIN}")
    return np.frombuffer(pages, np.int16, offset=len(first)).reshape(tokens, width)


def verify(path: Path, crc32: int, stopped: Callable[[], bool] = lambda: False) -> None:
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
