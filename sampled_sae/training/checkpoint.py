"""Checkpoints for exact resume: safetensors and JSON with checksums, written whole or not at all, the last two kept."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sampled_sae.config import first_difference, read_file, versioned
from sampled_sae.method.latents import is_sliced
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.files import checksum, new_folder, remove_leftovers, sync, writing
from sampled_sae.utils.ranks import Ranks
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

    def __init__(self, folder: Path, device: torch.device, ranks: Ranks | None = None):
        self.folder, self.device, self.ranks = folder, device, ranks or Ranks()
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._given_up = threading.Event()

    def write(self, checkpoint: Checkpoint) -> Future[Path]:
        """Write `folder`/step-NNN and remove the oldest ones; its path when it is complete."""
        if self.ranks.all.any(not self._beside(checkpoint)):
            done: Future[Path] = Future()
            done.set_result(save(self.folder, checkpoint, None, self.ranks))
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
            return save(self.folder, checkpoint, self._given_up, self.ranks)

    def close(self, give_up: bool = False) -> None:
        """Wait for the last checkpoint, or give it up if it is not complete."""
        if give_up:
            self._given_up.set()
        self._pool.shutdown(wait=True)


SMALL = 2**26
"""Bytes that are written so fast that nothing is gained by doing it beside the steps."""
ROOM = 8
"""Free memory over the size of the copy, so that the steps find as much as they did before."""


def save(
    folder: Path, checkpoint: Checkpoint, given_up: threading.Event | None = None, ranks: Ranks | None = None
) -> Path:
    """Write `folder`/step-NNN and remove the oldest ones. Stops, and leaves nothing, when it is `given_up`.

    Of several ranks, each writes the states that it has, and the first one what belongs to all; `states` and `extra`
    are its own, `run` is the same for all. The checkpoint is there when all of them have written.
    """
    target, ranks = folder / f"step-{checkpoint.step:09d}", ranks or Ranks()
    group, temporary, found = ranks.saving, Path(), dict[str, Any]()
    with ExitStack() as unfinished:
        with group.together(), writing(target):
            if ranks.first:
                temporary = unfinished.enter_context(new_folder(target))
        temporary = Path(group.texts(str(temporary))[0])
        with group.together(), writing(target):
            found = _write_states(temporary, checkpoint, given_up or threading.Event(), ranks)
        every = [json.loads(text) for text in group.texts(json.dumps(found))]
        with group.together(), writing(target):
            if ranks.first:
                content = {"step": checkpoint.step, "run": checkpoint.run, **_listed(checkpoint, every, ranks.shards)}
                text = json.dumps(versioned("checkpoint", content | {"extra": checkpoint.extra}), allow_nan=False)
                (temporary / "checkpoint.json").write_text(text)
            unfinished.close()
    for old in _all(folder)[:-KEEP] if ranks.first else ():
        shutil.rmtree(old, ignore_errors=True)
    return target


def _write_states(
    temporary: Path, checkpoint: Checkpoint, given_up: threading.Event, ranks: Ranks
) -> dict[str, tuple[int, int]]:
    """Write this rank's states; returns size and checksum of each file."""
    sizes, checksums, order = {}, {}, _names(checkpoint)
    with ThreadPoolExecutor(1) as pool:
        for name, state in checkpoint.states.items():
            path = temporary / _file(order.index(name), ranks.shard, ranks.shards)
            # What is the same on all ranks of an SAE is written once.
            own = {key: value for key, value in state.items() if ranks.shard == 0 or is_sliced(key)}
            write_tensors(path, own, given_up)
            checksums[path.name] = pool.submit(checksum, path)
            sizes[path.name] = sync(path)  # the disk writes while the checksum is computed
        return {name: (sizes[name], future.result()) for name, future in checksums.items()}


def _names(checkpoint: Checkpoint) -> list[str]:
    """Names of the SAEs of all ranks."""
    return [sae["name"] for sae in checkpoint.run.get("saes", ())] or list(checkpoint.states)


def _file(index: int, shard: int, shards: int) -> str:
    """Name of the file with the state of SAE number `index`, or with one part of its latents."""
    return f"{index}.safetensors" if shards == 1 else f"{index}-{shard + 1}-of-{shards}.safetensors"


def _listed(checkpoint: Checkpoint, every: Sequence[dict[str, tuple[int, int]]], shards: int) -> dict[str, Any]:
    """What checkpoint.json has of the files: names of the SAEs, sizes and checksums, number of parts of the latents."""
    files = {name: both for found in every for name, both in found.items()}
    names = _names(checkpoint)
    ordered = [_file(index, shard, shards) for index in range(len(names)) for shard in range(shards)]
    sizes, checksums = ({name: files[name][of] for name in ordered} for of in (0, 1))
    return {"names": names, **({"shards": shards} if shards > 1 else {}), "sizes": sizes, "checksums": checksums}


def load_latest(
    folder: Path,
    run: dict[str, Any],
    say: Callable[[str], None],
    ranks: Ranks | None = None,
    names: Sequence[str] | None = None,
) -> Checkpoint | None:
    """The newest undamaged checkpoint, or None if there is none at all.

    For each damaged one that is newer, `say` gets a line. A checkpoint of another configuration is an error. Of several
    ranks, each reads the states of its own SAEs, `names`, and its part of their latents.
    """
    ranks, damage = ranks or Ranks(), []
    if ranks.first:
        remove_leftovers(folder, "step-*")
    ranks.all.barrier()
    for path in reversed(_all(folder)):
        try:
            with ranks.all.together():
                checkpoint = load(path, names, ranks.shard, ranks.shards)
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


def load(path: Path, wanted: Sequence[str] | None = None, shard: int = 0, shards: int = 1) -> Checkpoint:
    """Read one checkpoint folder and verify what is read; `UserError` if anything is missing or has changed.

    `wanted` are the names of the SAEs to read, all of them by default, and `shard` of `shards` the part of the latents.
    """
    file = path / "checkpoint.json"
    content = read_file(file, "checkpoint")

    def verify(part: Path) -> None:
        nonlocal file
        file, checksums = part, content.get("checksums")
        size = file.stat().st_size
        if size != content["sizes"][file.name]:
            raise UserError(f"{file}: {size} bytes, expected {content['sizes'][file.name]}: cut short")
        if checksums is not None and checksum(file) != checksums[file.name]:  # version 0 had none
            raise UserError(f"{file}: changed since it was written (its checksum differs)")

    try:
        names, step, parts = content["names"], content["step"], content.get("shards", 1)
        trained = [sae["name"] for sae in content["run"].get("saes", ())]
        if path.name != f"step-{step:09d}" or names != (trained or names):
            raise UserError(f"{file}: damaged (its step or the names of its SAEs do not agree)")
        if not isinstance(parts, int) or not 1 <= parts <= len(content["sizes"]):
            raise UserError(f"{file}: damaged (shards = {parts!r})")
        states = {}
        for index, name in enumerate(names):
            if wanted is None or name in wanted:
                files = [path / _file(index, part, parts) for part in range(parts)]
                states[name] = read_part(files, shard, shards, verify)
                if parts != shards:
                    states[name].pop("most_dead", None)  # of one rank; it is counted again
        return Checkpoint(step, content["run"], states, dict(content["extra"]))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"{file}: not a checkpoint of this program ({type(error).__name__}: {error})") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: damaged or missing ({error})") from None


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def remove_all(folder: Path) -> None:
    """Remove all checkpoints of a finished run."""
    shutil.rmtree(folder, ignore_errors=True)


# ---- files: written one tensor at a time, read in whole or as a part of the latents -------------------

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


def read_part(files: Sequence[Path], part: int, parts: int, check: Callable[[Path], None]) -> dict[str, Tensor]:
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
