"""Checkpoints for exact resume: safetensors and JSON with checksums, written whole or not at all, the last two kept."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sampled_sae.config import first_difference, read_file, versioned
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.files import checksum, new_folder, remove_leftovers, sync
from sampled_sae.utils.system import available

KEEP = 2
"""The newest, and the one before it in case the newest is damaged later."""


class Checkpoint(NamedTuple):
    """A run after `step` steps."""

    step: int
    run: dict[str, Any]
    """The run's configuration; resuming under another one is an error."""
    states: dict[str, dict[str, Tensor]]
    """Each learner's state by its name."""
    extra: dict[str, Any]
    """What else the run needs to continue, such as the input's scale."""


class Writer:
    """Writes checkpoints into a folder; on a GPU beside the next steps, from a copy, where memory has room for one."""

    def __init__(self, folder: Path, device: torch.device):
        self.folder, self.device = folder, device
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._given_up = threading.Event()

    def write(self, checkpoint: Checkpoint) -> Future[Path]:
        """Write `folder`/step-NNN and remove the oldest ones; its path when it is complete."""
        if not self._beside(checkpoint):
            done: Future[Path] = Future()
            done.set_result(save(self.folder, checkpoint))
            return done
        copies = {
            name: {key: value.clone() for key, value in state.items()} for name, state in checkpoint.states.items()
        }
        copied = torch.cuda.Event() if self.device.type == "cuda" else None
        if copied is not None:
            copied.record(torch.cuda.current_stream(self.device))
        return self._pool.submit(self._save, checkpoint._replace(states=copies), copied)

    def _beside(self, checkpoint: Checkpoint) -> bool:
        """Whether it pays, and whether there is room: a copy of all weights and moments."""
        size = sum(value.nbytes for state in checkpoint.states.values() for value in state.values())
        return self.device.type == "cuda" and size >= SMALL and (available(self.device) or 0) >= ROOM * size

    def _save(self, checkpoint: Checkpoint, copied: Any) -> Path:
        # A stream of its own: on the trainer's, the next steps would wait for the copy to the host.
        stream = None if copied is None else torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_event(copied)
            return save(self.folder, checkpoint, self._given_up)

    def close(self, give_up: bool = False) -> None:
        """Wait for the last checkpoint, or give it up if it is not complete."""
        if give_up:
            self._given_up.set()
        self._pool.shutdown(wait=True)


SMALL = 2**26
"""Bytes that are written so fast that nothing is gained by doing it beside the steps."""
ROOM = 8
"""Free memory over the size of the copy, so that the steps find as much as they did before."""


def save(folder: Path, checkpoint: Checkpoint, given_up: threading.Event | None = None) -> Path:
    """Write `folder`/step-NNN and remove the oldest ones. Stops, and leaves nothing, when it is `given_up`."""
    target = folder / f"step-{checkpoint.step:09d}"
    with new_folder(target) as temporary, ThreadPoolExecutor(1) as pool:
        sizes, checksums = {}, {}
        for index, state in enumerate(checkpoint.states.values()):
            path = temporary / f"{index}.safetensors"
            _write_tensors(path, state, given_up or threading.Event())
            checksums[path.name] = pool.submit(checksum, path)
            sizes[path.name] = sync(path)  # the disk writes while the checksum is computed
        found = {name: future.result() for name, future in checksums.items()}
        files = {"names": list(checkpoint.states), "sizes": sizes, "checksums": found}
        content = {"step": checkpoint.step, "run": checkpoint.run, **files, "extra": checkpoint.extra}
        (temporary / "checkpoint.json").write_text(json.dumps(versioned("checkpoint", content), allow_nan=False))
    for old in _all(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return target


TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in a safetensors file."""


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], given_up: threading.Event) -> None:
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


PIECE = 2**26


def load_latest(folder: Path, run: dict[str, Any], say: Callable[[str], None]) -> Checkpoint | None:
    """The newest undamaged checkpoint, or None if there is none at all.

    For each damaged one that is newer, `say` gets a line. A checkpoint of another configuration is an error.
    """
    remove_leftovers(folder, "step-*")
    damage = []
    for path in reversed(_all(folder)):
        try:
            checkpoint = load(path)
        except UserError as error:
            damage.append(str(error))
            continue
        difference = first_difference(checkpoint.run, run)
        if difference:
            raise UserError(f"{path}: the checkpoint is of another configuration: {difference}")
        for line in damage:
            say(f"{line}; resuming from the checkpoint before it, step {checkpoint.step}")
        return checkpoint
    if damage:
        raise UserError(f"{damage[0]}; no good checkpoint is left, start again without resume in another folder")
    return None


def load(path: Path) -> Checkpoint:
    """Read one checkpoint folder and verify all of it; `UserError` if anything is missing or has changed."""
    file = path / "checkpoint.json"
    content = read_file(file, "checkpoint")
    try:
        names, step, checksums = content["names"], content["step"], content.get("checksums")
        trained = [sae["name"] for sae in content["run"].get("saes", ())]
        if path.name != f"step-{step:09d}" or names != (trained or names):
            raise UserError(f"{file}: damaged (its step or the names of its SAEs do not agree)")
        states = {}
        for index, name in enumerate(names):
            file = path / f"{index}.safetensors"
            size = file.stat().st_size
            if size != content["sizes"][file.name]:
                raise UserError(f"{file}: {size} bytes, expected {content['sizes'][file.name]}: cut short")
            if checksums is not None and checksum(file) != checksums[file.name]:  # version 0 had none
                raise UserError(f"{file}: changed since it was written (its checksum differs)")
            states[name] = load_file(file)
        return Checkpoint(step, content["run"], states, dict(content["extra"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: not a checkpoint of this program ({type(error).__name__}: {error})") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: damaged or missing ({error})") from None


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def remove_all(folder: Path) -> None:
    """Remove all checkpoints of a finished run."""
    shutil.rmtree(folder, ignore_errors=True)
