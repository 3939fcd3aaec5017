"""Results as plain JSON."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from sampled_sae.config import to_dict


def plain(value: Any) -> Any:
    """What reading it back from JSON gives; named tuples and configurations are objects."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value):
        value = to_dict(value)
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
