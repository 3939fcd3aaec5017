"""Damage files at random, read them, and judge what happens; `python -m tests.fuzz.run --help`.

Allowed are the result of the undamaged file, or a `UserError`. Failures are other exceptions, hangs, and results that
differ without an error, where the file's policy does not allow it (see `target.File`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.progress import show
from tests.fuzz.mutate import Damage
from tests.fuzz.target import File, Target, digest
from tests.fuzz.targets import build, targets

LIMIT = 30.0
"""Seconds until an input counts as a hang."""


class Hang(BaseException):
    """An input took too long."""


class Failure(NamedTuple):
    """An input that was not handled."""

    target: str
    file: str
    where: str
    what: str
    """The last line of the traceback, or what differs."""
    seed: str
    detail: str = ""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Hang` after some seconds."""

    def stop(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Fuzzer:
    """The undamaged files, and what is read from them."""

    def __init__(self, root: Path):
        self.root = root
        if not (root / "arrays").exists():
            build(root)
        self.targets = {target.name: target for target in targets()}
        self.right: dict[str, Any] = {}

    def read(self, target: Target, folder: Path) -> Any:
        quiet = io.StringIO()
        with contextlib.redirect_stderr(quiet), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return target.read(folder)

    def expected(self, target: Target) -> Any:
        if target.name not in self.right:
            with self.folder(target) as folder:
                try:
                    self.right[target.name] = comparable(self.read(target, folder), folder)
                except UserError as error:  # a kind of file that is always refused
                    self.right[target.name] = repr(error)
        return self.right[target.name]

    @contextlib.contextmanager
    def folder(self, target: Target) -> Iterator[Path]:
        """The target's folder, or a copy for readers that write."""
        if not target.copies:
            yield self.root / target.folder
            return
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary) / Path(target.folder).name
            shutil.copytree(self.root / target.folder, copy)
            yield copy

    def one(self, seed: str, target: Target | None = None) -> tuple[str, Failure | None]:
        """One input: its verdict (same, refused, other), and a failure."""
        draw = random.Random(seed)
        if target is None:
            every = list(self.targets.values())
            target = draw.choices(every, [each.weight * len(each.files) ** 0.5 for each in every])[0]
        file = draw.choice(target.files)
        content = (self.root / target.folder / file.name).read_bytes()
        return self.judge(target, file, file.damage(content, draw), seed)

    def judge(self, target: Target, file: File, damage: Damage, seed: str = "") -> tuple[str, Failure | None]:
        """Read a damaged file."""
        right = self.expected(target)

        def failed(what: str, detail: str = "") -> tuple[str, Failure]:
            return "failed", Failure(target.name, file.name, damage.where, what, seed, detail)

        with self.folder(target) as folder:
            path = folder / file.name
            original = path.read_bytes()
            if damage.content == original:
                return "same", None
            try:
                path.write_bytes(damage.content)
                with limited(LIMIT):
                    found = self.read(target, folder)
                found = comparable(found, folder)
            except UserError as error:
                return ("refused", None) if str(error).strip() else failed("an empty error")
            except Hang:
                return failed(f"hangs: more than {LIMIT:g} s", traceback.format_exc())
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                return failed(f"{type(error).__name__} in {where}: {error!s:.80}", traceback.format_exc())
            finally:
                if path.parent.is_dir():
                    path.write_bytes(original)
        if found == right:
            return "same", None
        if _may_differ(file, damage) or any(Path(file.name).name in line for line in target.notes(found)):
            return "other", None
        return failed(f"{damage.kind}: silently another result")


def _may_differ(file: File, damage: Damage) -> bool:
    if file.policy == "sealed":
        return False
    if file.policy == "lenient" or damage.kind in ("value", "bytes"):
        return True
    return damage.kind in ("type", "field") and ("*" in file.free or damage.top in file.free)


def comparable(result: Any, folder: Path) -> Any:
    """A result without the folder's own name."""
    return json.loads(json.dumps(digest(result)).replace(str(folder), "FOLDER"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--commands", type=int, default=300, help="inputs through the command line")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--target", help="only this one")
    parser.add_argument("--keep", type=Path, help="folder for the undamaged files, kept for the next time")
    parser.add_argument("--details", action="store_true", help="print tracebacks")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root, failures = asked.keep or Path(temporary), list[Failure]()
        if asked.inputs:
            failures += run(root, asked.inputs, asked.seed, asked.target, asked.details, asked.processes)
        if asked.commands:
            from tests.fuzz.processes import run_commands

            failures += run_commands(root, asked.commands, asked.seed, asked.processes)
    sys.exit(1 if failures else 0)


def run(
    root: Path, inputs: int, seed: str = "0", only: str | None = None, details: bool = False, processes: int = 1
) -> list[Failure]:
    """Read that many damaged files; prints failures once each, and a summary.

    The inputs do not depend on the number of processes, each of which has a copy of the files.
    """
    fuzzer, begin = Fuzzer(root), time.monotonic()
    verdicts: Counter[str] = Counter()
    failures: list[Failure] = []
    known: set[tuple[str, str]] = set()
    bar = show(inputs, what="readers", unit="inputs", enabled=processes > 1)
    for done, (verdict, failure) in enumerate(_judged(fuzzer, inputs, seed, only, processes), start=1):
        verdicts[verdict] += 1
        if failure is not None:
            failures.append(failure)
            if (failure.target, failure.what[:60]) not in known:
                known.add((failure.target, failure.what[:60]))
                print(f"{failure.target}, {failure.file}: {failure.where}\n    {failure.what} [{failure.seed}]")
                print(failure.detail if details else "", end="", flush=True)
        bar.update(done, f"{len(failures)} failures" if failures else "")
    bar.close()
    shown = ", ".join(f"{count} {name}" for name, count in verdicts.most_common())
    print(f"{inputs} inputs in {time.monotonic() - begin:.0f} s: {shown}")
    return failures


def _judged(
    fuzzer: Fuzzer, inputs: int, seed: str, only: str | None, processes: int
) -> Iterator[tuple[str, Failure | None]]:
    target = None if only is None else fuzzer.targets[only]
    if processes == 1:
        yield from (fuzzer.one(f"{seed}/{number}", target) for number in range(inputs))
        return
    with tempfile.TemporaryDirectory() as temporary:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(processes, context, _copy, (fuzzer.root, temporary)) as pool:
            seeds = [f"{seed}/{number}" for number in range(inputs)]
            yield from pool.map(partial(_one_of_copy, only), seeds, chunksize=20)


own: list[Fuzzer] = []
"""That of this process."""


def _copy(root: Path, temporary: str) -> None:
    copy = Path(temporary) / str(os.getpid())
    shutil.copytree(root, copy)
    own.append(Fuzzer(copy))


def _one_of_copy(only: str | None, seed: str) -> tuple[str, Failure | None]:
    return own[-1].one(seed, None if only is None else own[-1].targets[only])


if __name__ == "__main__":
    main()
