"""Continue a training from its folder alone: its settings, SAEs and the origin of its activations are in train.json."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from sampled_sae.config import Config, NotEmpty, Positive, read_file, require, write_file
from sampled_sae.data.harvest import ModelOrigin
from sampled_sae.data.source import FileOrigin
from sampled_sae.data.stream import ActivationSource
from sampled_sae.method.config import SAEConfig
from sampled_sae.training.settings import TrainConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, make_folder, remove_leftovers
from sampled_sae.utils.ranks import join

FILE = "train.json"


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


def keep_record(
    out: Path,
    source: ActivationSource,
    configs: Sequence[SAEConfig],
    shared: TrainConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Write train.json for a training that is about to begin; that of one that has begun stays."""
    remove_leftovers(make_folder(out), FILE)
    if begun(out):
        return
    kind: Any = str(dtype).removeprefix("torch.")
    record = Record(shared, tuple(configs), kind, device.type, str(Path.cwd()))
    origin = source.origin
    if isinstance(origin, FileOrigin):
        record = replace(record, file=origin)
    elif isinstance(origin, ModelOrigin):
        record = replace(record, model=origin)
    write_file(out / FILE, "train", record.to_dict())


def read_record(out: Path) -> Record:
    """The record of the training in `out`."""
    if not (out / FILE).exists():
        why = f"holds no {FILE}; it is written when a training begins"
        raise UserError(f"folder = {str(out)!r}: {why}. Of an older run, repeat its command with --resume")
    return Record.from_dict(read_file(out / FILE, "train"), out / FILE)


def extend_record(out: Path, steps: int) -> Record:
    """Add `steps` steps to a finished training, in its train.json."""
    record = read_record(out)
    if any(config.jumprelu is not None for config in record.saes):
        raise UserError("extend: JumpReLU SAEs cannot be extended: their thresholds are saved in another form")
    runs = [read_file(path, "run") for path in begun(out)]
    whole = [run.get("finished") is True and _steps(run) == record.train.steps for run in runs]
    if not runs or not all(whole):
        raise UserError(f"extend = {steps}: the training in {out} is not finished; resume it first, without extend")
    longer = replace(record.train, steps=record.train.steps + steps, extends=record.train.steps)
    record = replace(record, train=longer)
    with alone_in(out):
        write_file(out / FILE, "train", record.to_dict())
    return record


def _steps(run: dict[str, Any]) -> Any:
    config = run.get("config")
    train = config.get("train") if isinstance(config, dict) else None
    return train.get("steps") if isinstance(train, dict) else None


def resume_training(out: Path, train: Callable[..., Any], extend: Positive | None = None, device: Any = None) -> Any:
    """Call `train(source, configs, shared, device, dtype)` for the training in `out`, extended by so many steps."""
    require(extend is None or extend >= 1, "extend", extend, "must be at least 1")
    ranks = join(device or read_record(out).device)
    with ranks.all.together():
        if extend is not None and ranks.first:
            extend_record(out, extend)
    record, place = read_record(out), device or str(ranks.device)
    with inside(Path(record.folder)):
        origin = record.file or record.model
        if origin is None:
            why = "its activations were given in memory; call ss.train with the same ones and resume=True"
            raise UserError(f"folder = {str(out)!r}: {why}")
        source = origin.reopen(place)
        return train(source, list(record.saes), record.train, place, getattr(torch, record.dtype))


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
