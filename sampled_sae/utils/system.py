"""Device, free memory, versions, git commit and signals."""

from __future__ import annotations

import platform
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch

from sampled_sae.utils.errors import UserError


def usable_device(name: str | torch.device | None) -> torch.device:
    """The device of that name if it is there; by default the GPU if there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].split(". ")[0]
        raise UserError(f"device = {str(name)!r}: cannot be used ({reason})") from None
    return device


def versions() -> dict[str, str]:
    """Versions of everything that can change a number."""
    try:
        own = metadata.version("sampled-sae")
    except metadata.PackageNotFoundError:
        own = "unknown"
    found = {
        "sampled_sae": own,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def git_commit() -> str | None:
    """The commit that the package's code lies on, with a mark if it was changed; none outside of git."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return f"{commit}-dirty" if _git(here, "status", "--porcelain", "--untracked-files=no", ".") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


@contextmanager
def _on_signals(respond: Callable[[Callable[[], Any]], None], chained: bool) -> Iterator[None]:
    """Call `respond` with the handler that was set before, on Ctrl-C, SIGTERM and SIGHUP; only in the main thread.

    If `chained`, signals without a handler in Python are left alone; so is SIGHUP under nohup, which ignores it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before: dict[Any, Any] = {number: signal.getsignal(number) for number in numbers}
    for number, handler in list(before.items()):
        if (
            handler is None
            or (chained and not callable(handler))
            or (handler is signal.SIG_IGN and number.name == "SIGHUP")
        ):
            del before[number]
    try:
        for number in before:
            signal.signal(number, lambda number, frame: respond(lambda: before[number](number, frame)))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, SIGTERM or SIGHUP lets the step in progress end; a second one stops at once."""
    asked = threading.Event()

    def respond(before: Callable[[], Any]) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    with _on_signals(respond, chained=False):
        yield asked.is_set


@contextmanager
def listening() -> Iterator[threading.Event]:
    """An event that is set when Ctrl-C, SIGTERM or SIGHUP arrives meanwhile; the handler before runs too."""
    asked = threading.Event()

    def respond(before: Callable[[], Any]) -> None:
        asked.set()
        before()

    with _on_signals(respond, chained=True):
        yield asked


def available(device: torch.device) -> int | None:
    """Free bytes on the device; none where it cannot be known."""
    if device.type == "cuda":
        return _gpu_free(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    limited = _cgroup_free()
    return free if limited is None else min(free, limited)


def _gpu_free(device: torch.device) -> int:
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    reserved = torch.cuda.memory_reserved(device)
    if hasattr(torch.cuda, "get_per_process_memory_fraction"):  # a process that shares its GPU may have set a limit
        free = min(free, int(torch.cuda.get_per_process_memory_fraction(index) * total) - reserved)
    # What torch holds but does not use is free to us as well.
    return free + reserved - torch.cuda.memory_allocated(device)


def _cgroup_free() -> int | None:
    """Bytes left under a container's limit, if there is one."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        return None if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return None


def readable(size: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
