"""Restarts by torchrun (`--max-restarts`): a training that its job began goes on without being asked to resume."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from sampled_sae.utils.files import write_text, writing

FILE = ".torchrun"
"""In the folder of a training that is not finished: the job of torchrun that began it."""


def job() -> str | None:
    """What tells this job of torchrun from others; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None or os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return name  # on several machines, the user has given it
    return f"{name} {socket.gethostname()}:{os.getppid()}"


def resumes(out: Path, resume: bool) -> bool:
    """Whether the training in `out` is to be resumed: on request, or after a restart of the job that began it.

    A job that finds the training of an earlier one, and was not asked to resume it, does not do so at its restarts
    either.
    """
    if resume or job() is None:
        return resume
    file = out / FILE
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        with writing(file):
            file.unlink(missing_ok=True)
        return False
    return file.exists() and file.read_text(encoding="utf-8") == job()


def begun(out: Path) -> None:
    """Note that this job has begun the training in `out`, or gone on with it."""
    if (name := job()) is not None:
        write_text(out / FILE, name)


def ended(out: Path) -> None:
    """Remove the note when the training is finished."""
    with writing(out / FILE):
        (out / FILE).unlink(missing_ok=True)
