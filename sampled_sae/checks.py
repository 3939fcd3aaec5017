"""Checks of settings: each refusal is one line that names the field, its value and what would be right."""

from __future__ import annotations

import operator
from typing import Any, SupportsFloat

from sampled_sae.errors import UserError


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
