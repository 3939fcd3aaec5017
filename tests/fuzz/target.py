"""What is damaged, what reads it, and what may come of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tests.fuzz.mutate import (
    Damage,
    binary_damage,
    json_damage,
    text_damage,
    unsealed_damage,
)

D_IN, D_SAE, STEPS, BATCH = 16, 48, 12, 32
ANY = frozenset("*")
OWN, CFG, WEIGHTS = "sampled_sae.json", "cfg.json", "sae_weights.safetensors"
Make = Callable[[bytes, Any], Damage]


@dataclass(frozen=True)
class File:
    """A file that is damaged."""

    name: str
    """Relative to the target's folder."""
    damage: Make
    policy: Literal["sealed", "strict", "lenient"] = "strict"
    """What may be read from a damaged file without an error: what the undamaged file gives ("sealed"); that, or
    another valid setting ("strict", decided by the kind of damage); anything ("lenient": free text, and files whose
    bytes no checksum protects)."""
    free: frozenset[str] = frozenset()
    """Outermost JSON fields of a "strict" file that may be of any type or missing; * for all."""


@dataclass(frozen=True)
class Target:
    """A reader and the files that it reads."""

    name: str
    folder: str
    files: tuple[File, ...]
    read: Callable[[Path], Any]
    """Takes the folder; returns what was read."""
    weight: float = 1.0
    """Share of the inputs; less for slow readers."""
    copies: bool = False
    """Whether the reader writes into the folder."""
    notes: Callable[[Any], Iterable[str]] = field(default=lambda result: ())
    """Lines in a result that report what was left out."""


def sealed(*names: str) -> tuple[File, ...]:
    """Files with checksums."""
    return tuple(File(name, json_damage if name.endswith(".json") else binary_damage, "sealed") for name in names)


def strict(*names: str) -> tuple[File, ...]:
    """JSON files whose checksums, if any, are removed."""
    return tuple(File(name, unsealed_damage, "strict", ANY) for name in names)


def text_or_bytes(content: bytes, draw: Any) -> Damage:
    return draw.choice([text_damage, binary_damage])(content, draw)


def digest(value: Any) -> Any:
    """What two equal results have in common, small enough to keep."""
    if isinstance(value, torch.Tensor):
        whole = value.detach().contiguous().view(torch.uint8) if value.dim() else value.reshape(1)
        return str(value.dtype), tuple(value.shape), hashlib.sha1(whole.numpy().tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return {str(name): digest(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [digest(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def rows(count: int = 400) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    fires = torch.rand(count, 32, generator=generator) < 0.1
    return (fires * torch.rand(count, 32, generator=generator)) @ torch.randn(32, D_IN, generator=generator)
