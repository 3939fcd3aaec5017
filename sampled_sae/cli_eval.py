"""`sampled-sae eval`: trained SAEs of a language model, on held-out text."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from sampled_sae.config import to_dict
from sampled_sae.data.contexts import TextConfig, contexts
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
    """Hub dataset, a file, a folder of files, or stdlib. Its first contexts are read: of the text that was trained on,
    those are the held-out ones, and more than these are refused."""
    text_field: str = "text"
    """Where a document's text is in JSON, parquet and hub datasets."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset."""
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
    """Measure again what was measured in the same way already."""
    device: str | None = None
    """cpu, cuda, cuda:1 and so on; the GPU if there is one by default."""

    def run(self) -> None:
        from sampled_sae.report.core_terminal import print_core

        found = find_saes(self.folders)
        todo = [folder for folder in found if self.redo or not self._is_done(folder)]
        if todo:
            self._measure(todo)
        print_core({folder: read_json(folder / RESULT) for folder in found})

    def _asked(self) -> dict[str, Any]:
        """What decides the numbers, as it was asked for."""
        free = ("folders", "evals", "contexts_at_once", "redo", "device")
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in free}

    def _is_done(self, folder: Path) -> bool:
        return (folder / RESULT).exists() and read_json(folder / RESULT).get("asked") == self._asked()

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
        groups: dict[tuple[int, TextConfig], list[Path]] = {}
        for folder, sae in saes.items():
            self._check_unseen(sae, folder)
            layer = int(self._of(sae, "layer", "layer", folder))
            length = int(self._of(sae, "context", "context_size", folder))
            said = sae.metadata
            text = TextConfig(length, bool(said.get("prepend_bos")), int(said.get("skip_first") or 0))
            groups.setdefault((layer, text), []).append(folder)
        for (layer, text), members in groups.items():
            self._measure_group(model, {folder: saes[folder] for folder in members}, layer, text)

    def _check_unseen(self, sae: SAE, folder: Path) -> None:
        """Refuse to measure on what the SAE was trained on, as far as it says."""
        held = sae.metadata.get("heldout_contexts")
        if sae.metadata.get("text") == self.text and held is not None and self.contexts > held:
            raise UserError(
                f"contexts = {self.contexts}: {folder} was trained on this text but for its first {held} contexts; "
                f"give {held} at most, or another text"
            )

    def _of(self, sae: SAE, flag: str, name: str, folder: Path) -> Any:
        asked = getattr(self, flag)
        value = sae.metadata.get(name) if asked is None else asked
        if value is None:
            raise UserError(f"{folder}: does not say its {flag}; give --{flag}")
        return value

    def _measure_group(self, model: Any, saes: dict[Path, SAE], layer: int, text: TextConfig) -> None:
        from sampled_sae.data.text import documents
        from sampled_sae.evals.core import evaluate_core_many
        from sampled_sae.evals.core_config import CoreConfig

        source = documents(self.text, self.text_field, self.split, self.subset)
        tokens = torch.stack(list(islice(contexts(source, model.tokenizer, text), self.contexts)))
        if len(tokens) < self.contexts:
            raise UserError(f"contexts = {self.contexts}: the text holds {len(tokens)} of {text.length} tokens")
        settings = CoreConfig(skip_first=text.skip_first, loss=self.loss, contexts_at_once=self.contexts_at_once)
        # An SAE that was trained without the high-norm tokens leaves them as they are.
        filtered = {folder for folder, sae in saes.items() if sae.metadata.get("max_norm") is not None}
        for part, how in ((filtered, replace(settings, put_in="normal")), (saes.keys() - filtered, settings)):
            members = [folder for folder in saes if folder in part]
            results = evaluate_core_many([saes[f] for f in members], model, layer, tokens, how) if members else []
            for folder, result in zip(members, results, strict=True):
                make_folder((folder / RESULT).parent)
                origin = {"versions": versions(), "git_commit": git_commit(), "asked": self._asked()}
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
