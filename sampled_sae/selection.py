"""What a step kept, as far as the counters, the log and the threshold need to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Selection(NamedTuple):
    """The outcome of encoding, scoring and cutting one batch."""

    pool: Tensor
    """[m] bool: who was in the pool, or in any group's pool."""
    fired: Tensor
    """[m] bool: who kept at least one activation."""
    smallest: Callable[[], Tensor]
    """The smallest kept activation; 0 if there is none. Not every step asks."""
    kept: Callable[[], int]
    """How many were kept."""
    codes: Any
    """The kept activations themselves, in the form that the path's own gradients take."""
