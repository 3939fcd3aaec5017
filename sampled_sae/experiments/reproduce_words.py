"""A command of the command line as the words that one would type for it."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any


def typed(command: Any) -> str:
    """`sampled-sae NAME ...` for a command's dataclass; what is as usual is left out."""
    name = next(cls.__name__ for cls in reversed(type(command).__mro__) if dataclasses.is_dataclass(cls)).lower()
    return shlex.join(["sampled-sae", name, *words(command)])


def words(command: Any, unprefixed: tuple[str, ...] = ("source", "similarity"), before: str = "") -> list[str]:
    """The arguments, positional ones first; fields of the parts named in `unprefixed` go by their own names."""
    first: list[str] = []
    rest: list[str] = []
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if value == _usual(field):
            continue
        flag = f"--{before}{field.name}".replace("_", "-")
        if dataclasses.is_dataclass(value):
            inner = "" if field.name in unprefixed else f"{before}{field.name}."
            rest += words(value, unprefixed, inner)
        elif "Positional" in str(field.type):
            first += _many(value)
        elif isinstance(value, bool):
            rest.append(flag if value else flag.replace("--" + before, "--" + before + "no-"))
        else:
            rest += [flag, *_many(value)]
    return [*first, *rest]


def _usual(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _many(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, tuple) else [str(value)]
