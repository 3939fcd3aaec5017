"""Workers of a sweep as forks of the launcher: they share its count of file operations and start without imports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import patch

from sampled_sae.sweeps import local, worker

BUG = 1  # exit code of a worker that ends in a traceback
LIMIT = 120
codes: list[int] = []
"""Exit codes of the workers of this launcher."""


class Forked:
    """What the launcher uses of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], stdout: BinaryIO, env: dict[str, str], **settings: Any):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, stdout, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
                codes.append(self.returncode)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _become(command: Sequence[str], log: BinaryIO, env: dict[str, str]) -> None:
    """Run the worker's own `main` in this process, and end it."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(LIMIT)
    # As in a new process: the launcher's lock is not inherited.
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if descriptor.readlink().name == ".lock":
                os.close(int(descriptor.name))
    os.environ.update(env)
    sys.argv = list(command[2:])  # without python -m
    code = BUG
    with os.fdopen(os.dup(log.fileno()), "w") as file:
        sys.stdout = sys.stderr = file
        try:
            worker.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
    os._exit(code)


@contextlib.contextmanager
def forked() -> Iterator[list[int]]:
    """Let the local launcher fork its workers; yields their exit codes."""
    codes.clear()
    popen = SimpleNamespace(Popen=Forked, DEVNULL=-3, STDOUT=-2)
    with patch.object(local, "subprocess", popen), patch.object(local, "POLL", 0.002):
        yield codes
