"""A progress bar with rate and time left; plain lines where there is no terminal."""

from __future__ import annotations

import errno
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Each = tuple[int, str]
"""What one unit of progress consists of, such as (4096, "tokens")."""


class Progress:
    """Shows how far a run is; this one shows nothing."""

    def update(self, done: int, note: str = "") -> None:
        pass

    def due(self, done: int) -> bool:
        """Whether an update prints a line, which stays."""
        return False

    def close(self) -> None:
        pass


@contextmanager
def _on_terminal() -> Iterator[None]:
    """A terminal that was closed meanwhile does not stop the work: a run still has to write its checkpoint."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def say(line: str) -> None:
    """Print a line to stderr."""
    with _on_terminal():
        print(line, file=sys.stderr, flush=True)


class Rate:
    """Units per second over the later half of the run, at least half a minute.

    Slow first steps do not count for long, and work that comes in bursts, such as refills of a buffer, evens out.

    The first update starts the clock: compilation and the first read of data come before it.
    """

    SECONDS = 30.0

    def __init__(self) -> None:
        self.seen: deque[tuple[float, int]] = deque()
        self.begun = 0.0

    def update(self, done: int) -> float:
        """The rate after an update; 0 until there are two."""
        now = time.monotonic()
        self.begun = self.begun or now
        window = max(self.SECONDS, (now - self.begun) / 2)
        if len(self.seen) < 2 or now - self.seen[-2][0] >= window / 150:
            self.seen.append((now, done))
        else:  # too close to the one before, which stays the last but one
            self.seen[-1] = (now, done)
        while len(self.seen) > 2 and now - self.seen[1][0] > window:
            self.seen.popleft()
        (begun, first), (ended, last) = self.seen[0], self.seen[-1]
        return (last - first) / (ended - begun) if ended > begun else 0.0


class Lines(Progress):
    """A line every tenth of the way, and at least every half minute."""

    def __init__(self, total: int, start: int, what: str, unit: str, each: Each | None = None):
        self.total, self.what, self.unit, self.each = total, what, unit, each
        self.begun = self.said = time.monotonic()
        self.last: int | None = None
        self.next, self.rate = start, Rate()

    def update(self, done: int, note: str = "") -> None:
        now, rate = time.monotonic(), self.rate.update(done)
        if not self.due(done):
            return
        self.said, self.last, self.next = now, done, done + max(1, self.total // 10)
        left = "" if done >= self.total else ", starting"
        if rate > 0:
            left = f", {speed(rate, self.unit, self.each)}, {clock((self.total - done) / rate)} left"
        say(f"{self.what}: {counted(done)}/{counted(self.total)} {self.unit}{left}  {note}".rstrip())

    def due(self, done: int) -> bool:
        return done != self.last and (done >= min(self.next, self.total) or time.monotonic() - self.said >= 30)


class Bar(Progress):
    """rich's bar."""

    def __init__(self, total: int, start: int, what: str, unit: str, console: Any, each: Each | None = None):
        from rich import progress

        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[shown]}"),
            progress.TextColumn("{task.fields[note]}"),
            console=console,
        )
        self.task = self.bar.add_task(what, total=total, completed=start, note="", shown="")
        self.total, self.unit, self.each, self.rate = total, unit, each, Rate()
        self.bar.start()

    def update(self, done: int, note: str = "") -> None:
        rate, shown = self.rate.update(done), f"{counted(done)}/{counted(self.total)} {self.unit}"
        if rate > 0:
            shown += f"  {speed(rate, self.unit, self.each)}  {clock((self.total - done) / rate)} left"
        with _on_terminal():
            self.bar.update(self.task, completed=done, note=note, shown=shown)

    def close(self) -> None:
        with _on_terminal():
            self.bar.stop()


def show(
    total: int,
    start: int = 0,
    what: str = "training",
    unit: str = "steps",
    enabled: bool = True,
    each: Each | None = None,
) -> Progress:
    """A bar on a terminal (if rich is installed), lines elsewhere, nothing if not enabled.

    `each` is what one unit consists of, such as (4096, "tokens"); the rate is then given in these.
    """
    if not enabled:
        return Progress()
    if sys.stderr.isatty():
        try:
            from rich.console import Console

            return Bar(total, start, what, unit, Console(stderr=True), each)
        except ImportError:
            pass
    return Lines(total, start, what, unit, each)


def speed(rate: float, unit: str, each: Each | None = None) -> str:
    """A rate in words; slow ones by the minute."""
    if each is not None:
        rate, unit = rate * each[0], each[1]
    return f"{counted(rate)} {unit}/s" if rate >= 0.2 else f"{counted(60 * rate)} {unit}/min"


def counted(number: float) -> str:
    """A number with at most four digits of interest: 3.2, 1,234, 56.7k, 25.0M."""
    for least, unit, letter in ((999_950_000, 1e9, "B"), (999_950, 1e6, "M"), (10_000, 1e3, "k")):
        if number >= least:
            return f"{number / unit:.1f}{letter}"
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss; several days in days."""
    hours, rest = divmod(int(seconds), 3600)
    if hours >= 72:
        return f"{hours / 24:,.0f} days"
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


QUIET_SECONDS = 5.0  # work that takes less prints no line


def telling(total: int, what: str) -> Callable[[int], None]:
    """A function of the tokens done so far that prints progress lines, once the work has taken QUIET_SECONDS."""
    lines = Lines(total, 0, what, "tokens")

    def update(done: int) -> None:
        if time.monotonic() - lines.begun > QUIET_SECONDS:
            lines.update(done)

    return update


class Stages:
    """A bar for each thing that is being done, one after the other."""

    def __init__(self) -> None:
        self._what, self._bar = "", Progress()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.close()
            name, _, unit = what.partition(": ")
            self._what, self._bar = what, show(total, what=name, unit=unit)
        self._bar.update(done)

    def close(self) -> None:
        self._bar.close()
        self._bar = Progress()
