"""Checkpoints for exact resume: safetensors and JSON with checksums, written whole or not at all, the last two kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sampled_sae.config import first_difference, read_file, versioned
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import checksum, new_folder, remove_leftovers, sync

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


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder`/step-NNN and remove the oldest ones."""
    target = folder / f"step-{checkpoint.step:09d}"
    with new_folder(target) as temporary, ThreadPoolExecutor(1) as pool:
        sizes, checksums = {}, {}
        for index, state in enumerate(checkpoint.states.values()):
            path = temporary / f"{index}.safetensors"
            save_file({name: value.contiguous() for name, value in state.items()}, path)
            checksums[path.name] = pool.submit(checksum, path)
            sizes[path.name] = sync(path)  # the disk writes while the checksum is computed
        found = {name: future.result() for name, future in checksums.items()}
        files = {"names": list(checkpoint.states), "sizes": sizes, "checksums": found}
        content = {"step": checkpoint.step, "run": checkpoint.run, **files, "extra": checkpoint.extra}
        (temporary / "checkpoint.json").write_text(json.dumps(versioned("checkpoint", content), allow_nan=False))
    for old in _all(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return target


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
