"""Device, precision of products, free memory, versions, git commit and signals."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
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


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Whether float32 products on a GPU may round to TF32 (`high`) or not (`highest`)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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


@cache
def git_commit() -> str | None:
    """The commit that the package's code lies on, with a mark if it was changed; none outside of git."""
    here = Path(__file__).parent
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no", "."])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit.strip()}-dirty" if changes.strip() else commit.strip()


@contextmanager
def listening(chained: bool = True, insisted: bool = True) -> Iterator[threading.Event]:
    """An event that is set when Ctrl-C, SIGTERM or SIGHUP arrives meanwhile; only in the main thread.

    If `chained`, the handler before runs too, and signals without a handler in Python are left alone. If not, a second
    Ctrl-C raises KeyboardInterrupt if `insisted`: torchrun sends its processes the Ctrl-C that they had already.
    Schedulers send SIGTERM several times, which must not break off a checkpoint. SIGHUP is left alone under nohup,
    which ignores it.
    """
    asked, before = threading.Event(), dict[str, Any]()

    def respond(number: int, frame: Any) -> None:
        if not chained and insisted and asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()
        if chained:
            before[signal.Signals(number).name](number, frame)

    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & set(dir(signal)):
        handler = signal.getsignal(getattr(signal, name))
        ignored = handler is signal.SIG_IGN and name == "SIGHUP"
        if callable(handler) or not (handler is None or chained or ignored):
            before[name] = handler
    with handling(dict.fromkeys(before, respond)):
        yield asked


@contextmanager
def handling(handlers: Mapping[str, Callable[[int, Any], None]]) -> Iterator[None]:
    """Handle signals, given by name, as far as this system has them; only in the main thread."""
    before = dict[int, Any]()
    try:
        for name in handlers if threading.current_thread() is threading.main_thread() else ():
            if (number := getattr(signal, name, None)) is not None:
                before[number] = signal.signal(number, handlers[name])
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def switching_often() -> Iterator[None]:
    """Let a thread that launches GPU work wait for Python code of another, such as a tokenizer's, for 0.1 ms, not 5: it
    gives way at every launch."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def available(device: torch.device) -> int | None:
    """Free bytes on the device; none where it cannot be known."""
    if device.type == "cuda":
        return _gpu_free(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:  # a container may have a limit of its own
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        return free


def _gpu_free(device: torch.device) -> int:
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    reserved = torch.cuda.memory_reserved(device)
    if hasattr(torch.cuda, "get_per_process_memory_fraction"):  # a process that shares its GPU may have set a limit
        free = min(free, int(torch.cuda.get_per_process_memory_fraction(index) * total) - reserved)
    # What torch holds but does not use is free to us as well.
    return free + reserved - torch.cuda.memory_allocated(device)


def readable(size: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
