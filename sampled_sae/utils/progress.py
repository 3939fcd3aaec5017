"""A progress bar with rate and time left; plain lines where there is no terminal."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """Shows how far a run is; this one shows nothing."""

    def update(self, done: int, note: str = "") -> None:
        pass

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


class Lines(Progress):
    """A line every tenth of the way, and at least every half minute."""

    def __init__(self, total: int, start: int, what: str, unit: str):
        self.total, self.start, self.what, self.unit = total, start, what, unit
        self.begun = self.said = time.monotonic()
        self.next = start

    def update(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if done < self.next and now - self.said < 30:
            return
        self.said, self.next = now, done + max(1, self.total // 10)
        rate = (done - self.start) / max(now - self.begun, 1e-9)
        left = f"{speed(rate, self.unit)}, {clock((self.total - done) / rate)} left" if rate > 0 else "starting"
        say(f"{self.what}: {done}/{self.total} {self.unit}, {left}  {note}")


class Bar(Progress):
    """rich's bar."""

    def __init__(self, total: int, start: int, what: str, unit: str, console: Any):
        from rich import progress

        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}"),
            console=console,
        )
        self.task = self.bar.add_task(what, total=total, completed=start, note="", rate="")
        self.begun, self.start, self.unit = time.monotonic(), start, unit
        self.bar.start()

    def update(self, done: int, note: str = "") -> None:
        rate = (done - self.start) / max(time.monotonic() - self.begun, 1e-9)
        with _on_terminal():
            self.bar.update(self.task, completed=done, note=note, rate=speed(rate, self.unit))

    def close(self) -> None:
        with _on_terminal():
            self.bar.stop()


def show(total: int, start: int = 0, what: str = "training", unit: str = "steps", enabled: bool = True) -> Progress:
    """A bar on a terminal (if rich is installed), lines elsewhere, nothing if not enabled."""
    if not enabled:
        return Progress()
    if sys.stderr.isatty():
        try:
            from rich.console import Console

            return Bar(total, start, what, unit, Console(stderr=True))
        except ImportError:
            pass
    return Lines(total, start, what, unit)


def speed(rate: float, unit: str) -> str:
    """A rate in words; slow ones by the minute."""
    return f"{rate:.1f} {unit}/s" if rate >= 0.2 else f"{60 * rate:.1f} {unit}/min"


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    hours, rest = divmod(int(seconds), 3600)
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
