"""How a process ends: with an error in one line, or, of several ranks, if it makes no progress."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.measures import shown
from sampled_sae.utils.ranks import first_to_fail, number_of_ranks, own_rank, store

PATIENCE = float(os.environ.get("SAMPLED_SAE_PATIENCE", 30))
"""Seconds without progress after which a rank hangs, or FACTOR times the longest time between two steps so far."""
FACTOR = 10
LONG = 1800.0
"""Seconds for what may take long: opening activations, the first step, writing SAEs."""
TO_REPORT = 3.0
"""Seconds in which the ranks that hang, or wait for one that does, report where they are."""


@contextmanager
def exiting() -> Iterator[None]:
    """Exit with a line at an error: 2 for a user error, 130 for an interruption. Bugs of several ranks exit with 1."""
    try:
        yield
    except Interrupted as stop:
        _exit(f"stopped: {shown(stop)}", 130)
    except UserError as error:
        _exit(f"error: {shown(error)}", 2)
    except KeyboardInterrupt:
        _exit("stopped", 130)
    except Exception:
        if number_of_ranks() == 1:
            raise
        first_to_fail()  # the other ranks have nothing to add
        _exit(traceback.format_exc(), 1, always=True)


def _exit(line: str, code: int, always: bool = False) -> None:
    """Print a line and exit; of several ranks, the first to fail prints it."""
    if always or first_to_fail():
        print(line, file=sys.stderr, flush=True)
    if number_of_ranks() > 1:
        os._exit(code)  # threads that wait for a rank which has ended would keep this one
    sys.exit(code)


class Watch:
    """A thread that looks whether `tick` is called often enough: otherwise the other ranks would wait without end."""

    def __init__(self, kept: Callable[[], str]):
        """`kept` says what is left of the training."""
        self.kept = kept
        self.last, self.longest, self.limit, self.patient = time.monotonic(), 0.0, LONG, True
        self.main, self.ended = threading.main_thread().ident, threading.Event()
        threading.Thread(target=self._look, daemon=True, name="watch").start()

    def tick(self, counts: bool = True) -> None:
        now = time.monotonic()
        self.longest = max(self.longest, now - self.last) if counts else self.longest
        self.last, self.limit = now, LONG if self.patient else max(PATIENCE, FACTOR * self.longest)

    def _look(self) -> None:
        while not self.ended.wait(min(1.0, PATIENCE / 4)):
            if time.monotonic() - self.last > self.limit:
                self._end()

    def _end(self) -> None:
        """Report where this rank is; the first one prints the report of the one that does not wait for others."""
        shared, where = store(), self._where()
        shared.set(f"sampled_sae/hangs/{own_rank()}", where)
        if first_to_fail():
            time.sleep(TO_REPORT)
            found = {
                rank: shared.get(key).decode() if shared.check([key := f"sampled_sae/hangs/{rank}"]) else "in no step"
                for rank in range(number_of_ranks())
            }
            rank = min(found, key=lambda rank: found[rank].startswith(WAITS))
            said = f"rank {rank} has made no progress for {self.limit:.0f} s ({found[rank]}){self.kept()}"
            print(f"error: {said}", file=sys.__stderr__, flush=True)
        else:
            time.sleep(TO_REPORT + 1)
        os._exit(1)

    def _where(self) -> str:
        frame = sys._current_frames().get(self.main or 0)
        inner, waits = frame, False
        while frame is not None:
            waits |= EXCHANGES in frame.f_code.co_filename
            frame = frame.f_back
        if inner is None or waits:
            return WAITS
        return f"in {inner.f_code.co_name}, {Path(inner.f_code.co_filename).name}:{inner.f_lineno}"


WAITS = "waits for the other ranks"
EXCHANGES = f"{os.sep}torch{os.sep}distributed{os.sep}"
_watch: list[Watch] = []  # one at most


def tick(counts: bool = True) -> None:
    """Progress: a step, a pass through a language model. Without `counts`, however long it took."""
    if _watch:
        _watch[0].tick(counts)


@contextmanager
def patient() -> Iterator[None]:
    """Something that may take long."""
    for watch in _watch:
        watch.patient = True
        watch.tick(False)
    try:
        yield
    finally:
        for watch in _watch:
            watch.patient = False
            watch.tick(False)


@contextmanager
def watching(kept: Callable[[], str], world: int) -> Iterator[None]:
    """Watch the training of `world` ranks; one rank alone is not watched."""
    if world > 1:
        _watch.append(Watch(kept))
    try:
        yield
    finally:
        if _watch:
            _watch.pop().ended.set()
