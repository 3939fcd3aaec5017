"""Saved SAEs, a language model and a choice of evaluations -> results in the folder of each SAE.

The model is loaded once. SAEs of one layer share its passes. What was measured in the same way already is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sampled_sae.config import to_dict
from sampled_sae.data.layers import LanguageModel
from sampled_sae.errors import UserError
from sampled_sae.evals.registry import EVALUATIONS
from sampled_sae.files import make_folder, read_json, write_json
from sampled_sae.progress import show
from sampled_sae.provenance import git_commit, versions
from sampled_sae.sae import SAE

FOLDER = "evals"


@dataclass(frozen=True)
class Request:
    """One evaluation as it was asked for."""

    name: str
    """Of the evaluation."""
    asked: dict[str, Any]
    """What decides the numbers, as plain JSON; a result is kept for as long as it was asked for in the same way."""
    settings: Callable[[SAE, LanguageModel], Any]
    """The evaluation's configuration for an SAE; SAEs with equal ones are measured together."""
    contexts: Callable[[SAE, LanguageModel], Tensor] | None = None
    """Token ids [n, L] for an SAE, where the evaluation reads text."""

    def path(self, folder: Path) -> Path:
        """Where the result of the SAE in this folder is."""
        return folder / FOLDER / f"{self.name}.json"

    def is_done(self, folder: Path) -> bool:
        path = self.path(folder)
        return path.exists() and read_json(path).get("asked") == plain(self.asked)


@dataclass(frozen=True)
class Session:
    """A model and the layers of the SAEs that are measured on it."""

    model: LanguageModel
    layers: dict[Path, int]
    saes: dict[Path, SAE]

    def measure(self, request: Request, folders: Sequence[Path]) -> None:
        """Measure the SAEs of these folders; each one's results are written as soon as they are there."""
        groups: dict[Any, list[Path]] = {}
        for folder in folders:
            settings = request.settings(self.saes[folder], self.model)
            groups.setdefault((self.layers[folder], settings, self._text_key(request, folder)), []).append(folder)
        for (layer, settings, _), members in groups.items():
            self._measure_together(request, layer, settings, members)

    def _text_key(self, request: Request, folder: Path) -> Any:
        """What decides how the text is cut into contexts for an SAE."""
        said = self.saes[folder].metadata
        names = ("context_size", "prepend_bos", "skip_first") if request.contexts else ()
        return tuple(said.get(name) for name in names)

    def _measure_together(self, request: Request, layer: int, settings: Any, folders: list[Path]) -> None:
        evaluation, saes = EVALUATIONS[request.name], [self.saes[folder] for folder in folders]
        text = [] if request.contexts is None else [request.contexts(saes[0], self.model)]
        bar, begin = None, time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal bar
            if bar is None:
                bar = show(total, start=done, what=f"{request.name} of {len(saes)} SAEs", unit="parts")
            bar.update(done)

        try:
            results = evaluation.evaluate(saes, self.model, layer, *text, settings, progress)
        finally:
            if bar is not None:
                bar.close()
        seconds = time.monotonic() - begin
        for folder, result in zip(folders, results, strict=True):
            evaluation.after(result, folder)
            self._write(request, folder, result, settings, seconds / len(folders))

    def _write(self, request: Request, folder: Path, result: Any, settings: Any, seconds: float) -> None:
        make_folder(folder / FOLDER)
        config = self.saes[folder].config
        write_json(
            request.path(folder),
            {
                "result": result.to_dict(),
                "sae": None if config is None else to_dict(config),
                "layer": self.layers[folder],
                "model": self.model.name,
                "seconds": seconds,
                "saebench": EVALUATIONS[request.name].to_saebench(result, settings),
                "versions": versions(),
                "git_commit": git_commit(),
                "asked": request.asked,
            },
        )


def open_session(
    folders: Sequence[Path],
    load: Callable[[str], LanguageModel],
    device: torch.device,
    model: str | None = None,
    layer: int | None = None,
) -> Session:
    """Load the SAEs and, once, the model that they name; `model` and `layer` stand in for what they do not say."""
    saes = {folder: SAE.load(folder, device) for folder in folders}
    names = {str(said(sae, "model_name", model, "model", folder)) for folder, sae in saes.items()}
    if len(names) > 1:
        raise UserError(f"folders: SAEs of several models ({', '.join(sorted(names))}); evaluate each on its own")
    layers = {folder: int(said(sae, "layer", layer, "layer", folder)) for folder, sae in saes.items()}
    return Session(load(names.pop()), layers, saes)


def said(sae: SAE, name: str, asked: Any, flag: str, folder: Path) -> Any:
    """What was asked for, or what the SAE says of itself."""
    value = sae.metadata.get(name) if asked is None else asked
    if value is None:
        raise UserError(f"{folder}: does not say its {flag}; give --{flag}")
    return value


def find_saes(folders: Sequence[Path]) -> list[Path]:
    """The folders of SAEs in these folders, or these themselves, in order."""
    found: list[Path] = []
    for folder in folders:
        inside = sorted(path.parent for path in folder.rglob("sae_weights.safetensors"))
        if not inside:
            raise UserError(f"{str(folder)!r}: holds no SAE; must be the folder of one, or of a run")
        found += [path for path in inside if path not in found]
    if not found:
        raise UserError("folders: must name at least one SAE's folder")
    return found


def plain(value: Any) -> Any:
    """What reading it back from JSON gives."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
