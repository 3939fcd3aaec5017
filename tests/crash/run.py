"""Kill jobs at file operations, fill the disk, make folders read-only or remove them (`python -m tests.crash.run`).

Each job runs in a forked process. Its file operations are counted with an audit hook, and at one of them it is
disturbed. Allowed ends are success and a `UserError`. After that the job is started again without disturbance, and its
files must equal those of an undisturbed job.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from sampled_sae.formats import saelens
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.progress import show
from tests.crash.jobs import JOBS, contents, model, spec, text

EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.truncate"}
"""Audit events of changes to the file system, besides `open` for writing; os.replace is os.rename there."""
WAYS = ("kill", "full", "read-only", "vanish")
SUCCESS, REFUSED, BUG, HANG = "success", "refused", "traceback", "hang"
LIMIT = 120


class Disturbance:
    """Counts file operations below a folder, and disturbs at one of them."""

    def __init__(self, way: str, at: int, folder: Path):
        self.way, self.at, self.folder = way, at, str(folder)
        self.quiet, self._first = False, os.getpid()
        self._count = mmap.mmap(-1, 8)  # shared with the processes that the job forks

    @property
    def count(self) -> int:
        return int.from_bytes(self._count[:8], "little")

    @count.setter
    def count(self, value: int) -> None:
        self._count[:8] = value.to_bytes(8, "little")

    def install(self) -> None:
        sys.addaudithook(self.hook)
        self._patch(os, "fsync", lambda real, fd: (self.operation("fsync"), real(fd))[1])
        self._patch(io, "open", self._open)
        self._patch(saelens, "save_file", self._save_file)

    def _patch(self, module: Any, name: str, replacement: Callable[..., Any]) -> None:
        real = getattr(module, name)
        setattr(module, name, lambda *args, **settings: replacement(real, *args, **settings))

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.quiet or not (event in EVENTS or event == "open"):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        paths = [os.fsdecode(a) for a in arguments[:2] if isinstance(a, str | bytes | os.PathLike)]
        # Removals inside a folder that is open name only the file.
        if any(path.startswith(self.folder) or "/" not in path for path in paths):
            self.operation(event)

    def operation(self, what: str) -> None:
        """One more operation; raises or kills if it is the one."""
        self.count += 1
        if self.way == "kill" and self.count == self.at:
            self.kill()
        if self.way == "full" and self.count == self.at and what != "os.remove" and what != "os.rmdir":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.way == "read-only" and self.count >= self.at:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if self.way == "vanish" and self.count == self.at:
            self.quiet = True
            shutil.rmtree(self.folder, ignore_errors=True)
            self.quiet = False

    def kill(self) -> None:
        """End this process; every other time that it is a worker, its launcher too, as when a machine goes down."""
        if os.getpid() != self._first and self.at % 2:
            os.kill(self._first, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _open(self, real: Any, file: Any, mode: str = "r", *args: Any, **settings: Any) -> Any:
        """A full disk shows when the file is written or closed, not when it is opened."""
        mine = isinstance(file, str | os.PathLike) and str(file).startswith(self.folder)
        if self.way == "full" and mine and set(mode) & set("wax+") and self.count + 1 == self.at:
            self.count += 1
            return real("/dev/full", mode, *args, **settings)
        return real(file, mode, *args, **settings)

    def _save_file(self, real: Any, tensors: Any, path: Any) -> None:
        """safetensors writes in Rust, which has no audit events: before, and in the middle of, the file."""
        self.operation("save")
        self.count += 1
        if self.count == self.at and self.way in ("kill", "full"):
            whole = save(tensors)
            Path(path).write_bytes(whole[: len(whole) // 2])
            if self.way == "kill":
                self.kill()
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        real(tensors, path)


def attempt(job: str, out: Path, way: str = "", at: int = 0) -> tuple[str, str, int]:
    """Run a job in a process of its own: its end (or "kill"), the error, and the number of file operations."""
    report = out.with_suffix(".report")
    report.unlink(missing_ok=True)
    ended, alive = os.pipe()  # has an end when all processes of the job have ended
    child = os.fork()
    if child == 0:
        end, text, disturbance = BUG, "", Disturbance(way, at, out)
        signal.alarm(LIMIT)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            try:
                disturbance.install()
                JOBS[job](out)
                end = SUCCESS
            except UserError as error:
                end, text = REFUSED, str(error)
            except BaseException:
                text = traceback.format_exc()
        disturbance.quiet, disturbance.way = True, ""
        report.write_text(f"{end}\n{disturbance.count}\n{text}")
        os._exit(0)
    os.close(alive)
    _, status = os.waitpid(child, 0)
    os.read(ended, 1)
    os.close(ended)
    if os.WIFSIGNALED(status):
        return ("kill" if os.WTERMSIG(status) == signal.SIGKILL else HANG), "", 0
    end, count, text = report.read_text().split("\n", 2)
    return end, text, int(count)


def disturb(job: str, way: str, at: int, right: dict[str, Any], again: int = 0) -> tuple[str, str]:
    """Disturb a job, continue it, compare. Returns the end of the disturbed job, and what is wrong.

    `again`: the file operation at which it is killed a second time, while it continues; 0 for none.
    """
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out"
        end, text, _ = attempt(job, out, way, at)
        if end in (BUG, HANG):
            return end, f"{end}: {text}"
        if end == REFUSED and "\n" in text:
            return end, f"more than one line: {text}"
        if again:
            attempt(job, out, "kill", again)
        last, text, _ = attempt(job, out)
        if way == "vanish" and last == REFUSED:  # what is left may be no whole run
            return end, ""
        if last != SUCCESS:
            return end, f"does not continue ({last}): {text}"
        found = contents(out)
        names = [name for name in {*found, *right} if found.get(name) != right.get(name)]
        if way == "vanish":  # removed lines of a log are gone, and so is the record for a resume from the folder alone
            names = [name for name in names if not name.endswith(("log.jsonl", "train.json"))]
        if names:
            return end, f"other files: {', '.join(sorted(names)[:5])}"
    return end, ""


class Planned(NamedTuple):
    """One disturbance of a job."""

    job: str
    way: str
    at: int
    again: int = 0


undisturbed: dict[str, tuple[int, dict[str, Any]]] = {}
"""By job: the number of its file operations, and its files."""


def run(kills: int | None, others: int, jobs: list[str], seed: str = "0", processes: int = 1) -> int:
    """That many kills and full disks, or one at every file operation, and that many of each other disturbance.

    Returns the number of failures. Disturbances are divided over `processes`, and do not depend on their number.
    """
    torch.set_num_threads(1)
    begin, failures = time.monotonic(), 0
    shares = None if kills is None else kills // len(jobs) + 1, others // len(jobs) + 1
    every = [planned for job in jobs for planned in plan(job, *shares, seed)]
    ends: dict[tuple[str, str], Counter[str]] = {}
    bar = show(len(every), what="disturbances", unit="disturbances", enabled=processes > 1)
    with ExitStack() as stack:
        found = map(_disturbed, every)
        if processes > 1:
            pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"))
            found = stack.enter_context(pool).map(_disturbed, every)
        for done, (planned, (end, wrong)) in enumerate(zip(every, found, strict=True), start=1):
            ends.setdefault((planned.job, planned.way), Counter())[end] += 1
            if wrong:
                failures += 1
                total = undisturbed[planned.job][0]
                print(f"{planned.job}, {planned.way} at file operation {planned.at} of {total}: {wrong}", flush=True)
            bar.update(done, f"{failures} failures" if failures else "")
    bar.close()
    for (job, way), counts in ends.items():
        shown = ", ".join(f"{number} {name}" for name, number in counts.most_common())
        print(f"{job}, {undisturbed[job][0]} file operations, {way} at {counts.total()}: {shown}")
    print(f"{len(every)} disturbances in {time.monotonic() - begin:.0f} s, {failures} failures")
    return failures


def _disturbed(planned: Planned) -> tuple[str, str]:
    return disturb(planned.job, planned.way, planned.at, undisturbed[planned.job][1], planned.again)


def plan(job: str, kills: int | None, others: int, seed: str) -> list[Planned]:
    """All disturbances of one job, which is run once without any."""
    draw = random.Random(f"{seed} {job}")
    if job in ("eval", "browse", "sweep"):
        model(), text(), spec()  # the same in each process
    with tempfile.TemporaryDirectory() as temporary:
        with contextlib.redirect_stderr(io.StringIO()):
            JOBS[job](Path(temporary) / "here")  # so that imports are done once, not in each process
        end, error, operations = attempt(job, Path(temporary) / "out")
        if end != SUCCESS:
            sys.exit(f"{job} fails undisturbed: {error}")
        undisturbed[job] = operations, contents(Path(temporary) / "out")
    once, found = list(range(1, operations + 1)), []
    for way in WAYS:
        wanted = kills if way == "kill" else others if kills is not None or way != "full" else None
        count = max(operations, 60) if wanted is None else wanted
        # Every operation if they suffice, else a sample; what is left over is killed twice.
        chosen = once if len(once) <= count else sorted(draw.sample(once, count))
        found += [Planned(job, way, at) for at in chosen]
        if way == "kill":
            twice = range(count - len(chosen))
            found += [Planned(job, way, draw.randrange(1, operations + 1), draw.randrange(1, 40)) for _ in twice]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, help="in all; at every file operation when unset, and so for full disks")
    parser.add_argument("--others", type=int, default=60, help="of each other disturbance, in all")
    parser.add_argument("--jobs", nargs="*", default=[*JOBS], choices=[*JOBS])
    parser.add_argument("--seed", default="0")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    sys.exit(1 if run(asked.kills, asked.others, asked.jobs, asked.seed, asked.processes) else 0)


if __name__ == "__main__":
    main()
