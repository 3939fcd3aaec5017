"""Run jobs on this machine: one worker process per GPU, or several on the CPU; or workers on several GPUs each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sampled_sae.config import require
from sampled_sae.sweeps.store import Sweep
from sampled_sae.sweeps.worker import signal_first_rank
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.files import writing
from sampled_sae.utils.system import listening

POLL = 0.2  # seconds between two looks at the workers
Say = Callable[[str], None]


class Slot(NamedTuple):
    """A place for one worker."""

    name: str
    device: str
    environment: dict[str, str]
    ranks: int = 1  # processes that run a job together


def slots(workers: int | None = None, device: str | None = None, gpus_per_job: int = 1) -> list[Slot]:
    """Places for workers: one per GPU, or per `gpus_per_job` of them; `workers` of them on the CPU, one by default."""
    require(gpus_per_job >= 1, "gpus_per_job", gpus_per_job, "must be at least 1")
    count = torch.cuda.device_count() if device in (None, "cuda") else 0
    if count:
        visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        gpus = visible or list(map(str, range(count)))
        there = f"the number of GPUs is {len(gpus)}"
        require(gpus_per_job <= len(gpus), "gpus_per_job", gpus_per_job, f"must be at most {len(gpus)}; {there}")
        most = len(gpus) // gpus_per_job
        require(workers is None or 1 <= workers <= most, "workers", workers, f"must be from 1 to {most}; {there}")
        groups = [gpus[n * gpus_per_job : (n + 1) * gpus_per_job] for n in range(workers or most)]
        return [
            Slot(f"GPU {', '.join(group)}", "cuda", {"CUDA_VISIBLE_DEVICES": ",".join(group)}, gpus_per_job)
            for group in groups
        ]
    if device == "cuda" or (device is not None and device != "cpu"):
        raise UserError(f"device = {device!r}: must be cuda, with a GPU, or cpu; workers are given a GPU each")
    require(workers is None or workers >= 1, "workers", workers, "must be at least 1")
    total = (workers or 1) * gpus_per_job
    threads = str(max(1, len(os.sched_getaffinity(0)) // total)) if hasattr(os, "sched_getaffinity") else "1"
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    return [Slot(f"CPU {n}", "cpu", environment, gpus_per_job) for n in range(workers or 1)]


def run(sweep: Sweep, names: Sequence[str], places: Sequence[Slot], say: Say) -> None:
    """Run these jobs; returns when all have ended. Ctrl-C and `cancel` stop them after their checkpoints."""
    queue, free = list(names), deque(places)
    running: dict[str, tuple[subprocess.Popen[bytes], Slot]] = {}
    stopping = False
    with listening(chained=False) as asked:
        try:
            while queue or running:
                if not stopping and (asked.is_set() or sweep.is_cancelled):
                    stopping = True
                    queue.clear()
                    for process, _ in running.values():
                        process.send_signal(signal.SIGTERM)
                while free and (name := _next(sweep, queue, [*running], say)):
                    slot = free.popleft()
                    running[name] = _start(sweep, name, slot), slot
                    say(f"{name}: started on {slot.name}")
                for name, (process, slot) in list(running.items()):
                    if process.poll() is not None:
                        del running[name]
                        free.append(slot)
                        say(f"{name}: {_ended(sweep, name, process.returncode)}")
                if running:
                    time.sleep(POLL)
        except BaseException:  # a second Ctrl-C, or an error: no worker stays behind
            for name, (process, slot) in running.items():
                if slot.ranks == 1 or not signal_first_rank(sweep.entry(name).state, signal.SIGKILL):
                    process.kill()
            raise
    if asked.is_set():
        raise Interrupted(f"the jobs of {sweep.folder} are stopped; the same command continues them")


def _next(sweep: Sweep, queue: list[str], running: Sequence[str], say: Say) -> str | None:
    """Take the first job from the queue whose needs are finished; drop those whose needs never will be."""
    for name in list(queue):
        open_needs = sweep.open_needs(name)
        if not open_needs:
            queue.remove(name)
            return name
        lost = [need for need in open_needs if need not in queue and need not in running]
        if lost:
            queue.remove(name)
            say(f"{name}: not started, because {lost[0]} is not finished")
    return None


def _start(sweep: Sweep, name: str, slot: Slot) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sampled_sae.sweeps.worker", str(sweep.folder), name]
    command += [slot.device, slot.name, str(slot.ranks)]
    path = sweep.path(name) / "log.txt"
    with writing(path), path.open("ab") as log:
        # In a session of its own: Ctrl-C reaches the launcher alone, which stops the workers once.
        return subprocess.Popen(
            *(command,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **slot.environment},
            start_new_session=True,
        )


def _ended(sweep: Sweep, name: str, code: int) -> str:
    """What became of a job whose worker has ended, in words; a worker that could not say so itself failed."""
    state = sweep.entry(name).state
    if state.status in ("running", "pending"):
        killed = f"killed by {signal.Signals(-code).name}; out of memory?" if code < 0 else f"exit code {code}"
        try:
            with sweep.locked(name):
                state = sweep.update(name, status="failed", error=f"the worker ended early ({killed}); see log.txt")
        except UserError as error:  # another worker has it, or the folder is read-only
            return f"the worker ended early ({killed}), which could not be noted: {error}"
    return state.status if state.error is None else f"{state.status}: {state.error}"
