"""While a long harvest is waited for: a word on how far it is, and an ear for Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sampled_sae.errors import Interrupted
from sampled_sae.progress import Lines

QUIET_SECONDS = 5.0
"""What takes less is not worth a line."""


class HarvestStopped(Interrupted):
    """Somebody asked to stop while a block was harvested: it is given up, to be harvested anew."""


def telling(total: int, what: str) -> Callable[[int], None]:
    """Takes the tokens done so far and tells of them if it takes long: in lines, which a progress bar lets through."""
    lines = Lines(total, 0, what, "tokens")

    def update(done: int) -> None:
        if time.monotonic() - lines.begun > QUIET_SECONDS:
            lines.update(done)

    return update


@contextmanager
def listening() -> Iterator[threading.Event]:
    """The event is set when Ctrl-C (or SIGTERM) comes meanwhile; whoever handled these before still does."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before: dict[signal.Signals, Callable[[int, Any], Any]] = {}

    def hear(number: int, frame: Any) -> None:
        asked.set()
        before[signal.Signals(number)](number, frame)

    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler):
            before[number] = handler
    try:
        for number in before:
            signal.signal(number, hear)
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
