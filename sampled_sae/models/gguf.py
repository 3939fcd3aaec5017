"""What GGUF files need beside transformers' reader: whether texts begin with BOS, less waiting, a converted copy."""

from __future__ import annotations

import glob
import hashlib
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sampled_sae.models.llama import read_shape
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, new_folder, remove_leftovers
from sampled_sae.utils.progress import show
from sampled_sae.utils.third_party import package

COPIES = Path("~/.cache/sampled-sae/models")
LARGEST = 2**30
"""Bytes of the weights above which no copy is kept."""


def copy_of(path: Path, dtype: torch.dtype) -> Path | None:
    """The folder for a copy of a GGUF file with weights of that type, in the format of transformers.

    None if there is no home directory.
    """
    about, resolved = path.stat(), path.resolve()
    # One version of transformers may not understand what another one has saved: 4 takes the default for version 5's
    # base of the rotary angles.
    version = f"{about.st_size} {about.st_mtime_ns} {package('transformers').__version__}"
    try:
        return COPIES.expanduser() / f"{path.stem}-{_short(f'{resolved} {dtype}')}-{_short(version)}"
    except RuntimeError:
        return None


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def keep_copy(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a model of the Llama family, which is read and run faster from there; no other, and no large one.

    Copies of earlier versions of the file are removed.
    """
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    if type(model).__name__ != "LlamaForCausalLM" or size > LARGEST:
        return
    root, name = folder.parent, folder.name.rpartition("-")[0]
    with suppress(UserError), alone_in(root, wait=60):  # a full disk, say: it goes without
        remove_leftovers(root)
        for old in root.glob(f"{glob.escape(name)}-*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)
        with new_folder(folder) as made:
            for part in (model, tokenizer):
                part.save_pretrained(made)
            if read_shape(made) is None:
                raise UserError("not a plain Llama: reading the copy would not be faster")


# Types of values in a GGUF file, as struct has them.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9


def gguf_bos(path: Path) -> bool | None:
    """`add_bos_token` of a GGUF file: whether each text begins with BOS; none if the field is missing.

    The package gguf reads the whole header for that, which takes seconds.
    """
    with path.open("rb") as file:

        def value(kind: int) -> Any:
            if kind == TEXT:
                return file.read(value(10))
            if kind == LIST:
                kind, count = value(4), value(10)
                if kind in NUMBERS:
                    return file.seek(count * struct.calcsize(NUMBERS[kind]), 1)
                for _ in range(count):
                    value(kind)
                return None
            return struct.unpack(f"<{NUMBERS[kind]}", file.read(struct.calcsize(NUMBERS[kind])))[0]

        try:
            file.seek(16)
            for _ in range(value(10)):
                key, found = value(TEXT), value(value(4))
                if key == b"tokenizer.ggml.add_bos_token":
                    return bool(found)
        # transformers could read it all the same; lengths of a damaged file may be beyond any file's
        except (struct.error, KeyError, OverflowError, MemoryError, RecursionError, OSError, ValueError):
            return None
    return None


@contextmanager
def parsed_once() -> Iterator[None]:
    """Keep what the package gguf computes from a file's header and from the architecture.

    For configuration, tokenizer and weights transformers reads the header again, and it maps the names of all tensors
    once for each module: seconds each. Its bar over the tensors, which cannot be switched off, becomes ours.
    """
    gguf, reader = package("gguf"), package("transformers.modeling_gguf_pytorch_utils")
    changed: list[tuple[Any, str, Any]] = [
        (gguf, name, cache(getattr(gguf, name))) for name in PARSED if hasattr(gguf, name)
    ]
    changed += [(reader, "tqdm", _shown)] if hasattr(reader, "tqdm") else []
    given = [(module, name, getattr(module, name)) for module, name, _ in changed]
    try:
        for each in changed:
            setattr(*each)
        yield
    finally:
        for each in given:
            setattr(*each)


PARSED = ("GGUFReader", "get_tensor_name_map")


def _shown(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
    """The tensors of a GGUF file, with a progress bar on a terminal and no output elsewhere."""
    bar = show(len(tensors), what="loading the model", unit="tensors", enabled=sys.stderr.isatty())
    try:
        for done, tensor in enumerate(tensors, start=1):
            yield tensor
            bar.update(done)
    finally:
        bar.close()
