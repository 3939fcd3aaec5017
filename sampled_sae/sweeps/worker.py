"""One job in one process: train its SAEs, or continue, then evaluate them; or write a part of a cache. What is finished
is not done again.

Launchers start it as `python -m sampled_sae.sweeps.worker SWEEP JOB [DEVICE [WHERE [RANKS]]]`. With several ranks it
starts itself under torchrun, one process per GPU of this machine; the first of these has the job's lock, notes how far
it is, and evaluates.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sampled_sae import api
from sampled_sae.data.cache import write as write_cache
from sampled_sae.data.cache_index import Part
from sampled_sae.sweeps.spec import SweepConfig
from sampled_sae.sweeps.store import Job, State, Sweep
from sampled_sae.training.folder import inside
from sampled_sae.training.run import Callback, Run
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.ranks import gpu_of_rank, join, leave, number_of_ranks, own_rank
from sampled_sae.utils.system import handling
from sampled_sae.utils.watch import exiting

EVERY = 5.0  # seconds between two notes of how far a job is
POLL = 0.2  # seconds between two looks whether the other ranks are finished


def work(folder: Path, name: str, *, device: str | None = None, where: str = "", ranks: int = 1) -> None:
    """Run one job of the sweep in `folder`, or what is left of it; its state is in job.json whatever happens.

    SIGTERM, SIGUSR2 (which Slurm sends before a time limit and at preemption) and Ctrl-C write a checkpoint and raise
    `Interrupted`.
    """
    sweep = Sweep(folder)
    if ranks > 1:
        _work_together(sweep, name, ranks, device, where)
        return
    if own_rank():
        with _stoppable(), inside(Path(sweep.cwd)):
            _run(sweep, sweep.entry(name).job, device)
        return
    with sweep.locked(name), _stoppable() as stop:
        job, state = sweep.entry(name)
        if state.status == "finished":
            return
        begun, before = time.monotonic(), state.seconds
        host = f"{socket.gethostname()}:{os.getpid()}"
        sweep.update(
            *(name,),
            status="running",
            attempts=state.attempts + 1,
            worker=" ".join(filter(None, (host, where))),
            error=None,
        )
        end: dict[str, Any] = {"status": "failed", "error": "ended by a bug of the worker"}
        try:
            with inside(Path(sweep.cwd)):
                _run(sweep, job, device, [Notes(sweep, job, begun - before)])
            stop.set()  # a signal that comes now has nothing to stop
            end = {"status": "finished"}
        except (Interrupted, KeyboardInterrupt) as error:
            stop.set()  # later signals are the same request again
            end = {"status": "cancelled" if sweep.is_cancelled else "interrupted"}
            raise Interrupted(f"{name}: {str(error) or 'stopped'}") from None
        except BaseException as error:
            stop.set()
            end["error"] = last_line(error)
            raise
        finally:
            sweep.update(name, seconds=before + time.monotonic() - begun, **end)


def _run(sweep: Sweep, job: Job, device: str | None, callbacks: Sequence[Callback] = ()) -> None:
    spec, out = sweep.spec, sweep.path(job.name) / "train"
    dtype = None if job.dtype is None else getattr(torch, job.dtype)
    if job.part is not None:
        assert job.model is not None
        _write_cache(sweep, job, api.load_model(job.model, gpu_of_rank(device), dtype))
        return
    model = None
    if not sweep.entry(job.name).state.trained:
        join(device)  # of several ranks, each has its own GPU from here on
        if job.model is not None and job.cache is None:
            model = api.load_model(job.model, device, dtype)
        train = spec.train().to_dict()
        del train["extends"]
        api.train(
            _activations(sweep, job, model),
            list(job.saes),
            **train,
            out=out,
            resume=True,
            key=spec.key if job.activations else None,
            device=device,
            keep=False,
            callbacks=callbacks,
        )
        leave()
        if not own_rank():
            sweep.update(job.name, trained=True, step=train["steps"])
    requests = spec.requests()
    if requests and not own_rank():
        if model is None and job.model is not None:
            model = api.load_model(job.model, device, dtype)
        text = spec.eval_text or spec.text
        api.evaluate([out], model, requests, text=text, device=device, dtype=dtype)


def _write_cache(sweep: Sweep, job: Job, model: Any) -> None:
    """Write the job's part of a cache; of several ranks, each writes a part of it."""
    spec, ranks = sweep.spec, number_of_ranks()
    assert spec.cache is not None and job.cache is not None and job.part is not None
    folder, part = sweep.folder / job.cache, job.part
    write_cache(
        _harvest(spec, job, model),
        folder,
        spec.cached_tokens(),
        seed=spec.data_seed,
        shard_tokens=spec.cache.shard_tokens,
        heldout_tokens=spec.heldout_tokens,
        progress=own_rank() == 0,
        part=Part((part.number - 1) * ranks + own_rank() + 1, part.of * ranks),
    )
    while not part.is_written(folder):  # the first rank notes that the job is finished when all are
        time.sleep(POLL)


def _activations(sweep: Sweep, job: Job, model: Any) -> Any:
    if job.cache is not None:
        return str(sweep.folder / job.cache)
    return job.activations if job.activations is not None else _harvest(sweep.spec, job, model)


def _harvest(spec: SweepConfig, job: Job, model: Any) -> Any:
    assert spec.text is not None
    settings = spec.source.to_dict()
    del settings["hooks"]
    layers = [hook for hook in job.hooks if isinstance(hook, int)]
    hooks = [hook for hook in job.hooks if isinstance(hook, str)]
    return api.activations(model, spec.text, layers or None, hook=hooks or None, **settings)


class Notes(Callback):
    """Notes in job.json how far the training is, every few seconds and at checkpoints."""

    def __init__(self, sweep: Sweep, job: Job, zero: float):
        self.sweep, self.job, self.zero, self.noted = sweep, job, zero, 0.0

    def on_batch(self, run: Run, step: int, x: Tensor) -> None:
        if time.monotonic() - self.noted > EVERY:
            self._note(step)

    def on_checkpoint(self, run: Run, step: int, folder: Path) -> None:
        self._note(step)

    def _note(self, step: int) -> None:
        self.noted = time.monotonic()
        self.sweep.update(self.job.name, step=step, seconds=self.noted - self.zero)


@contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """SIGTERM and SIGUSR2 stop the work in progress once; nothing more happens once the event is set.

    The trainer has a handler of its own for SIGTERM while it runs, which ends the step and writes a checkpoint:
    SIGUSR2 goes there too. Outside of it they raise KeyboardInterrupt.
    """
    asked = threading.Event()

    def terminate(number: int, frame: Any) -> None:
        if not asked.is_set():
            asked.set()
            raise KeyboardInterrupt

    def forward(number: int, frame: Any) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler):
            handler(signal.SIGTERM, frame)

    with handling({"SIGTERM": terminate, "SIGUSR2": forward}):
        yield asked


def last_line(error: BaseException) -> str:
    """An error in one line, as the last line of its traceback has it; user errors without their type."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    return traceback.format_exception_only(type(error), error)[-1].strip()


def _work_together(sweep: Sweep, name: str, ranks: int, device: str | None, where: str) -> None:
    """Run one job in several processes."""
    attempts, asked = sweep.entry(name).state.attempts, threading.Event()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "sampled_sae.sweeps.worker", str(sweep.folder), name, device or "", where]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def stop(number: int, frame: Any) -> None:
        """One rank is enough: it tells the others. torchrun would give them 30 s for their checkpoint."""
        if asked.is_set():
            return
        asked.set()
        state = sweep.entry(name).state
        if state.attempts == attempts or not signal_first_rank(state, signal.SIGTERM):
            process.terminate()

    try:
        with handling(dict.fromkeys(("SIGTERM", "SIGINT", "SIGUSR2"), stop)):
            code = process.wait()
    finally:
        process.kill()
    _raise_for(sweep, name, code, sweep.entry(name).state)


def signal_first_rank(state: State, number: int) -> bool:
    """Send a signal to the first rank of a running job on this machine; if it ends, torchrun ends the others."""
    found = re.match(r"[^:]*:(\d+)", state.worker or "")
    if state.status != "running" or found is None:
        return False
    try:
        os.kill(int(found[1]), number)
    except ProcessLookupError:
        return False
    return True


def _raise_for(sweep: Sweep, name: str, code: int, state: State) -> None:
    """Nothing if the job is finished, else the exception that says how it ended."""
    if state.status == "finished":
        return
    if state.status in ("interrupted", "cancelled"):
        raise Interrupted(f"{name}: stopped")
    if state.status != "failed":  # the first rank could not note it
        with sweep.locked(name):
            state = sweep.update(name, status="failed", error=f"the ranks ended early (exit code {code})")
    raise UserError(f"{name}: {state.error}")


def main() -> None:
    """Exit codes: 0 finished, 1 a bug, 2 a user error, 130 interrupted."""
    folder, name, *rest = sys.argv[1:]
    device, where, ranks = [*rest, *("", "", "1")[len(rest) :]]
    with exiting():
        work(Path(folder), name, device=device or None, where=where, ranks=int(ranks))


if __name__ == "__main__":
    main()
