"""A sweep -> its jobs: SAEs that can share a stream of activations are trained together, or read the same cache."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sampled_sae.config import Config, require
from sampled_sae.data.cache_index import Part
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.presets import named
from sampled_sae.sweeps.spec import ModelDtype, SweepConfig

T = TypeVar("T")
CACHES = "caches"  # folder of a sweep


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
            name = _unique(title if len(parts) == 1 else f"{title}-part-{number}", taken)
            jobs.append(Job(name, tuple(group), **place))
    return jobs


def _writers(title: str, place: dict[str, Any], parts: int, taken: set[str]) -> list[Job]:
    """The jobs that write the cache of a hook point."""
    names = [_unique(f"{title}-cache" if parts == 1 else f"{title}-cache-{n + 1}", taken) for n in range(parts)]
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


def _unique(name: str, taken: set[str]) -> str:
    found, count = name, 2
    while found in taken:
        found, count = f"{name}-{count}", count + 1
    taken.add(found)
    return found
