"""The folder of a training: what is recorded there, and how a training goes on from it.

train.json         settings, SAEs and the origin of the activations: all that `sampled-sae resume` needs
run.json           of each run, its configuration and whether it is finished
.torchrun          while it is not finished, the job of torchrun that began it
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from sampled_sae.config import Config, NotEmpty, first_difference, read_file, write_file
from sampled_sae.data.model_source import ModelOrigin
from sampled_sae.data.source import FileOrigin
from sampled_sae.data.stream import ActivationSource
from sampled_sae.formats.saelens import FILES
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.scores import get_score
from sampled_sae.training.settings import TrainConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, make_folder, remove_leftovers, write_text, writing
from sampled_sae.utils.ranks import Ranks
from sampled_sae.utils.system import git_commit, versions

# ---- run.json ----------------------------------------------------------------------------------------

HOW = "resume (--resume, in Python resume=True)"


def holds_run(out: Path) -> UserError:
    """The error for a folder with a run that is not to be resumed."""
    return UserError(f"out = {str(out)!r}: holds a run already; {HOW} to continue it, or choose another folder")


def read_run(out: Path, resume: bool, ranks: Ranks) -> dict[str, Any] | None:
    """The record of the run in `out`, None if there is none yet; an error if it is not to be resumed.

    Removes what a killed run left half written.
    """
    if ranks.first:
        for folder, name in ((out, "run.json"), (out, "log.jsonl"), (out / "saes", "*")):
            remove_leftovers(folder, name)
    ranks.all.barrier()
    record = out / "run.json"
    if not record.exists():
        if (out / "checkpoints").exists():
            raise UserError(f"out = {str(out)!r}: holds checkpoints of another run; choose another folder")
        return None
    if not resume:
        raise holds_run(out)
    content = read_file(record, "run")
    if not isinstance(content.get("config"), dict):
        raise UserError(f"{record}: not the record of a training run; choose another folder")
    return content


def is_extended(content: Mapping[str, Any], shared: TrainConfig) -> bool:
    """Whether the record is that of a finished run, which a training with these settings extends."""
    return content.get("finished") is True and shared.extends > 0 and _steps(content) == shared.extends


def _steps(content: Mapping[str, Any]) -> Any:
    config = content.get("config")
    train = config.get("train") if isinstance(config, dict) else None
    return train.get("steps") if isinstance(train, dict) else None


def check_same(
    out: Path, content: Mapping[str, Any], description: Mapping[str, Any], source: Mapping[str, Any], extending: bool
) -> None:
    """Raise if the record is of another configuration or of other activations; an extension has more steps."""
    recorded, record = content["config"], out / "run.json"
    if extending:
        length = {name: description["train"][name] for name in ("steps", "extends")}
        recorded = {**recorded, "train": {**recorded["train"], **length}}
    if difference := first_difference(recorded, description):
        raise UserError(f"{record}: the run there has another configuration: {difference}")
    if difference := first_difference(content.get("source") or source, source):
        raise UserError(f"{record}: the run there is on other activations: {difference}")


def write_run(
    out: Path, methods: Mapping[str, str], description: Mapping[str, Any], source: Mapping[str, Any], finished: bool
) -> None:
    """Write the record; `methods` are those of the SAEs by name, for its readers."""
    origin = {"source": source, "versions": versions(), "git_commit": git_commit()}
    write_file(out / "run.json", "run", {"methods": methods, "config": description, **origin, "finished": finished})


# ---- train.json --------------------------------------------------------------------------------------

RECORD = "train.json"


@dataclass(frozen=True, slots=True)
class Record(Config):
    """Everything that `sampled-sae resume` needs."""

    train: TrainConfig
    saes: Annotated[tuple[SAEConfig, ...], NotEmpty]
    dtype: Literal["float32", "float64", "bfloat16", "float16"]
    device: str
    folder: str
    """Working directory in which the training began; relative paths are meant from there."""
    file: FileOrigin | None = None
    model: ModelOrigin | None = None
    """Origin of the activations; both are None if they were given in memory."""


def begun(out: Path) -> list[Path]:
    """The run.json of each run in the folder."""
    return [record for pattern in ("", "*/", "*/*/") for record in sorted(out.glob(f"{pattern}run.json"))]


def recorded_source(out: Path) -> Mapping[str, Any]:
    """The identity of the activations that the run in `out` began with; empty if there is no run."""
    found = next((read_file(record, "run").get("source") for record in begun(out)), None)
    return found if isinstance(found, dict) else {}


def keep_record(
    out: Path,
    source: ActivationSource,
    configs: Sequence[SAEConfig],
    shared: TrainConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Write train.json for a training that is about to begin; that of one that has begun stays."""
    remove_leftovers(make_folder(out), RECORD)
    if begun(out):
        return
    kind: Any = str(dtype).removeprefix("torch.")
    record = Record(shared, tuple(configs), kind, device.type, str(Path.cwd()))
    origin = source.origin
    if isinstance(origin, FileOrigin):
        record = replace(record, file=origin)
    elif isinstance(origin, ModelOrigin):
        record = replace(record, model=origin)
    write_file(out / RECORD, "train", record.to_dict())


def read_record(out: Path) -> Record:
    """The record of the training in `out`."""
    if not (out / RECORD).exists():
        why = f"holds no {RECORD}; it is written when a training begins"
        raise UserError(f"folder = {str(out)!r}: {why}. Of an older run, repeat its command with --resume")
    return Record.from_dict(read_file(out / RECORD, "train"), out / RECORD)


def check_replaceable(run: Path, names: Sequence[str]) -> None:
    """Raise if a saved SAE of a run that is to be extended has results in its folder: they are of the SAE as it is."""
    for folder in (run / "saes" / name for name in names):
        others = sorted({path.name for path in folder.iterdir()} - FILES) if folder.is_dir() else []
        if others:
            why = f"holds {', '.join(others)} of the SAE before the extension, which replaces it"
            raise UserError(f"extend: {folder} {why}; move them away first")


def extend_record(out: Path, steps: int) -> Record:
    """Add `steps` steps to a finished training, in its train.json."""
    record = read_record(out)
    if any(config.jumprelu is not None for config in record.saes):
        raise UserError("extend: JumpReLU SAEs cannot be extended: their thresholds are saved in another form")
    for score in (config.pool.score for config in record.saes if config.pool.restricts):
        if get_score(score).takes & {"state"}:
            raise UserError(f"extend: pools of the score {score!r} cannot be extended: its state is not saved")
    runs = [read_file(path, "run") for path in begun(out)]
    whole = [run.get("finished") is True and _steps(run) == record.train.steps for run in runs]
    if not runs or not all(whole):
        raise UserError(f"extend = {steps}: the training in {out} is not finished; resume it first, without extend")
    for path in begun(out):
        check_replaceable(path.parent, [str(config.name) for config in record.saes])
    longer = replace(record.train, steps=record.train.steps + steps, extends=record.train.steps)
    record = replace(record, train=longer)
    with alone_in(out):
        write_file(out / RECORD, "train", record.to_dict())
    return record


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Relative paths mean those in the folder, if it still exists."""
    before = Path.cwd()
    if os.path.isdir(folder):  # noqa: PTH112 (false, not an error, for a name that no file system takes)
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# ---- restarts by torchrun (--max-restarts): a training goes on without being asked to resume ----------

RESTARTS = ".torchrun"
"""In the folder of a training that is not finished: the job of torchrun that began it."""


def _job() -> str | None:
    """What tells this job of torchrun from others; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None or os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return name  # on several machines, the user has given it
    return f"{name} {socket.gethostname()}:{os.getppid()}"


def resumes(out: Path, resume: bool) -> bool:
    """Whether the training in `out` is to be resumed: on request, or after a restart of the job that began it.

    A job that finds the training of an earlier one, and was not asked to resume it, does not do so at its restarts
    either.
    """
    if resume or _job() is None:
        return resume
    file = out / RESTARTS
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        with writing(file):
            file.unlink(missing_ok=True)
        return False
    return file.exists() and file.read_text(encoding="utf-8") == _job()


def note_begun(out: Path) -> None:
    """Note that this job has begun the training in `out`, or gone on with it."""
    if (name := _job()) is not None:
        write_text(out / RESTARTS, name)


def note_ended(out: Path) -> None:
    """Remove the note when the training is finished."""
    with writing(out / RESTARTS):
        (out / RESTARTS).unlink(missing_ok=True)
