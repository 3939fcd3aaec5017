"""Run jobs on a Slurm cluster: arrays submitted through submitit, states from `scontrol`, which needs no accounting."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sampled_sae.config import read_file, write_file
from sampled_sae.sweeps.spec import SlurmConfig
from sampled_sae.sweeps.store import Sweep
from sampled_sae.sweeps.worker import work
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.progress import say
from sampled_sae.utils.third_party import package, reason

RECORD = "slurm.json"
ENDED = ("failed", "cancelled")
ARRAY = 1000  # jobs of one array; Slurm's default limit is 1001
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ACTIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
IGNORING = """sh -c 'trap "" TERM USR2; exec "$@"' sh"""
"""Starts a program that ignores the signals until it handles them: one that comes while Python starts would end it."""


class Task:
    """One job as submitit runs it on a node."""

    ranks = 1  # of jobs that an earlier version submitted

    def __init__(self, folder: str, name: str, max_requeues: int, ranks: int = 1):
        self.folder, self.name, self.max_requeues, self.ranks = folder, name, max_requeues, ranks

    def __call__(self) -> None:
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        ids = [os.environ.get("SLURM_ARRAY_JOB_ID"), task] if task else [os.environ.get("SLURM_JOB_ID")]
        number = "_".join(filter(None, ids))
        if self._lacks_a_need():
            sys.exit(1)
        try:
            work(Path(self.folder), self.name, where=f"Slurm job {number}", ranks=self.ranks)
        except Interrupted as stop:
            print(f"stopped: {stop}", file=sys.stderr)
            self._requeue(number)
            sys.exit(1)  # what Slurm does with the job was decided before

    def _lacks_a_need(self) -> bool:
        """Whether a job that this one waited for has ended unfinished; this one is cancelled then."""
        sweep = Sweep(Path(self.folder))
        open_needs = sweep.open_needs(self.name)
        if open_needs:
            error = f"not started, because {open_needs[0]} is not finished"
            print(error, file=sys.stderr)
            _give_up(sweep, self.name, error)
        return bool(open_needs)

    def _requeue(self, number: str) -> None:
        """Put the job back into the queue, unless it was cancelled: Slurm would also requeue a cancelled one."""
        sweep = Sweep(Path(self.folder))
        state = states([number]).get(number)
        if sweep.is_cancelled or (state is not None and state.name == "CANCELLED"):
            with sweep.locked(self.name):
                sweep.update(self.name, status="cancelled")
        elif int(os.environ.get("SLURM_RESTART_COUNT", 0)) >= self.max_requeues:
            with sweep.locked(self.name):
                error = f"was requeued {self.max_requeues} times, as often as max_requeues allows"
                sweep.update(self.name, status="failed", error=error)
        else:
            print(f"requeued as Slurm job {number}", file=sys.stderr, flush=True)
            subprocess.run(["scontrol", "requeue", number], timeout=60, check=False)

    def checkpoint(self) -> Any:
        """For a signal before `work` has its own handlers: submitit requeues the same task."""
        return package("submitit").helpers.DelayedSubmission(self)


def submit(sweep: Sweep, names: Sequence[str], config: SlurmConfig) -> list[str]:
    """Submit these jobs; returns their ids in Slurm. Jobs that need one that has failed are left out."""
    submitit = package("submitit", "launcher = 'slurm'", "cluster")
    require_slurm()
    ids: list[str] = []
    for needs, part in _arrays(sweep, names):
        executor = submitit.SlurmExecutor(
            sweep.folder / "slurm", python=f"{IGNORING} {shlex.quote(sys.executable)}", max_num_timeout=10**6
        )
        known = read_ids(sweep)
        try:
            executor.update_parameters(**_parameters(config, sweep.folder.name, [known[need] for need in needs]))
            tasks = [Task(str(sweep.folder), name, config.max_requeues, config.gpus_per_job) for name in part]
            submitted = executor.submit_array(tasks)
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            raise UserError(f"launcher = 'slurm': sbatch refused the jobs ({_sbatch_reason(error)})") from None
        ids += [job.job_id for job in submitted]
        record = known | dict(zip(part, (job.job_id for job in submitted), strict=True))
        write_file(sweep.folder / RECORD, "sweep_slurm", {"ids": record})
    return ids


def _arrays(sweep: Sweep, names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Sequence[str]]]:
    """Jobs that are submitted together, with what they all wait for: those that wait for nothing first."""
    groups: dict[tuple[str, ...], list[str]] = {(): []}
    for name in names:
        groups.setdefault(tuple(sweep.open_needs(name)), []).append(name)
    for needs, group in groups.items():
        lost = [need for need in needs if need not in names and sweep.entry(need).state.status in ENDED]
        if lost:
            error = f"not submitted, because {lost[0]} is {sweep.entry(lost[0]).state.status}"
            say(f"{', '.join(group)}: {error}")
            for name in group:
                _give_up(sweep, name, error)
            continue
        for at in range(0, len(group), ARRAY):
            yield needs, group[at : at + ARRAY]


def _give_up(sweep: Sweep, name: str, error: str) -> None:
    with sweep.locked(name):
        sweep.update(name, status="cancelled", error=error)


def _sbatch_reason(error: Exception) -> str:
    """The first error of sbatch in submitit's message."""
    found = re.search(r"sbatch: error: (.*)", str(error))
    return found[1].strip() if found else reason(error)


def require_slurm() -> None:
    for program in ("sbatch", "srun", "scontrol"):
        if shutil.which(program) is None:
            why = "is missing; run this on a machine of the cluster, or use --launcher local"
            raise UserError(f"launcher = 'slurm': {program} {why}")


def _parameters(config: SlurmConfig, name: str, needs: Sequence[str]) -> dict[str, Any]:
    """The settings as submitit names them, for jobs that begin after those with the ids `needs` have ended."""
    # Not afterok: a signal that comes when a job is finished, while its process ends, makes it a failed one for Slurm.
    # A requeued job has not ended.
    waiting = {"dependency": ":".join(["afterany", *needs])} if needs else {}
    given = {
        "job_name": f"sweep-{name}",
        "partition": config.partition,
        "time": config.minutes,
        "gpus_per_node": config.gpus_per_job or None,
        "cpus_per_task": config.cpus_per_job,
        "mem": config.memory_gb and f"{config.memory_gb}GB",
        "array_parallelism": config.jobs_at_once,
        "signal_delay_s": config.seconds_to_stop,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "setup": list(config.setup) or None,
        # Without it, a cluster whose default is no requeue refuses.
        "additional_parameters": {"requeue": True, **waiting, **config.extra},
    }
    return {name: value for name, value in given.items() if value is not None}


def read_ids(sweep: Sweep) -> dict[str, str]:
    """Ids in Slurm of the jobs that were submitted, by their names."""
    path = sweep.folder / RECORD
    found = read_file(path, "sweep_slurm").get("ids") if path.exists() else {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise UserError(f"{path}: must hold ids by name; sampled-sae sweep wrote it otherwise")
    return found


# ---- what Slurm knows -------------------------------------------------------------------------------


class SlurmState(NamedTuple):
    """What Slurm says of a job."""

    name: str  # PENDING, RUNNING, COMPLETED, CANCELLED, TIMEOUT and so on
    reason: str = ""

    @property
    def is_waiting(self) -> bool:
        return self.name in WAITING

    @property
    def is_active(self) -> bool:
        return self.name in ACTIVE


def states(ids: Iterable[str]) -> dict[str, SlurmState]:
    """States by id, of the jobs that Slurm still knows: it forgets ended ones after some minutes.

    UserError if the cluster does not answer.
    """
    found: dict[str, SlurmState] = {}
    for job in sorted({number.partition("_")[0] for number in ids}):
        try:
            told = subprocess.run(
                ["scontrol", "show", "job", "-o", job], capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(f"scontrol: does not answer ({reason(error)})") from None
        if told.returncode and "Invalid job id" not in told.stderr:
            raise UserError(f"scontrol: does not answer ({' '.join(told.stderr.split())[:200]})")
        for line in told.stdout.splitlines():
            found |= dict(parsed(line))
    return found


def parsed(line: str) -> Iterator[tuple[str, SlurmState]]:
    """A line of `scontrol show job -o` -> ids and their state; one line may stand for many pending jobs of an array."""
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    state = SlurmState(fields.get("JobState", "UNKNOWN"), fields.get("Reason", ""))
    array = fields.get("ArrayJobId")
    if array is None:
        yield fields.get("JobId", ""), state
        return
    for part in fields.get("ArrayTaskId", "").partition("%")[0].split(","):
        if part:
            first, _, last = part.partition("-")
            yield from ((f"{array}_{n}", state) for n in range(int(first), int(last or first) + 1))


def cancel(ids: Sequence[str]) -> None:
    """Cancel these jobs."""
    if ids:
        require_slurm()
        subprocess.run(["scancel", *ids], check=False, timeout=60)


def error_line(sweep: Sweep, number: str) -> str:
    """The last line that a job wrote to its errors."""
    path = sweep.folder / "slurm" / f"{number}_0_log.err"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:300]
