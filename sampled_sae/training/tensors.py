"""Safetensors files of a checkpoint: written one tensor at a time, read in whole or as a part of the latents."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from sampled_sae.utils.errors import Interrupted

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in a safetensors file."""
PIECE = 2**26


def write_tensors(path: Path, tensors: Mapping[str, Tensor], given_up: threading.Event) -> None:
    """Write a safetensors file, one tensor at a time.

    The library's own function needs memory for all of them, and keeps other threads of Python waiting meanwhile.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # every tensor is aligned
    header, at = {}, 0
    for name, tensor in ordered:
        offsets = [at, at := at + tensor.nbytes]
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        for data in _in_pieces([len(text).to_bytes(8, "little") + text], ordered):
            if given_up.is_set():
                raise Interrupted(f"{path}: given up")
            while data:
                data = data[file.write(data) :]


def _in_pieces(first: list[bytes], tensors: list[tuple[str, Tensor]]) -> Iterator[memoryview]:
    """The bytes of a file, at most PIECE of them at a time."""
    for data in first:
        yield memoryview(data)
    for _, tensor in tensors:
        whole = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from (whole[at : at + PIECE] for at in range(0, len(whole), PIECE))


def read_part(
    files: Sequence[Path], part: int, parts: int, is_sliced: Callable[[str], bool], check: Callable[[Path], None]
) -> dict[str, Tensor]:
    """Part number `part` of `parts` of a state whose latents are divided over `files`, in order.

    Tensors that are not sliced along the latents are in the first file alone. Each file that is read is given to
    `check` first.
    """
    every, found = len(files), dict[str, list[Tensor]]()
    for number, path in enumerate(files):
        # Of every file the latents from `number` / `every` on; wanted are those from `part` / `parts` on.
        overlaps = number * parts < (part + 1) * every and part * every < (number + 1) * parts
        if number and not overlaps:
            continue
        check(path)
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                if every == parts == 1 or not is_sliced(name):
                    found[name] = [file.get_tensor(name)]
                elif overlaps:
                    stored = file.get_slice(name)
                    size = stored.get_shape()[0]
                    first, last = (size * every * at // parts - size * number for at in (part, part + 1))
                    found.setdefault(name, []).append(stored[max(0, first) : min(size, last)])
    return {name: torch.cat(pieces) if len(pieces) > 1 else pieces[0] for name, pieces in found.items()}
