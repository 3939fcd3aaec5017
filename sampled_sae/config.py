"""Checks of settings: each refusal is one line that names the field, its value and what would be right."""

from __future__ import annotations

import dataclasses
import math
import operator
from dataclasses import is_dataclass
from typing import Any, SupportsFloat

from sampled_sae.utils.errors import UserError


def require(condition: bool, name: str, value: object, right: str) -> None:
    """Refuse a setting with one line: its name, its value and what would be right."""
    if not condition:
        raise UserError(f"{name} = {value!r}: {right}")


def whole_numbers(config: Any, *names: str) -> None:
    """Turn the named fields into plain ints (numpy's are not JSON), or refuse them."""
    for name in names:
        value = getattr(config, name)
        if value is not None:
            try:
                object.__setattr__(config, name, operator.index(value))
            except TypeError:
                raise UserError(f"{name} = {value!r}: must be a whole number") from None


def numbers(config: Any, *names: str) -> None:
    """Turn the named fields into plain floats, or refuse them."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, str) or not isinstance(value, SupportsFloat):
            raise UserError(f"{name} = {value!r}: must be a number")
        object.__setattr__(config, name, float(value))


# ---- to and from JSON -------------------------------------------------------------------------------

KINDS: dict[str, Any] = {}
"""Members of unions by the `kind` that they have in JSON; each union adds its own."""


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain JSON values; members of a union carry their `kind`."""
    plain: dict[str, Any] = {}
    kind = type(config).__name__.lower()
    if kind in KINDS:
        plain["kind"] = kind
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)  # JSON has no infinity
        plain[item.name] = to_dict(value) if dataclasses.is_dataclass(value) else value
    return plain


def plain(value: Any) -> Any:
    """What reading it back from JSON gives; named tuples and configurations are objects."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value):
        value = to_dict(value)
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def first_difference(old: Any, new: Any, where: str = "") -> str | None:
    """The first setting in which two configurations differ, in words; none if they agree."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            found = first_difference(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
            if found:
                return found
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        differences = (first_difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(old, new, strict=True)))
        return next(filter(None, differences), None)
    return None if old == new else f"{where} was {old!r} and is now {new!r}"
