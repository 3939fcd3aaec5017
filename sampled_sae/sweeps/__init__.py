"""Sweeps: a declarative file becomes jobs that are run on the GPUs of a machine or on a Slurm cluster.

`launch` starts or continues a sweep, `look` tells how far each job is, `cancel` stops it. There is no daemon: all
state is in files of the sweep's folder (`store`).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

from sampled_sae.sweeps import local, slurm
from sampled_sae.sweeps.spec import SlurmConfig, SweepConfig, read_spec
from sampled_sae.sweeps.store import CANCEL, Entry, Sweep, folder_of, planned
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, write_text, writing
from sampled_sae.utils.progress import say
from sampled_sae.utils.third_party import package

__all__ = [
    "Seen",
    "SlurmConfig",
    "SweepConfig",
    "cancel",
    "counted",
    "folder_of",
    "launch",
    "look",
    "planned",
    "read_spec",
]
Launcher = Literal["local", "slurm"]
Shown = Literal["pending", "queued", "running", "interrupted", "finished", "failed", "cancelled"]


class Seen(NamedTuple):
    """A job as it stands: its own record together with what the launcher knows."""

    entry: Entry
    status: Shown
    worker: str = ""
    error: str = ""
    steps: int = 0  # of the whole training; none of a job that writes a cache


def launch(
    spec: SweepConfig,
    out: str | Path,
    launcher: Launcher = "local",
    *,
    workers: int | None = None,
    device: str | None = None,
    gpus_per_job: int = 1,
    retry_failed: bool = False,
) -> list[Seen]:
    """Start the sweep in `out`, or continue it: jobs that are neither finished, failed nor in progress are run.

    `local` returns when all jobs have ended, `slurm` when they are submitted. `workers`, `device` and `gpus_per_job`
    are for `local`: jobs at a time, and GPUs that train a job together. `retry_failed` runs failed jobs again, from
    their last checkpoint.
    """
    folder = Path(out)
    if launcher == "slurm":
        package("submitit", "launcher = 'slurm'", "cluster")
        slurm.require_slurm()
    places = local.slots(workers, device, gpus_per_job) if launcher == "local" else []
    with alone_in(folder):
        sweep = Sweep.start(folder, spec)
        seen = look(sweep)
        with writing(sweep.folder):
            (sweep.folder / CANCEL).unlink(missing_ok=True)
        again = ("pending", "interrupted", "cancelled", *(["failed"] if retry_failed else []))
        names = [each.entry.job.name for each in seen if each.status in again]
        for name in names:
            with sweep.locked(name):
                sweep.update(name, status="pending", error=None)
        kept = Counter(each.status for each in seen if each.status not in again)
        failed = "; --retry-failed runs the failed ones again" if kept["failed"] else ""
        before = ", ".join(f"{count} {status}" for status, count in kept.items())
        say(f"{sweep.folder}: jobs to run: {len(names)}" + (f" ({before}{failed})" if before else ""))
        if launcher == "local":
            local.run(sweep, names, places, say)
        elif names:
            ids = slurm.submit(sweep, names, spec.slurm)
            say(
                "nothing was submitted"
                if not ids
                else f"submitted as Slurm jobs {ids[0]} to {ids[-1]}; sampled-sae sweep status {folder} shows them"
            )
        return look(sweep)


def look(sweep: Sweep | str | Path) -> list[Seen]:
    """Every job as it stands, in the order of the spec."""
    if not isinstance(sweep, Sweep):
        sweep = Sweep(folder_of(Path(sweep)))
    ids = slurm.read_ids(sweep)
    entries = [sweep.entry(name) for name in sweep.names]
    asked = [ids[e.job.name] for e in entries if e.job.name in ids and e.state.status not in ("finished", "failed")]
    known: dict[str, slurm.SlurmState] | None = {}
    if asked:
        try:
            known = slurm.states(asked)
        except UserError as error:
            print(f"{error}; the states are those that the jobs noted themselves", file=sys.stderr)
            known = None
    steps = sweep.spec.train().steps
    return [
        _seen(sweep, entry, ids.get(entry.job.name), known)._replace(steps=steps if entry.job.saes else 0)
        for entry in entries
    ]


def _seen(sweep: Sweep, entry: Entry, number: str | None, known: dict[str, slurm.SlurmState] | None) -> Seen:
    state = entry.state
    own = Seen(entry, state.status, state.worker or "", state.error or "")
    if state.status in ("finished", "failed", "cancelled"):
        return own
    in_slurm = known.get(number) if known is not None and number is not None else None
    if in_slurm is not None and number is not None:
        if in_slurm.is_waiting:
            return Seen(entry, "queued", f"Slurm job {number}", in_slurm.reason.replace("None", ""))
        if in_slurm.is_active:
            return own if state.status == "running" else Seen(entry, "queued", f"Slurm job {number}")
        if in_slurm.name == "CANCELLED":
            return Seen(entry, "cancelled", own.worker)
        if not sweep.is_held(entry.job.name) and sweep.entry(entry.job.name).state == state:
            why = slurm.error_line(sweep, number)
            return Seen(entry, "failed", own.worker, f"Slurm: {in_slurm.name}{why and f' ({why})'}")
        return own
    if state.status == "running" and (known is not None or number is None) and not sweep.is_held(entry.job.name):
        # Its worker is gone without a note: killed, or the machine went down.
        return Seen(sweep.entry(entry.job.name), "interrupted", own.worker, "its worker is gone")
    return own


def counted(seen: list[Seen]) -> str:
    """How many jobs there are of each status, in words."""
    counts = Counter(each.status for each in seen)
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def cancel(folder: str | Path) -> list[Seen]:
    """Stop all jobs that are not finished, running ones after their checkpoint; `launch` continues them."""
    sweep = Sweep(folder_of(Path(folder)))
    write_text(sweep.folder / CANCEL, "written by sampled-sae sweep cancel; the next launch removes it\n")
    ids, seen = slurm.read_ids(sweep), look(sweep)
    names = [each.entry.job.name for each in seen if each.status in ("pending", "queued", "running", "interrupted")]
    slurm.cancel([ids[name] for name in names if name in ids])
    for name in names:
        if not sweep.is_held(name) and sweep.entry(name).state.status != "finished":
            with sweep.locked(name):
                sweep.update(name, status="cancelled", error=None)
    return look(sweep)
