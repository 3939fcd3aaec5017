"""`sampled-sae sweep`: from a declarative file to many jobs, on this machine or on a cluster; `status` and `cancel`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro

from sampled_sae.sweeps.spec import EXTENSIONS, SlurmConfig, read_spec
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.progress import clock


@dataclass(frozen=True)
class Sweep:
    """Train and evaluate SAEs as described in a file; see `sweep status FOLDER` and `sweep cancel FOLDER`.

    Run the same command again to continue an interrupted sweep; finished jobs are skipped.
    """

    spec: tyro.conf.Positional[Path]
    """A YAML or JSON file: models, layers, text, methods, d_sae, k, seeds, tokens, evaluations (docs/sweeps.md)."""
    out: Path | None = None
    """Folder of the sweep. Default: the path of the spec without its extension."""
    launcher: Literal["local", "slurm"] = "local"
    """local: the GPUs of this machine, or its CPU; slurm: job arrays on a cluster."""
    workers: int | None = None
    """Worker processes of the local launcher. Default: one per GPU, or one without a GPU."""
    device: Literal["cuda", "cpu"] | None = None
    """Device of the local launcher. Default: the GPUs, if there are any."""
    gpus_per_job: int = 1
    """GPUs (on a CPU: processes) that train a job together under torchrun, with the local launcher."""
    retry_failed: bool = False
    """Run failed jobs again, from their last checkpoint."""
    dry_run: bool = False
    """Print the jobs without running them."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    EXAMPLES: ClassVar[Sequence[str]] = (
        "pythia.yaml --dry-run",
        "pythia.yaml --workers 2",
        "pythia.yaml --launcher slurm --slurm.partition gpu",
    )

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Sweep:
        """The values of flags that are not given: those of the spec for Slurm."""
        given = next((Path(word) for word in arguments if not word.startswith("-") and Path(word).is_file()), None)
        readable = given is not None and given.suffix in EXTENSIONS
        return cls(tyro.MISSING, slurm=read_spec(given).slurm if given is not None and readable else SlurmConfig())

    def run(self) -> None:
        from sampled_sae.sweeps import counted, folder_of, launch, planned

        spec = replace(read_spec(self.spec), slurm=self.slurm)
        if self.launcher == "slurm" and (self.workers is not None or self.device is not None or self.gpus_per_job != 1):
            names = "--workers, --device and --gpus-per-job"
            raise UserError(f"{names} are not used with --launcher slurm: set --slurm.gpus-per-job")
        out = self.out or folder_of(self.spec)
        if self.dry_run:
            for job in planned(spec, out):
                what = ", ".join(str(sae.name) for sae in job.saes) or f"part {job.part} of {job.cache}"
                print(f"{job.name}: {what}")
            return
        place: dict[str, Any] = {"workers": self.workers, "device": self.device, "gpus_per_job": self.gpus_per_job}
        seen = launch(spec, out, self.launcher, retry_failed=self.retry_failed, **place)
        print(f"{out}: {counted(seen)}")
        failed = [each for each in seen if each.status == "failed"]
        for each in failed:
            print(f"{each.entry.job.name}: {each.error}", file=sys.stderr)
        if failed and self.launcher == "local":
            raise UserError(f"{len(failed)} of {len(seen)} jobs failed; --retry-failed runs them again")


@dataclass(frozen=True)
class Status:
    """Show the progress of each job of a sweep, and the last error line of failed jobs."""

    folder: tyro.conf.Positional[Path]
    """Folder of the sweep, or its spec."""
    watch: bool = False
    """Refresh the table until all jobs have ended."""
    every: float = 2.0
    """Seconds between refreshes with --watch."""

    EXAMPLES: ClassVar[Sequence[str]] = ("pythia.yaml", "pythia --watch", "pythia --watch --every 30")

    def run(self) -> None:
        from sampled_sae.reporting.tables import console_of
        from sampled_sae.sweeps import counted, look

        console, seen = console_of(200), look(self.folder)
        if self.watch:
            from rich.live import Live

            with Live(drawn(seen), console=console, auto_refresh=False, transient=True) as live:
                while any(each.status in ("queued", "running") for each in seen):
                    time.sleep(max(0.1, self.every))
                    seen = look(self.folder)
                    live.update(drawn(seen), refresh=True)
        console.print(drawn(seen))
        print(counted(seen))


@dataclass(frozen=True)
class Cancel:
    """Stop the jobs of a sweep; running jobs write a checkpoint first, and `sampled-sae sweep` continues them."""

    folder: tyro.conf.Positional[Path]
    """Folder of the sweep, or its spec."""

    EXAMPLES: ClassVar[Sequence[str]] = ("pythia.yaml", "pythia", "/shared/sweeps/pythia")

    def run(self) -> None:
        from sampled_sae.sweeps import cancel, counted

        print(counted(cancel(self.folder)))


STYLES = {"finished": "green", "failed": "bold red", "running": "cyan", "cancelled": "yellow", "interrupted": "yellow"}


def drawn(seen: Sequence[Any]) -> Any:
    """The jobs as a table for the terminal."""
    from rich.table import Table

    from sampled_sae.reporting.tables import safe

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("job", "status", "SAEs", "step", "time", "tries", "worker", "error"):
        table.add_column(title, justify="right" if title in ("SAEs", "step", "time", "tries") else "left")
    for each in seen:
        job, state = each.entry
        what = "evaluating" if each.status == "running" and state.trained else each.status
        numbers = (
            len(job.saes),
            f"{state.step:,}/{each.steps:,}" if job.saes else "",
            clock(state.seconds),
            state.attempts,
        )
        cells = (job.name, safe(what, STYLES.get(each.status, "")), *map(str, numbers), each.worker, each.error)
        table.add_row(*(cell if not isinstance(cell, str) else safe(cell) for cell in cells))
    return table
