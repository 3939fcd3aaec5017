"""The record of a run in its folder: run.json, with its configuration and whether it is finished."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sampled_sae.config import first_difference, read_file, write_file
from sampled_sae.training.settings import TrainConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import remove_leftovers
from sampled_sae.utils.ranks import Ranks
from sampled_sae.utils.system import git_commit, versions

HOW = "resume (--resume, in Python resume=True)"


def holds_run(out: Path) -> UserError:
    """The error for a folder with a run that is not to be resumed."""
    return UserError(f"out = {str(out)!r}: holds a run already; {HOW} to continue it, or choose another folder")


def read(out: Path, resume: bool, ranks: Ranks) -> dict[str, Any] | None:
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
    train = content["config"].get("train")
    before = train.get("steps") if isinstance(train, dict) else None
    return content.get("finished") is True and shared.extends > 0 and before == shared.extends


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


def write(out: Path, description: Mapping[str, Any], source: Mapping[str, Any], finished: bool) -> None:
    """Write the record."""
    origin = {"source": source, "versions": versions(), "git_commit": git_commit()}
    write_file(out / "run.json", "run", {"config": description, **origin, "finished": finished})
