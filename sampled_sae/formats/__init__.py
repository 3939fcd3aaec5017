"""Saved SAEs as plain data. A format is a file in this folder that registers a `Format`:

    FORMATS.register("mine", Mine(), __name__)

Formats of other packages are found through the entry point `sampled_sae.formats`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.registry import Registry


class StoredSAE(NamedTuple):
    """A saved SAE: its configuration, and its tensors with the names and shapes of `SAE`."""

    cfg: InferenceConfig
    tensors: dict[str, Tensor]


class Format(Protocol):
    """One format.

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


FORMATS: Registry[Format] = Registry("format", __name__, "sampled_sae.formats")


def recognize(path: Path) -> Format:
    """The format of the SAE at `path`."""
    for candidate in FORMATS.values():
        if candidate.recognize(path):
            return candidate
    raise UserError(_not_an_sae(path))


def describe(path: Path) -> InferenceConfig:
    """The configuration of the SAE at `path`, without reading its weights."""
    return recognize(path).describe(path)


def _not_an_sae(path: Path) -> str:
    """Why there is no SAE at `path`, and the SAEs below it if it is the folder of a run."""
    if path.is_file():
        return f"{path}: a file, not the folder of an SAE"
    if not path.is_dir():
        return f"{path}: no SAE there (no such folder)"
    below = ("*", "saes/*", "*/saes/*", "*/*/saes/*")  # of a run, of its layers or passes, of both
    found = sorted({file.parent for pattern in below for file in path.glob(f"{pattern}/cfg.json")})
    if not found:
        return f"{path}: no SAE in this folder (no cfg.json)"
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{path}: no SAE itself, but there are SAEs in it: {', '.join(map(str, found[:3]))}{more}; name one"
