"""Saved SAEs, a language model and a choice of evaluations -> results in the folder of each SAE.

The model is loaded once. SAEs of one layer share its passes, as many at once as memory holds. What was measured in the
same way already is kept.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sampled_sae.config import plain, to_dict
from sampled_sae.evals.reading import own_layer
from sampled_sae.evals.registry import EVALUATIONS
from sampled_sae.formats import describe
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils import system
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import make_folder, read_json, write_json
from sampled_sae.utils.progress import show
from sampled_sae.utils.system import git_commit, versions

FOLDER = "evals"
SAMPLE = 2**20
"""Bytes of each part of the weights that tell an SAE from another."""
USED = 0.5
"""Share of the free memory that the SAEs measured at once may take, with what is kept of them."""
KEPT = 2**14
"""Bytes a latent that an evaluation keeps of one SAE, at most: the codes of texts as their nonzero entries."""


@dataclass(frozen=True)
class Request:
    """One evaluation as it was asked for."""

    name: str
    """Of the evaluation."""
    asked: dict[str, Any]
    """What decides the numbers, as plain JSON; a result is kept for as long as it was asked for in the same way."""
    settings: Callable[[InferenceConfig, LanguageModel], Any]
    """The evaluation's configuration for an SAE; SAEs with equal ones are measured together."""
    contexts: Callable[[InferenceConfig, LanguageModel], Tensor] | None = None
    """Token ids [n, L] for an SAE, where the evaluation reads text."""

    def path(self, folder: Path) -> Path:
        """Where the result of the SAE in this folder is."""
        return folder / FOLDER / f"{self.name}.json"

    def is_done(self, folder: Path) -> bool:
        path = self.path(folder)
        content = read_json(path) if path.exists() else None
        if not isinstance(content, dict) or content.get("asked") != plain(self.asked):
            return False
        return content.get("weights") == fingerprint(folder)


@dataclass(frozen=True)
class Session:
    """A model, and what is said of the SAEs that are measured on it."""

    model: LanguageModel
    device: torch.device
    layers: dict[Path, int]
    saes: dict[Path, InferenceConfig]

    def measure(self, request: Request, folders: Sequence[Path]) -> None:
        """Measure the SAEs of these folders."""
        groups: dict[Any, list[Path]] = {}
        for folder in folders:
            settings = request.settings(self.saes[folder], self.model)
            groups.setdefault((self.layers[folder], settings, self._text_key(request, folder)), []).append(folder)
        for (layer, settings, _), members in groups.items():
            said = self.saes[members[0]]
            text = [] if request.contexts is None else [request.contexts(said, self.model)]
            for part in self._parts(members, EVALUATIONS[request.name].most):
                self._measure_together(request, layer, settings, text, part)

    def _text_key(self, request: Request, folder: Path) -> Any:
        """What decides how the text is cut into contexts for an SAE."""
        names = ("context_size", "prepend_bos", "skip_first", "heldout_contexts") if request.contexts else ()
        return tuple(self.saes[folder].metadata.get(name) for name in names)

    def _parts(self, folders: list[Path], most: int | None) -> Iterator[list[Path]]:
        """As many SAEs at once as fit, one at least."""
        free, part, size = system.available(self.device), list[Path](), 0
        for folder in folders:
            need = self.saes[folder].d_sae * (8 * self.saes[folder].d_in + KEPT)
            full = free is not None and size + need > USED * free
            if part and (full or len(part) == most):
                yield part
                part, size = [], 0
            part.append(folder)
            size += need
        yield part

    def _measure_together(
        self, request: Request, layer: int, settings: Any, text: list[Tensor], folders: list[Path]
    ) -> None:
        evaluation, saes = EVALUATIONS[request.name], self._load(folders)
        bar, last = None, time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal bar
            if bar is None:
                bar = show(total, start=done, what=f"{request.name} of {len(saes)} SAEs", unit="parts")
            bar.update(done)

        def finished(number: int, result: Any) -> None:
            nonlocal last
            now = time.monotonic()
            # The first one's time holds what is shared.
            share = 1 if evaluation.one_by_one else len(saes)
            evaluation.after(result, folders[number])
            self._write(request, folders[number], result, settings, (now - last) / share)
            last = now if evaluation.one_by_one else last

        callback = {"finished": finished} if evaluation.one_by_one else {}
        try:
            results = evaluation.evaluate(saes, self.model, layer, *text, settings, progress, **callback)
        finally:
            if bar is not None:
                bar.close()
        if not evaluation.one_by_one:
            for number, result in enumerate(results):
                finished(number, result)

    def _load(self, folders: list[Path]) -> list[SAE]:
        try:
            return [SAE.load(folder, self.device) for folder in folders]
        except torch.cuda.OutOfMemoryError:
            raise UserError(f"device = {self.device}: {len(folders)} SAEs do not fit into its memory") from None

    def _write(self, request: Request, folder: Path, result: Any, settings: Any, seconds: float) -> None:
        make_folder(folder / FOLDER)
        config, to_saebench = self.saes[folder].training, EVALUATIONS[request.name].to_saebench
        write_json(
            request.path(folder),
            {
                "result": result.to_dict(),
                "sae": None if config is None else to_dict(config),
                "layer": self.layers[folder],
                "model": self.model.name,
                "seconds": seconds,
                "weights": fingerprint(folder),
                "saebench": to_saebench(result, settings) if to_saebench else None,
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
    """Read what the SAEs say and load, once, the model that they name, or `model`; `layer` is for those that say
    none, neither by its number nor by the hook."""
    saes = {folder: describe(folder) for folder in folders}
    names = {str(said(sae, "model_name", model, "model", folder)) for folder, sae in saes.items()}
    if len(names) > 1:
        raise UserError(f"folders: SAEs of several models ({', '.join(sorted(names))}); evaluate each on its own")
    layers = {folder: layer_of(sae, layer, folder) for folder, sae in saes.items()}
    return Session(load(names.pop()), device, layers, saes)


def layer_of(sae: InferenceConfig, asked: int | None, folder: Path) -> int:
    """The layer that an SAE says to be of, or the one that was asked for where it does not say."""
    own = own_layer(sae.metadata, str(folder))
    if asked is not None and own not in (None, asked):
        raise UserError(f"layer = {asked}: {folder} is of layer {own}; leave the flag out")
    return int(said(sae, "layer", asked, "layer", folder)) if own is None else own


def said(sae: InferenceConfig, name: str, asked: Any, flag: str, folder: Path) -> Any:
    """What was asked for, or what the SAE says of itself."""
    value = sae.metadata.get(name) if asked is None else asked
    if value is None:
        raise UserError(f"{folder}: does not say its {flag}; give --{flag}")
    return value


def find_saes(folders: Sequence[Path]) -> list[Path]:
    """The folders of SAEs in these folders, or these themselves, in order."""
    found: list[Path] = []
    for folder in folders:
        # A save that was killed leaves a folder that begins with a dot.
        places = sorted(path.parent for path in folder.rglob("sae_weights.safetensors"))
        inside = [place for place in places if not _is_hidden(place.relative_to(folder))]
        if not inside:
            raise UserError(f"{str(folder)!r}: holds no SAE; must be the folder of one, or of a run")
        found += [path for path in inside if path not in found]
    if not found:
        raise UserError("folders: must name at least one SAE's folder")
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def fingerprint(folder: Path) -> str:
    """Tells an SAE's weights from others: a hash of parts of the file, which other weights do not share."""
    path = folder / "sae_weights.safetensors"
    size = path.stat().st_size
    told = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for place in (0, size // 3, 2 * size // 3, max(0, size - SAMPLE)):
            file.seek(place)
            told.update(file.read(SAMPLE))
    return told.hexdigest()


def names_of(folders: Sequence[Path]) -> list[str]:
    """The folders' last parts, as many as it takes to tell them apart."""
    for parts in range(1, max((len(folder.parts) for folder in folders), default=1) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]
