"""How long the parts of a study take: estimates for an H200, corrected by what was measured on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sampled_sae.utils.progress import say

FIXED: dict[str, float] = {"probing": 15.0, "finalists": 90.0}
"""Seconds of a measure for any number of SAEs: texts are read and tokenized."""
EACH: dict[str, float] = {
    "rate": 0.0,
    "select": 1.2,
    "core": 2.0,
    "absorption": 1.0,
    "probing": 2.5,
    "finalists": 6.0,
    "similarity": 1.0,
    "slices": 0.5,
}
"""Seconds of a measure for one SAE of 65,536 latents."""
PREPARED: dict[str, float] = {"harvest": 30.0, "absorption": 37.0}
"""Seconds per layer: 25M tokens through the model; the words of absorption."""


def train_seconds(d_sae: int, tokens: int, cost: float = 1.0) -> float:
    """Seconds to train one SAE: 15 for 65,536 latents and 5 for 16,384, on 25M tokens."""
    return cost * (1.67 + 13.33 * d_sae / 65_536) * tokens / 25e6


def measure_seconds(measure: str, d_sae: int, saes: int) -> float:
    """Seconds to measure some SAEs."""
    return (FIXED.get(measure, 0.0) + saes * EACH[measure] * max(0.3, d_sae / 65_536)) if saes else 0.0


class Budget:
    """Seconds that are left, and estimates by kind of work. Each part is announced, and its time printed after it."""

    def __init__(self, until: float | None = None):
        """`until`: seconds from now on after which nothing begins; None: no limit."""
        self.begun = time.monotonic()
        self.until = until
        self.ratios: dict[str, float] = {}

    def seconds(self, kind: str, guess: float) -> float:
        """What such work will take, by what the last of its kind took."""
        return guess * self.ratios.get(kind, 1.0)

    @property
    def spent(self) -> float:
        return time.monotonic() - self.begun

    def allows(self, seconds: float) -> bool:
        """Whether work of so many seconds would end in time."""
        return self.until is None or self.spent + seconds <= self.until

    @contextmanager
    def timed(self, kind: str, what: str, guess: float) -> Iterator[None]:
        """Announce a part, print what it took, and remember it for its kind."""
        expected, begun = self.seconds(kind, guess), time.monotonic()
        say(f"{self.spent:7.1f} s  {what}: about {expected:.1f} s")
        yield
        took = time.monotonic() - begun
        if guess > 0:
            self.ratios[kind] = took / guess
        say(f"{self.spent:7.1f} s  {what}: took {took:.1f} s")
