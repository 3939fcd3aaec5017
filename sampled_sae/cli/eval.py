"""`sampled-sae eval`: trained SAEs of a language model."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from sampled_sae.data.text import TextSource
from sampled_sae.evals import Evaluation, chosen, registry
from sampled_sae.evals.absorption.schema import AbsorptionConfig
from sampled_sae.evals.autointerp.schema import AutointerpConfig
from sampled_sae.evals.core.schema import CoreConfig, PutIn
from sampled_sae.evals.probing.schema import ProbingConfig
from sampled_sae.evals.results import result_path
from sampled_sae.evals.saes import find_saes
from sampled_sae.evals.session import Request, evaluate_saes
from sampled_sae.models.language_model import LanguageModel


@dataclass(frozen=True)
class Eval:
    """Evaluate SAEs; results lie in each one's folder, as evals/NAME.json, and all of them in one table."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of SAEs, or of runs that hold some."""
    evals: tuple[str, ...] = ("core",)
    """core (reconstruction, density, what the model loses), probing, absorption, autointerp."""
    text: str | None = None
    """For core and autointerp: hub dataset, a file, a folder of files, or stdlib. Its first contexts are read: of the
    text that was trained on, core refuses more of them than were held out."""
    text_field: str = "text"
    """Where a document's text is in JSON, parquet and hub datasets."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    contexts: int | None = None
    """Contexts that core reads, as long as those of training; 64 by default, or fewer if fewer were held out."""
    interp_tokens: int = 2_000_000
    """Tokens that autointerp reads, in contexts of 128."""
    out: Path | None = None
    """Folder for the table of all and the files for SAEBench's tools; by default evals in the first folder, or in the
    one that holds several SAEs side by side."""
    model: str | None = None
    """Model, if it is not to be found under the name that the SAE carries."""
    layer: int | None = None
    """Layer, for an SAE that does not say."""
    context: int | None = None
    """Tokens a context of core; by default those of training."""
    loss: bool = True
    """Core: measure cross-entropy and KL divergence too, which takes a pass through the model for each SAE."""
    put_in: PutIn | None = None
    """Core: where the reconstruction replaces the stream. By default everywhere but at the tokens of high norm for SAEs
    that were trained without these, and as in SAEBench for others; only then do its files hold the losses."""
    contexts_at_once: int | None = None
    """Contexts of core in one pass through the model; 16 on a GPU, 4 elsewhere by default."""
    probing: ProbingConfig = field(default_factory=ProbingConfig)
    absorption: AbsorptionConfig = field(default_factory=AbsorptionConfig)
    autointerp: AutointerpConfig = field(default_factory=AutointerpConfig)
    model_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model; bfloat16 on a GPU, float32 elsewhere by default."""
    redo: bool = False
    """Measure again what was measured in the same way already."""
    device: str | None = None
    """cpu, cuda, cuda:1 and so on; the GPU if there is one by default."""

    def run(self) -> None:
        from sampled_sae.reporting.tables import write_tables
        from sampled_sae.reporting.terminal import print_evals

        evaluations, found = chosen(self.evals), find_saes(self.folders)
        dtype = None if self.model_dtype is None else getattr(torch, self.model_dtype)
        evaluate_saes(
            found,
            self.model,
            [Request(evaluation, self._settings(evaluation)) for evaluation in evaluations],
            text=None if self.text is None else TextSource(self.text, self.text_field, self.split, self.subset),
            layer=self.layer,
            device=self.device,
            dtype=dtype,
            redo=self.redo,
            load=self._load,
        )
        names = [evaluation.name for evaluation in evaluations]
        print_evals({name: {folder: result_path(folder, name) for folder in found} for name in names})
        print(write_tables(found, self.out or self._default_out()))

    def _settings(self, evaluation: Evaluation) -> Any:
        if evaluation.name == "core":
            return CoreConfig(
                contexts=self.contexts,
                context=self.context,
                loss=self.loss,
                put_in=self.put_in,
                contexts_at_once=self.contexts_at_once,
            )
        if evaluation.name == "autointerp":
            return replace(self.autointerp, tokens=self.interp_tokens)
        return getattr(self, evaluation.name, None) or evaluation.config()

    def _default_out(self) -> Path:
        """In the first folder; of several SAEs that lie side by side in the one that holds them."""
        first, *others = self.folders
        beside = others and all(folder.resolve().parent == first.resolve().parent for folder in others)
        together = beside and (first / "sae_weights.safetensors").exists()
        return (first.resolve().parent if together else first) / "evals"

    def _load(self, name: str, device: torch.device, dtype: torch.dtype) -> LanguageModel:
        from sampled_sae.models.load import load_model

        return load_model(name, device, dtype)


def with_plugins() -> type[Eval]:
    """The command with a group of flags for each evaluation of an installed package."""
    known = {"core", *(item.name for item in fields(Eval))}
    others = [
        (name, evaluation.config, field(default_factory=evaluation.config))
        for name, evaluation in registry().items()
        if name not in known
    ]
    return make_dataclass("Eval", others, bases=(Eval,), frozen=True) if others else Eval


Command = with_plugins()
