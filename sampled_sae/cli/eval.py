"""`sampled-sae eval`: measure trained SAEs. The flags of each evaluation come from the registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import tyro

from sampled_sae.data.text import TextSource
from sampled_sae.evals import chosen, registry
from sampled_sae.formats import is_sae, results_folder
from sampled_sae.formats.hub import local

OF_CORE = ("contexts", "context", "loss", "no-loss", "put-in", "contexts-at-once")


@dataclass(frozen=True)
class Eval:
    """Evaluate SAEs. Results are written to evals/NAME.json in each SAE's folder, and to one table."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of SAEs, or of runs; hf:OWNER/NAME[/FOLDER][@REVISION] is one on the hub."""
    evals: tuple[str, ...] = ("core",)
    """Evaluations: core, probing, absorption, autointerp, those of installed packages, or a .py file with one."""
    text: str | None = None
    """Text for the evaluations that read one: hub dataset, a file, a folder of files, or stdlib. Its first contexts are
    read; core refuses those that the SAE was trained on."""
    text_field: str = "text"
    """Field that holds a document's text in JSON, parquet and hub datasets."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    out: Path | None = None
    """Folder for the table of all SAEs and the files for SAEBench's tools. Default: evals in the first folder, or in
    the one that holds several SAEs side by side."""
    model: str | None = None
    """Model, where the name that is saved with the SAE does not lead to it."""
    layer: int | None = None
    """Layer, for an SAE that does not name its own."""
    hook: str | None = None
    """Hook point by name, such as model.layers.3.mlp, for an SAE that does not name its own."""
    model_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model. Default: bfloat16 on a GPU, else float32."""
    redo: bool = False
    """Measure again what was measured in the same way before."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the GPU, if there is one."""

    GROUPS: ClassVar[Mapping[str, Sequence[str]]] = {
        "SAEs and evaluations": ("folders", "evals", "redo", "out"),
        "Text": ("text", "text_field", "split", "subset"),
        "Model": ("model", "layer", "hook", "model_dtype", "device"),
    }
    GROUPS_TITLE: ClassVar[str] = "Evaluations and their settings"
    EXAMPLES: ClassVar[Sequence[str]] = (
        "runs/b --text stdlib",
        "runs/b --evals core,absorption --text held-out.jsonl --core.contexts 256",
        "hf:google/gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82 --evals probing --probing.k 1 5",
    )
    OLD_FLAGS: ClassVar[dict[str, str]] = {
        **{f"--{name}": f"--core.{name}" for name in OF_CORE},
        "--interp-tokens": "--autointerp.tokens",
    }

    def run(self) -> None:
        from sampled_sae.api import evaluate
        from sampled_sae.evals.session import Request

        results = evaluate(
            self.folders,
            self.model,
            [Request(each, getattr(self, each.name, None) or each.config()) for each in chosen(self.evals)],
            text=None if self.text is None else TextSource(self.text, self.text_field, self.split, self.subset),
            out=self.out or self._default_out(),
            redo=self.redo,
            layer=self.layer,
            hook=self.hook,
            device=self.device,
            dtype=self.model_dtype and getattr(torch, self.model_dtype),
        )
        print(results)
        print(results.table)

    def _default_out(self) -> Path:
        """In the first folder; if SAEs side by side are given, in the folder that holds them."""
        first, *others = [local(folder) for folder in self.folders] or [Path()]
        beside = others and all(folder.resolve().parent == first.resolve().parent for folder in others)
        together = beside and is_sae(first)
        return (first.resolve().parent if together else results_folder(first)) / "evals"


def command() -> Any:
    """`Eval` with the settings of each evaluation in a group of its name."""
    groups = [(name, each.config, field(default_factory=each.config)) for name, each in registry().items()]
    described = {"__doc__": Eval.__doc__, "DESCRIPTIONS": {name: each.title for name, each in registry().items()}}
    return make_dataclass("Eval", groups, bases=(Eval,), frozen=True, namespace=described)
