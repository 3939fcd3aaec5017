"""Stages that are run one after the other, each once: what is finished under the same settings is not done again.

`reproduce.json` in the folder says which stages are finished, under which settings, when and how long they took.
"""

from __future__ import annotations

import functools
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from sampled_sae.config import first_difference, plain
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.files import alone_in, read_json, write_json
from sampled_sae.utils.progress import clock
from sampled_sae.utils.system import git_commit, versions

RECORD = "reproduce.json"


@dataclass(frozen=True)
class Stage:
    """One part of the work, resumable by itself."""

    name: str
    """For `--only`, `--skip` and the record."""
    settings: dict[str, Any]
    """What decides its outcome, as plain JSON."""
    run: Callable[[], Any]
    """Does the work, or goes on with it."""
    leaves: tuple[Path, ...]
    """Files that are there when it is finished."""
    needs: tuple[str, ...] = ()
    """Stages that must be finished before."""
    reads: tuple[str, ...] = ()
    """Stages whose results it takes in where they are there; it is run again after them."""
    keeps: bool = False
    """Whether its folder cannot be used again under other settings."""
    commands: tuple[str, ...] = ()
    """The same by hand."""


class Sitting(NamedTuple):
    """What became of a stage this time."""

    name: str
    done: bool
    """Whether it was run; if not, it had been finished before."""
    seconds: float


class Record:
    """The file that says how far the work is."""

    def __init__(self, folder: Path, scale: str):
        self.path = folder / RECORD
        there = read_json(self.path) if self.path.exists() else {}
        if not isinstance(there, dict) or not isinstance(there.get("stages", {}), dict):
            raise UserError(f"{self.path}: not a record of this program; choose another folder")
        if there.get("scale", scale) != scale:
            raise UserError(f"scale = {scale!r}: {folder} holds scale {there['scale']!r}; choose another folder")
        self.content: dict[str, Any] = {"scale": scale, "stages": {}} | there

    def entry(self, name: str) -> dict[str, Any]:
        """What is known of a stage; empty for one that was never begun."""
        found = self.content["stages"].get(name)
        return found if isinstance(found, dict) else {}

    def is_done(self, stage: Stage) -> bool:
        """Whether a stage is finished under these settings, and after everything that it reads."""
        entry = self.entry(stage.name)
        finished = entry.get("finished")
        if finished is None or entry.get("settings") != plain(stage.settings):
            return False
        before = [self.entry(name).get("finished") for name in (*stage.needs, *stage.reads)]
        fresh = all(other is None or other <= finished for other in before)
        return fresh and all(path.exists() for path in stage.leaves)

    def check(self, stage: Stage) -> None:
        """Refuse other settings where a stage cannot begin anew."""
        old = self.entry(stage.name).get("settings")
        if stage.keeps and old is not None:
            difference = first_difference(old, plain(stage.settings))
            if difference:
                raise UserError(f"{self.path}: {stage.name} was begun otherwise: {difference}; choose another folder")

    def write(self, **about: Any) -> None:
        self.content |= about
        write_json(self.path, self.content)

    def begin(self, stage: Stage) -> None:
        same = self.entry(stage.name).get("settings") == plain(stage.settings)
        before = self.entry(stage.name).get("seconds", 0.0) if same and not self.is_finished(stage.name) else 0.0
        self.content["stages"][stage.name] = {
            "settings": plain(stage.settings),
            "commands": list(stage.commands),
            "started": now(),
            "finished": None,
            "seconds": before,
            "versions": versions(),
            "git_commit": git_commit(),
        }
        self.write()

    def end(self, stage: Stage, seconds: float, finished: bool) -> None:
        entry = self.content["stages"][stage.name]
        entry["seconds"] += seconds
        entry["finished"] = now() if finished else None
        self.write()

    def is_finished(self, name: str) -> bool:
        return self.entry(name).get("finished") is not None


def now() -> str:
    """The time in letters that sort as time does."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def chosen(stages: Sequence[Stage], only: Sequence[str] | None, skip: Sequence[str]) -> list[Stage]:
    """The stages to run, in their order."""
    names = [stage.name for stage in stages]
    for field, asked in (("only", only or ()), ("skip", skip)):
        for name in asked:
            if name not in names:
                raise UserError(f"{field} = {name!r}: must be among {', '.join(names)}")
    kept = [stage for stage in stages if (only is None or stage.name in only) and stage.name not in skip]
    if not kept:
        raise UserError("only and skip: must leave at least one stage")
    return kept


def run_stages(
    stages: Sequence[Stage], out: Path, scale: str, about: dict[str, Any], tell: Callable[[str], None]
) -> list[Sitting]:
    """Run what is not finished; an interruption leaves the record in order and says that one can go on."""
    with alone_in(out):
        record = Record(out, scale)
        for stage in stages:
            record.check(stage)
        _check_needs(stages, record)
        record.write(**about)
        sittings = []
        for number, stage in enumerate(stages, start=1):
            head = f"[{number}/{len(stages)}] {stage.name}"
            if record.is_done(stage):
                tell(f"{head}: finished before, {clock(record.entry(stage.name)['seconds'])}")
                sittings.append(Sitting(stage.name, False, 0.0))
                continue
            sittings.append(_run(stage, record, functools.partial(tell, head)))
            tell(f"{head}: {clock(sittings[-1].seconds)}")
        return sittings


def _check_needs(stages: Sequence[Stage], record: Record) -> None:
    ahead: set[str] = set()
    for stage in stages:
        for name in stage.needs:
            if name not in ahead and not record.is_finished(name):
                raise UserError(f"{stage.name}: needs {name}, which is not finished in {record.path.parent}")
        ahead.add(stage.name)


def _run(stage: Stage, record: Record, say_so: Callable[[], None]) -> Sitting:
    record.begin(stage)
    begin = time.monotonic()
    try:
        with _terminated():
            say_so()  # who reads it and presses Ctrl-C shall learn that one can go on
            stage.run()
    except BaseException as error:
        record.end(stage, time.monotonic() - begin, finished=False)
        if isinstance(error, KeyboardInterrupt | Interrupted):
            raise Interrupted(f"in stage {stage.name}; the same command goes on from there") from None
        raise
    seconds = time.monotonic() - begin
    record.end(stage, seconds, finished=True)
    return Sitting(stage.name, True, seconds)


@contextmanager
def _terminated() -> Iterator[None]:
    """A polite request to stop counts as Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_disk(out: Path, needed: int) -> None:
    """Refuse to begin where the disk has too little room for what is still to be made."""
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"out = {str(out)!r}: {needed / 1e9:.1f} GB are needed there at the peak, {free / 1e9:.1f} GB are free; "
            "choose another folder"
        )


def say(line: str) -> None:
    """To the terminal, between the lines of progress."""
    print(line, file=sys.stderr, flush=True)
