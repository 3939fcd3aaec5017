"""The jobs of a sweep, and its folder: its spec, and one file per job with the job's settings and how far it is.

SAEs that can share a stream of activations are trained by one job, or read the same cache.

sweep.json              the spec, the names of the jobs, the working directory of the first launch
slurm.json              ids of the jobs in Slurm
jobs/NAME/job.json      settings and state of a job; while it runs, its worker holds jobs/NAME/.lock
jobs/NAME/log.txt       output of the job's worker
jobs/NAME/train/        the training: run.json, log.jsonl, saes
caches/NAME/            activations that several jobs read
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from sampled_sae.config import Config, Count, first_difference, read_file, require, write_file
from sampled_sae.data.cache_index import Part
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.presets import named
from sampled_sae.sweeps.spec import EXTENSIONS, ModelDtype, SweepConfig
from sampled_sae.training.folder import inside
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, check_writable, make_folder, remove_leftovers
from sampled_sae.utils.measures import unique

FILE = "sweep.json"
CANCEL = "cancel"
CACHES = "caches"  # folder of a sweep
WAIT = 60.0  # seconds to wait for a job's lock: `status` takes it for a moment, and a stopped worker may still write
T = TypeVar("T")
Status = Literal["pending", "running", "interrupted", "finished", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Job(Config):
    """SAEs that are trained on one source of activations, and evaluated after; or a part of a cache that is written.
    The rest is the sweep's."""

    name: str
    """Folder of the job."""
    saes: tuple[SAEConfig, ...]
    """None of a job that writes a cache."""
    model: str | None = None
    dtype: ModelDtype | None = None
    hooks: tuple[int | str, ...] = ()
    activations: str | None = None
    """A file or a cache, instead of a model."""
    cache: str | None = None
    """Folder below the sweep's, of the cache that the job reads or writes."""
    part: Part | None = None
    """What it writes of the cache."""
    needs: tuple[str, ...] = ()
    """Jobs that must be finished before."""

    def check(self) -> None:
        right = "must be SAEs to train, or none and a part of a cache to write"
        require(bool(self.saes) != (self.part is not None), "saes", len(self.saes), right)
        require(self.part is None or self.cache is not None, "cache", self.cache, "must be a folder")
        inside = self.cache is None or (Path(self.cache).parts[:1] == (CACHES,) and ".." not in Path(self.cache).parts)
        require(inside, "cache", self.cache, f"must be below {CACHES}/")


def jobs_of(spec: SweepConfig) -> list[Job]:
    """The jobs of a sweep, in the order of the spec; the same spec gives the same jobs."""
    saes = named(spec.saes(), spec.data_seed)
    taken: set[str] = set()
    jobs = []
    for title, place in _places(spec):
        if spec.cache is not None:
            writers = _writers(title, place, spec.cache.parts, taken)
            jobs += writers
            place = {**place, "cache": writers[0].cache, "needs": tuple(job.name for job in writers)}
        parts = _parts(saes, spec.saes_per_job or len(saes))
        for number, group in enumerate(parts, start=1):
            name = unique(title if len(parts) == 1 else f"{title}-part-{number}", taken)
            jobs.append(Job(name, tuple(group), **place))
    return jobs


def planned(spec: SweepConfig, folder: Path) -> list[Job]:
    """The jobs that a launch in `folder` would have. A folder that cannot be used is an error; nothing is written."""
    check_writable(folder)
    if (folder / FILE).exists():
        Sweep(folder).check_spec(spec)
    return jobs_of(spec)


def _writers(title: str, place: dict[str, Any], parts: int, taken: set[str]) -> list[Job]:
    """The jobs that write the cache of a hook point."""
    names = [unique(f"{title}-cache" if parts == 1 else f"{title}-cache-{n + 1}", taken) for n in range(parts)]
    folder = f"{CACHES}/{names[0]}"
    return [Job(name, (), **place, cache=folder, part=Part(n + 1, parts)) for n, name in enumerate(names)]


def _places(spec: SweepConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where the activations of each job come from: a title, and fields of `Job`."""
    for path in spec.activations:
        yield _slug(Path(path).stem), {"activations": path}
    for model in spec.listed_models():
        hooks: tuple[int | str, ...] = (*(model.layers or ()), *(model.hooks or ()))
        for group in _parts(hooks, spec.hooks_per_job):
            words = [f"layer-{hook}" if isinstance(hook, int) else _slug(hook) for hook in group]
            ends = words if len(words) == 1 else [words[0], "to", words[-1]]
            title = "-".join([_slug(model.name.rstrip("/").rpartition("/")[2]), *ends])
            yield title, {"model": model.name, "dtype": model.dtype, "hooks": tuple(group)}


def _parts(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def _slug(text: str) -> str:
    """A name that every file system takes."""
    return re.sub(r"[^\w.-]+", "_", text).strip("._")[:80] or "activations"


@dataclass(frozen=True, slots=True)
class State(Config):
    """How far a job is."""

    status: Status = "pending"
    step: Count = 0
    """Steps of the training so far."""
    trained: bool = False
    """Whether all SAEs are saved, so that only evaluations are left."""
    attempts: Count = 0
    """Times that a worker began the job."""
    seconds: float = 0.0
    """Time that workers spent on it, in all attempts."""
    worker: str | None = None
    """Where the last worker runs or ran: host, process, GPU or the id in Slurm."""
    error: str | None = None
    """The last line of what went wrong."""


class Entry(NamedTuple):
    """One job and how far it is."""

    job: Job
    state: State


class Sweep:
    """A sweep that was started in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        if not (self.folder / FILE).exists():
            raise UserError(f"{str(folder)!r}: holds no sweep ({FILE}); sampled-sae sweep SPEC.yaml starts one")
        content = read_file(self.folder / FILE, "sweep")
        cwd, names = content.get("cwd"), content.get("jobs")
        if not isinstance(cwd, str) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise UserError(f"{self.folder / FILE}: is no record of a sweep; choose another folder")
        self.cwd, self.names = cwd, list(map(str, names))
        with inside(Path(cwd)):  # the spec may name Python files
            self.spec = SweepConfig.from_dict(content.get("spec"), self.folder / FILE)

    @classmethod
    def start(cls, folder: Path, spec: SweepConfig) -> Sweep:
        """Start a sweep, or continue the one in the folder, which must have the same spec. Needs the folder's lock."""
        record = folder / FILE
        remove_leftovers(make_folder(folder), FILE)
        jobs = jobs_of(spec)
        cwd = str(Path.cwd())
        if record.exists():
            before = cls(folder)
            before.check_spec(spec)
            cwd = before.cwd
        for job in jobs:
            path = folder / "jobs" / job.name / "job.json"
            if not path.exists():
                make_folder(path.parent)
                _write(path, Entry(job, State()))
        # Last, so that a folder with this file is complete.
        write_file(record, "sweep", {"spec": spec.to_dict(), "cwd": cwd, "jobs": [job.name for job in jobs]})
        return cls(folder)

    def check_spec(self, spec: SweepConfig) -> None:
        """Refuse a spec other than the one that the sweep was started with."""
        if difference := first_difference(self.spec.decisive(), spec.decisive()):
            record = self.folder / FILE
            raise UserError(f"{record}: the sweep there has another spec: {difference}; choose another folder")

    def path(self, name: str) -> Path:
        """The folder of a job."""
        return self.folder / "jobs" / name

    def entry(self, name: str) -> Entry:
        """A job and how far it is."""
        path = self.path(name) / "job.json"
        content = read_file(path, "sweep_job")
        return Entry(Job.from_dict(content.get("job"), path), State.from_dict(content.get("state"), path))

    def open_needs(self, name: str) -> list[str]:
        """The jobs that must be finished before a job, and are not."""
        return [need for need in self.entry(name).job.needs if self.entry(need).state.status != "finished"]

    def update(self, name: str, **changes: Any) -> State:
        """Change the state of a job; only who holds its lock may do so."""
        job, state = self.entry(name)
        state = replace(state, **changes)
        _write(self.path(name) / "job.json", Entry(job, state))
        return state

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the lock of a job; a one-line error if another process does."""
        with alone_in(self.path(name), WAIT):
            remove_leftovers(self.path(name), "job.json")
            yield

    def is_held(self, name: str) -> bool:
        """Whether a worker is at work on a job."""
        try:
            with alone_in(self.path(name)):
                return False
        except UserError:
            return True

    @property
    def is_cancelled(self) -> bool:
        return (self.folder / CANCEL).exists()


def _write(path: Path, entry: Entry) -> None:
    write_file(path, "sweep_job", {"job": entry.job.to_dict(), "state": entry.state.to_dict()})


def folder_of(path: Path) -> Path:
    """The folder of a sweep from itself or from its spec, next to which it is by default."""
    return path.with_suffix("") if path.suffix in EXTENSIONS else path
