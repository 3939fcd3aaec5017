"""Saved SAEs as plain data. A format is a file in this folder that registers a `Format`:

    FORMATS.register("mine", Mine(), __name__)

Formats of other packages are found through the entry point `sampled_sae.formats`.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.registry import Registry


class StoredSAE(NamedTuple):
    """A saved SAE: its configuration, and its tensors with the names and shapes of `SAE`."""

    cfg: InferenceConfig
    tensors: dict[str, Tensor]


class Format(Protocol):
    """One format. The path is a folder, or a file if the format has several SAEs in one folder.

    It may have `files`, a tuple with the names of the files that it reads, relative to the folder; `*` stands for any
    characters. Only these are downloaded from the hub. Of a format without `files` the whole folder is.
    """

    def recognize(self, path: Path) -> bool:
        """Whether there is an SAE of this format at `path`, from names of files and keys of JSON alone."""

    def describe(self, path: Path) -> InferenceConfig:
        """The configuration, without reading weights."""

    def load(self, path: Path) -> StoredSAE:
        """Configuration and tensors on the CPU, scales folded in."""

    def save(self, sae: StoredSAE, path: Path) -> Path:
        """Write all or nothing and return the path; UserError if the format cannot hold the SAE."""


@runtime_checkable
class TakesK(Protocol):
    """A format whose files may not name the number of active latents."""

    def load_with(self, path: Path, k: int) -> StoredSAE:
        """`Format.load` with this number of active latents per token."""


class ReadOnly:
    """Base of formats that can be read, but not written."""

    def save(self, sae: StoredSAE, path: Path) -> Path:
        name = next(name for name, item in FORMATS.items() if item is self)
        writable = ", ".join(name for name, item in FORMATS.items() if not isinstance(item, ReadOnly))
        raise UserError(f"format = {name!r}: can be read, but not written; these can be written: {writable}")


FORMATS: Registry[Format] = Registry("format", __name__, "sampled_sae.formats")
WEIGHTS = ("sae_weights.safetensors", "sae.safetensors", "ae.pt", "params.npz", "params.safetensors")
"""Files with weights, which stand for the folder that they are in."""


def located(path: Path) -> Path:
    """The path of an SAE; its file of weights may be named instead of the folder."""
    return path.parent if path.name in WEIGHTS and path.is_file() else path


def recognize(path: Path) -> Format:
    """The format of the SAE at `path`."""
    if (found := _recognized(path)) is not None:
        return found
    raise UserError(_not_an_sae(path))


def _recognized(path: Path) -> Format | None:
    return next((candidate for candidate in FORMATS.values() if candidate.recognize(path)), None)


def is_sae(path: Path) -> bool:
    """Whether there is an SAE of any format at `path`, as far as names of files tell."""
    return _recognized(path) is not None


def describe(path: Path) -> InferenceConfig:
    """The configuration of the SAE at `path`, without reading its weights."""
    path = located(path)
    return recognize(path).describe(path)


def load(path: Path, k: int | None = None) -> StoredSAE:
    """The SAE at `path`; `k`: active latents per token, for files that do not name them."""
    path = located(path)
    found = recognize(path)
    if k is None:
        return found.load(path)
    if not isinstance(found, TakesK):
        raise UserError(f"k = {k}: {path} has its own number of active latents; leave k out")
    return found.load_with(path, k)


def saes_in(folder: Path, depth: int = 100) -> list[Path]:
    """The SAEs in a folder, or the folder itself, in order; hidden folders are left out."""
    if not folder.is_dir():
        return [located(folder)] if is_sae(located(folder)) else []
    found: list[Path] = []
    for where, below, files in os.walk(folder):
        here = Path(where)
        deep = len(here.relative_to(folder).parts) >= depth
        below[:] = [] if deep else [name for name in below if name[0] != "."]
        if is_sae(here):
            found.append(here)
            below[:] = []
        else:
            found += [here / name for name in files if name[0] != "." and is_sae(here / name)]
    return sorted(found)


def results_folder(path: Path) -> Path:
    """Folder for what evaluations leave of the SAE at `path`: its own, or one beside its file, layer3.sae.pt ->
    layer3.sae."""
    return path.with_suffix("") if path.is_file() else path


def sae_of(results: Path) -> Path:
    """The inverse of `results_folder`."""
    if is_sae(results):
        return results
    beside = results.parent.glob(f"{glob.escape(results.name)}.*")
    return next((path for path in sorted(beside) if path.is_file() and is_sae(path)), results)


def _not_an_sae(path: Path) -> str:
    """Why there is no SAE at `path`, and the SAEs below it if it is the folder of a run."""
    if path.is_file():
        return f"{path}: a file, not the folder of an SAE"
    if not path.is_dir():
        return f"{path}: no SAE there (no such folder)"
    found = saes_in(path, depth=4)
    if not found:
        return f"{path}: no SAE in this folder; the formats that are recognized are {', '.join(FORMATS)}"
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{path}: no SAE itself, but there are SAEs in it: {', '.join(map(str, found[:3]))}{more}; name one"
