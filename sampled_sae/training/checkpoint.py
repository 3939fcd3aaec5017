"""Checkpoints for exact resume: safetensors and JSON, written whole or not at all, the last good one kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sampled_sae.config import first_difference, read_file, versioned
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import new_folder

KEEP = 2
"""The newest, and one before it in case the newest is damaged later."""


class Checkpoint(NamedTuple):
    """A run after `step` steps."""

    step: int
    run: dict[str, Any]
    """The run's configuration; resuming under another one is refused."""
    states: dict[str, dict[str, Tensor]]
    """Each learner's state by its name."""
    extra: dict[str, Any]
    """What else the run remembers, such as the input's scale."""


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write into `folder`/step-NNN and drop the oldest ones."""
    target = folder / f"step-{checkpoint.step:09d}"
    with new_folder(target) as temporary:
        sizes = {}
        for index, state in enumerate(checkpoint.states.values()):
            path = temporary / f"{index}.safetensors"
            save_file({name: value.contiguous() for name, value in state.items()}, path)
            sizes[path.name] = path.stat().st_size
        content = {
            "step": checkpoint.step,
            "run": checkpoint.run,
            "names": list(checkpoint.states),
            "sizes": sizes,
            "extra": checkpoint.extra,
        }
        (temporary / "checkpoint.json").write_text(json.dumps(versioned("checkpoint", content), allow_nan=False))
    for old in _all(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_latest(folder: Path, run: dict[str, Any], warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; none if there is none at all.

    A damaged one is passed over with a warning for the one before it. A checkpoint of another
    configuration is refused.
    """
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
            warn(f"{line}; going on from the one before it, step {checkpoint.step}")
        return checkpoint
    if damage:
        raise UserError(f"{damage[0]}; no good checkpoint is left, start again without resume in another folder")
    return None


def load(path: Path) -> Checkpoint:
    """Read one checkpoint folder, whole or not at all."""
    content = read_file(path / "checkpoint.json", "checkpoint")
    if not {"step", "run", "names", "sizes", "extra"} <= content.keys():
        raise UserError(f"{path / 'checkpoint.json'}: not a checkpoint of this program")
    states = {}
    for index, name in enumerate(content["names"]):
        file = path / f"{index}.safetensors"
        try:
            if file.stat().st_size != content["sizes"][file.name]:
                raise UserError(
                    f"{file}: {file.stat().st_size} bytes, expected {content['sizes'][file.name]}: cut short"
                )
            states[name] = load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: damaged or missing ({error})") from None
    return Checkpoint(content["step"], content["run"], states, content["extra"])


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def remove_all(folder: Path) -> None:
    """Drop all checkpoints of a finished run."""
    shutil.rmtree(folder, ignore_errors=True)
