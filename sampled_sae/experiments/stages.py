"""Resumable stages: a stage that is finished under the same settings is not run again.

`reproduce.json` in the folder lists the finished stages with their settings, times and versions.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from sampled_sae.config import first_difference, plain, read_file, write_file
from sampled_sae.migrations import migration, renamed, unset, within
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.files import alone_in
from sampled_sae.utils.progress import clock, say
from sampled_sae.utils.system import git_commit, versions

RECORD = "reproduce.json"


@dataclass(frozen=True)
class Stage:
    """One part of the work, resumable by itself."""

    name: str  # for `--only`, `--skip` and the record
    settings: dict[str, Any]  # what decides its results, as plain JSON
    run: Callable[[], Any]  # does the work, or continues it
    leaves: tuple[Path, ...]  # files that exist when it is finished
    needs: tuple[str, ...] = ()  # stages that must be finished before
    reads: tuple[str, ...] = ()  # stages whose results it includes if they exist; it is run again after them
    keeps: bool = False  # whether its folder cannot be used again under other settings
    commands: tuple[str, ...] = ()  # the same as command lines


class Record:
    """The file of finished stages."""

    def __init__(self, folder: Path, scale: str):
        self.path = folder / RECORD
        there = read_file(self.path, "reproduce") if self.path.exists() else {}
        if not isinstance(there.get("stages", {}), dict):
            raise UserError(f"{self.path}: not a record of this program; choose another folder")
        if there.get("scale", scale) != scale:
            raise UserError(f"scale = {scale!r}: {folder} holds scale {there['scale']!r}; choose another folder")
        self.content: dict[str, Any] = {"scale": scale, "stages": {}} | there

    def entry(self, name: str) -> dict[str, Any]:
        """What is recorded of a stage; empty if it was never started."""
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
        """Refuse other settings where a stage cannot be started again."""
        old, new = self.entry(stage.name).get("settings"), plain(stage.settings)
        if stage.keeps and old is not None and (difference := first_difference(old, new)):
            other = f"{stage.name} was started with other settings: {difference}"
            raise UserError(f"{self.path}: {other}; choose another folder")

    def write(self, **about: Any) -> None:
        self.content |= about
        write_file(self.path, "reproduce", self.content)

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


@migration("reproduce", 1)
def _upgrade(content: Any) -> Any:
    """Names of version 0, and the defaults of settings that stages did not list."""
    from sampled_sae.evals.autointerp.schema import AutointerpConfig
    from sampled_sae.evals.core.schema import CoreConfig

    def training(old: Any) -> Any:
        return renamed(old, latents="d_sae", saes_a_run="saes_per_run", max_norm="high_norm_factor")

    def completed(default: Any) -> Callable[[Any], Any]:
        return lambda old: default.to_dict() | renamed(old, interp_tokens="tokens")

    changes = {"train": training, "core": completed(CoreConfig()), "autointerp": completed(AutointerpConfig())}
    for name, change in changes.items():
        content = within(content, f"stages.{name}.settings", change)
    return content


@migration("reproduce", 2)
def _upgrade_defaults(content: Any) -> Any:
    """Defaults of evaluations that were 0 and [] are None."""
    for name in ("core", "autointerp"):
        content = within(content, f"stages.{name}.settings", partial(unset, skip_first=0, left_out=[]))
    return content


def now() -> str:
    """The time as text that sorts by time."""
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


def run_stages(stages: Sequence[Stage], out: Path, scale: str, about: dict[str, Any]) -> None:
    """Run the stages that are not finished; after an interruption the same call continues."""
    with alone_in(out):
        record, ahead = Record(out, scale), set[str]()
        for stage in stages:
            record.check(stage)
        for stage in stages:
            for name in stage.needs:
                if name not in ahead and not record.is_finished(name):
                    raise UserError(f"{stage.name}: needs {name}, which is not finished in {record.path.parent}")
            ahead.add(stage.name)
        record.write(**about)
        for number, stage in enumerate(stages, start=1):
            head = f"[{number}/{len(stages)}] {stage.name}"
            if record.is_done(stage):
                say(f"{head}: finished before, {clock(record.entry(stage.name)['seconds'])}")
            else:
                say(f"{head}: {clock(_run(stage, record, head))}")


def _run(stage: Stage, record: Record, head: str) -> float:
    """Run one stage and record it; returns the seconds that it took."""
    record.begin(stage)
    begin, finished = time.monotonic(), False
    try:
        with _terminated():
            say(head)  # inside, so that Ctrl-C after this line ends with the message below
            stage.run()
        finished = True
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(f"in stage {stage.name}; the same command continues from there") from None
    finally:
        record.end(stage, seconds := time.monotonic() - begin, finished)
    return seconds


@contextmanager
def _terminated() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C."""
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
    """Refuse to start if the disk has less free space than the stages need."""
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"out = {str(out)!r}: {needed / 1e9:.1f} GB are needed there at the peak, {free / 1e9:.1f} GB are free; "
            "choose another folder"
        )


# ---- commands ---------------------------------------------------------------------------------------


def typed(command: str, *positional: Any, **flags: Any) -> str:
    """`sampled-sae COMMAND ...`; flags that are None are left out, and settings become the flags of their group."""
    return shlex.join(["sampled-sae", command, *map(str, positional), *words(flags)])


def words(flags: Mapping[str, Any], group: str = "") -> Iterator[str]:
    """Flags by their fields' names and values -> the arguments of a command."""
    for name, value in flags.items():
        if dataclasses.is_dataclass(value):
            yield from words(changed(value), f"{group}{name}.")
        elif value is False:
            yield f"--{group}no-{name}".replace("_", "-")
        elif value is not None:
            yield f"--{group}{name}".replace("_", "-")
            values = value if isinstance(value, list | tuple) else () if value is True else (value,)
            yield from map(str, values)


def changed(config: Any) -> dict[str, Any]:
    """The settings that differ from their defaults."""
    default = type(config)()
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}
