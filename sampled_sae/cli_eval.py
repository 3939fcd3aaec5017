"""`sampled-sae eval`: trained SAEs of a language model, on held-out text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from sampled_sae.config import to_dict
from sampled_sae.errors import UserError
from sampled_sae.files import make_folder, read_json, write_json
from sampled_sae.provenance import git_commit, versions
from sampled_sae.sae import SAE


@dataclass(frozen=True)
class Eval:
    """Evaluate SAEs on a text that they were not trained on; results lie in each one's folder, as evals/core.json."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of SAEs, or of runs that hold some."""
    text: str
    """Hub dataset, a file, a folder of files, or stdlib. Its first contexts are read: of a text that was trained on,
    those are the held-out ones."""
    evals: tuple[Literal["core"], ...] = ("core",)
    """core: reconstruction, density, what the model loses."""
    contexts: int = 64
    """Contexts of the text to read."""
    model: str | None = None
    """Model, if it is not to be found under the name that the SAE carries."""
    layer: int | None = None
    """Layer, for an SAE that does not say."""
    context: int | None = None
    """Tokens a context; by default those of training."""
    loss: bool = True
    """Measure cross-entropy and KL divergence too, which takes a pass through the whole model for each SAE."""
    contexts_at_once: int = 4
    """Contexts in one pass through the model."""
    model_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model; bfloat16 on a GPU, float32 elsewhere by default."""
    redo: bool = False
    """Measure again what is there already."""
    device: str | None = None
    """cpu, cuda, cuda:1 and so on; the GPU if there is one by default."""

    def run(self) -> None:
        from sampled_sae.report.core_terminal import print_core

        found = find_saes(self.folders)
        todo = [folder for folder in found if self.redo or not (folder / RESULT).exists()]
        if todo:
            self._measure(todo)
        print_core({folder: read_json(folder / RESULT) for folder in found})

    def _measure(self, folders: list[Path]) -> None:
        """All SAEs of one model together: it is loaded once, and those of one layer share its passes."""
        from sampled_sae.data.models import load_model
        from sampled_sae.device import usable_device

        place = usable_device(self.device)
        saes = {folder: SAE.load(folder, place) for folder in folders}
        names = {str(self._of(sae, "model", "model_name", folder)) for folder, sae in saes.items()}
        if len(names) > 1:
            raise UserError(f"folders: SAEs of several models ({', '.join(sorted(names))}); evaluate each on its own")
        usual = "bfloat16" if place.type == "cuda" else "float32"
        model = load_model(names.pop(), place, getattr(torch, self.model_dtype or usual))
        groups: dict[tuple[int, int, int], list[Path]] = {}
        for folder, sae in saes.items():
            layer = int(self._of(sae, "layer", "layer", folder))
            length = int(self._of(sae, "context", "context_size", folder))
            groups.setdefault((layer, length, int(sae.metadata.get("skip_first") or 0)), []).append(folder)
        for shape, members in groups.items():
            self._measure_group(model, {folder: saes[folder] for folder in members}, *shape)

    def _of(self, sae: SAE, flag: str, name: str, folder: Path) -> Any:
        asked = getattr(self, flag)
        value = sae.metadata.get(name) if asked is None else asked
        if value is None:
            raise UserError(f"{folder}: does not say its {flag}; give --{flag}")
        return value

    def _measure_group(self, model: Any, saes: dict[Path, SAE], layer: int, length: int, skip_first: int) -> None:
        from sampled_sae.data.contexts import TextConfig, contexts
        from sampled_sae.data.text import documents
        from sampled_sae.evals.core import evaluate_core_many
        from sampled_sae.evals.core_config import CoreConfig

        stream = contexts(documents(self.text), model.tokenizer, TextConfig(length))
        tokens = torch.stack(list(islice(stream, self.contexts)))
        if len(tokens) < self.contexts:
            raise UserError(f"contexts = {self.contexts}: the text holds {len(tokens)} of {length} tokens")
        settings = CoreConfig(skip_first=skip_first, loss=self.loss, contexts_at_once=self.contexts_at_once)
        # An SAE that was trained without the high-norm tokens leaves them as they are.
        filtered = {folder for folder, sae in saes.items() if sae.metadata.get("max_norm") is not None}
        for part, how in ((filtered, replace(settings, put_in="normal")), (saes.keys() - filtered, settings)):
            members = [folder for folder in saes if folder in part]
            results = evaluate_core_many([saes[f] for f in members], model, layer, tokens, how) if members else []
            for folder, result in zip(members, results, strict=True):
                make_folder((folder / RESULT).parent)
                origin = {"versions": versions(), "git_commit": git_commit(), "text": self.text, "model": model.name}
                config = saes[folder].config
                sae = None if config is None else to_dict(config)
                write_json(folder / RESULT, {"result": result.to_dict(), "sae": sae, **origin})


RESULT = Path("evals") / "core.json"


def find_saes(folders: tuple[Path, ...]) -> list[Path]:
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
