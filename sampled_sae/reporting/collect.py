"""Runs, SAEs, results and comparisons in some folders; what is missing or damaged is noted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sampled_sae.config import read_file
from sampled_sae.evals import registry
from sampled_sae.formats import describe, is_sae, sae_of
from sampled_sae.formats.saelens import saelens_config
from sampled_sae.method.config import usable_as_folder
from sampled_sae.training.learner import FINAL_METRICS
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import parse_json, read_json
from sampled_sae.utils.measures import Metric

OWN, FOREIGN = "sampled_sae.json", "cfg.json"
SYNTHETIC = "results.json"
BROWSER = "browser.json"  # beside the page of a feature browser: the SAE that it shows


class Kind(NamedTuple):
    """The numbers of one evaluation, or of training."""

    name: str  # as in the file name SAE/evals/NAME.json; training's are in the SAE's settings
    title: str
    metrics: tuple[Metric, ...]


TRAINING = "training"


def kinds() -> list[Kind]:
    """All registered evaluations in the order of the page, then training."""
    found = [Kind(name, evaluation.title, evaluation.metrics) for name, evaluation in registry().items()]
    return [*found, Kind(TRAINING, "Training", FINAL_METRICS)]


@dataclass(frozen=True)
class Run:
    """The record of a training."""

    folder: Path
    record: dict[str, Any]  # run.json; empty where there is none
    log: Log  # the lines of log.jsonl by SAE
    log_note: str  # what is missing in the log; empty for nothing


@dataclass(frozen=True)
class Saved:
    """One SAE: what is known about it without reading its weights."""

    folder: Path
    name: str
    config: dict[str, Any] | None  # its settings, as in its file or in its run's; none for an SAE of another trainer
    metadata: dict[str, Any]  # where it comes from: model, layer, text, training
    width: int | None
    latents: int | None
    results: dict[str, dict[str, Any]]  # what each evaluation left, whole files by the evaluation's name
    run: Run | None
    finished: bool  # whether it was saved; if not, only its training is known


@dataclass
class Found:
    """Everything that some folders hold."""

    saes: list[Saved] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    comparisons: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)  # whole compare.json files
    synthetic: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    """Whole results.json files of the synthetic experiment; its SAEs are not among the others."""
    browsers: dict[Path, Path] = field(default_factory=dict)  # page of the feature browser, by the SAE's folder
    notes: list[str] = field(default_factory=list)  # what was left out, and why


def collect(folders: Sequence[Path]) -> Found:
    """Read runs, SAEs, evaluations and comparisons in these folders; UserError where one of them has none at all."""
    if not folders:
        raise UserError("folders: must name at least one folder of a run, of SAEs or of a comparison")
    found, seen = Found(), set[Path]()
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{str(folder)!r}: no such folder")
        inside = list(_interesting(folder.resolve()))
        if not inside:
            raise UserError(f"{str(folder)!r}: holds no run, no SAE and no comparison; train one there first")
        for one in inside:
            if one not in seen:
                seen.add(one)
                _read_folder(one, found)
    return found


def _interesting(top: Path) -> Iterator[Path]:
    """The folders of runs, SAEs and comparisons in this one, or itself, in order."""
    for where, below, files in os.walk(top):
        below[:] = sorted(name for name in below if not name.startswith(".") and name not in ("checkpoints", "evals"))
        folder = Path(where)
        if SYNTHETIC in files and _synthetic(folder, []):
            below[:] = []
            yield folder
        elif {"run.json", "compare.json", OWN, BROWSER} & set(files) or _is_sae(folder):
            yield folder


def _synthetic(folder: Path, notes: list[str]) -> dict[str, Any] | None:
    """The results of a synthetic experiment in this folder; none where there are none."""
    results = _read(folder / SYNTHETIC, "synthetic", notes)
    saes = results.get("saes")
    named = isinstance(saes, list) and all(isinstance(sae, dict) and "name" in sae for sae in saes)
    return results if named and part(results, "data") else None


def _is_sae(folder: Path) -> bool:
    """Settings or results suffice: the weights may be on another machine."""
    if (folder / OWN).exists() or is_sae(folder):
        return True
    return any((folder / "evals" / f"{kind.name}.json").exists() for kind in kinds())


def _read_folder(folder: Path, found: Found) -> None:
    results = _synthetic(folder, found.notes)
    if results is not None:
        found.synthetic.append((folder, results))
        found.notes.append(f"{folder}: the synthetic experiment, which has a page of its own: index.html there")
        return
    shown = _read(folder / BROWSER, "browser", found.notes).get("sae")
    if isinstance(shown, str) and (folder / "index.html").exists():
        found.browsers[Path(os.path.normpath(folder / shown))] = folder / "index.html"
    comparison = _read(folder / "compare.json", "comparison", found.notes)
    if comparison:
        found.comparisons.append((folder, comparison))
    if (folder / "run.json").exists():
        found.saes += _unfinished(_run(folder, found), folder)
    if _is_sae(folder):
        of_run = folder.parent.name == "saes" and (folder.parent.parent / "run.json").exists()
        found.saes.append(_sae(folder, _run(folder.parent.parent, found) if of_run else None, found.notes))


def _run(folder: Path, found: Found) -> Run:
    if all(run.folder != folder for run in found.runs):
        found.runs.append(Run(folder, _read(folder / "run.json", "run", found.notes), *read_log(folder / "log.jsonl")))
    return next(run for run in found.runs if run.folder == folder)


def _unfinished(run: Run, folder: Path) -> list[Saved]:
    """The SAEs of an unfinished run: their settings and curves are known."""
    origin, saes = part(run.record, "source"), folder / "saes"
    configs = {str(config["name"]): config for config in dicts(part(run.record, "config"), "saes") if _named(config)}
    return [
        Saved(saes / name, name, config, origin, None, config.get("d_sae"), {}, run, False)
        for name, config in configs.items()
        if not _is_sae(saes / name)
    ]


def _named(config: dict[str, Any]) -> bool:
    return isinstance(name := config.get("name"), str) and usable_as_folder(name)


def _sae(folder: Path, run: Run | None, notes: list[str]) -> Saved:
    own, foreign = _read(folder / OWN, "sae", notes), _foreign(folder, notes)
    notes += [f"{folder / OWN}: has no {name}; left out" for name in ("config", "metadata") if own and name not in own]
    of_run = dicts(part(run.record, "config"), "saes") if run else []
    configs = [own.get("config"), *(config for config in of_run if config.get("name") == folder.name)]
    metadata = part(own, "metadata") or {k: v for k, v in part(foreign, "metadata").items() if v is not None}
    results = {}
    for name in (kind.name for kind in kinds()):
        path = folder / "evals" / f"{name}.json"
        content = _read(path, "result", notes)
        if isinstance(content.get("result"), dict):
            results[name] = content
        elif content:
            notes.append(f"{path}: has no result; left out")
    training = part(metadata, "training")
    if training:
        results[TRAINING] = {"result": training}
    # Results that were copied without their SAE know its settings too.
    configs += [one.get("sae") for one in results.values()]
    config = next((one for one in configs if isinstance(one, dict)), None)
    name = str((config or {}).get("name") or folder.name)
    return Saved(folder, name, config, metadata, foreign.get("d_in"), foreign.get("d_sae"), results, run, True)


def _foreign(folder: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return saelens_fields(folder)
    except UserError as error:
        notes.append(f"{error}; left out")
        return {}


def saelens_fields(folder: Path) -> dict[str, Any]:
    """What cfg.json of SAELens has of an SAE of any format; empty if only results are there."""
    content = read_json(folder / FOREIGN) if (folder / FOREIGN).exists() else {}
    if (folder / OWN).exists() or (isinstance(content, dict) and "metadata" in content):
        return content if isinstance(content, dict) else {}
    path = sae_of(folder)
    if not is_sae(path):
        return {}
    cfg = describe(path)
    fields = saelens_config(cfg, torch.float32)
    return fields | {"metadata": fields["metadata"] | cfg.metadata}


def _read(path: Path, kind: str, notes: list[str]) -> dict[str, Any]:
    """A JSON object of the present version; empty where there is no file. A damaged file is noted and left out."""
    try:
        content = read_file(path, kind) if path.exists() else None
    except UserError as error:
        notes.append(f"{error}; left out")
        return {}
    if content == {}:
        notes.append(f"{path}: has nothing in it; left out")
    return content or {}


def part(record: Any, *names: str) -> dict[str, Any]:
    """The object inside an object under these names, one inside the other; empty where there is none."""
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record if isinstance(record, dict) else {}


def dicts(record: Any, name: str) -> list[dict[str, Any]]:
    """The objects in a list inside an object; empty where there is no such list."""
    items = record.get(name) if isinstance(record, dict) else None
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


Log = dict[str, list[dict[str, Any]]]  # the log's lines of each run, by its name


def read_log(path: Path) -> tuple[Log, str]:
    """The log's lines by run, and a sentence on what is missing in it."""
    log: Log = {}
    damaged = 0
    if not path.exists():
        return log, f"The curves are missing: there is no {path.name} in the folder."
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        return log, f"The curves are missing: {path.name} cannot be read ({error.strerror})."
    for text in filter(str.strip, lines):
        try:
            line = parse_json(text)
            if "format_version" not in line:
                log.setdefault(str(line["sae"]), []).append(line)
        except (ValueError, RecursionError, TypeError, KeyError):
            damaged += 1  # a run that was stopped may leave half a line
    return log, f"Unreadable lines of {path.name} that were left out: {damaged}." if damaged else ""
