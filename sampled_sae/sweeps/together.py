"""One job on several GPUs: its worker under torchrun, one process per GPU, on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sampled_sae.sweeps.store import State, Sweep
from sampled_sae.utils.errors import Interrupted, UserError


def work_together(folder: Path, name: str, ranks: int, *, device: str | None = None, where: str = "") -> None:
    """`worker.work` by several ranks; the same signals lead to a checkpoint and `Interrupted`."""
    sweep = Sweep(folder)
    attempts = sweep.entry(name).state.attempts
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "sampled_sae.sweeps.worker", str(sweep.folder), name, device or "", where]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def stop() -> None:
        """One rank is enough: it tells the others. torchrun would give them 30 s for their checkpoint."""
        state = sweep.entry(name).state
        if state.attempts == attempts or not signal_first_rank(state, signal.SIGTERM):
            process.terminate()

    try:
        with _handling(stop):
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


@contextmanager
def _handling(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` once at SIGTERM, SIGUSR2 or Ctrl-C."""
    asked = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if not asked.is_set():
            asked.set()
            stop()

    names = [name for name in ("SIGTERM", "SIGINT", "SIGUSR2") if hasattr(signal, name)]
    main = threading.current_thread() is threading.main_thread()
    before = {getattr(signal, name): signal.signal(getattr(signal, name), handle) for name in names if main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """SWEEP JOB DEVICE WHERE RANKS; exit codes as of a worker."""
    folder, name, device, where, ranks = sys.argv[1:]
    try:
        work_together(Path(folder), name, int(ranks), device=device or None, where=where)
    except Interrupted:
        sys.exit(130)
    except UserError:  # the ranks have printed it
        sys.exit(2)


if __name__ == "__main__":
    main()
