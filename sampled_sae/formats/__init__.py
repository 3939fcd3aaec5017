"""Saved SAEs as plain data: one file per format, recognized from names of files and keys of JSON."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import NamedTuple, Protocol

from torch import Tensor

from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError


class StoredSAE(NamedTuple):
    """A saved SAE: its configuration, and its tensors with the names and shapes of `SAE`."""

    cfg: InferenceConfig
    tensors: dict[str, Tensor]


class Format(Protocol):
    """One format. Its file assigns an instance to `FORMAT`."""

    name: str

    def recognize(self, path: Path) -> bool:
        """Whether there is an SAE of this format at `path`, from names of files and keys of JSON alone."""

    def describe(self, path: Path) -> InferenceConfig:
        """The configuration, without reading weights."""

    def load(self, path: Path) -> StoredSAE:
        """Configuration and tensors on the CPU, scales folded in."""

    def save(self, sae: StoredSAE, path: Path) -> Path:
        """Write all or nothing and return the path; UserError if the format cannot hold the SAE."""


@cache
def known() -> dict[str, Format]:
    """All formats by name."""
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    return {module.FORMAT.name: module.FORMAT for module in modules}


def recognize(path: Path) -> Format:
    """The format of the SAE at `path`."""
    for candidate in known().values():
        if candidate.recognize(path):
            return candidate
    raise UserError(_not_an_sae(path))


def describe(path: Path) -> InferenceConfig:
    """The configuration of the SAE at `path`, without reading its weights."""
    return recognize(path).describe(path)


def load(path: Path) -> StoredSAE:
    """The SAE at `path`."""
    return recognize(path).load(path)


def save(sae: StoredSAE, path: Path, format: str = "saelens") -> Path:
    """Write an SAE in the format with this name."""
    if format not in known():
        raise UserError(f"format = {format!r}: must be one of {', '.join(sorted(known()))}")
    return known()[format].save(sae, path)


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
