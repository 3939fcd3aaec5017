"""`sampled-sae browse`: a page that shows the latents of an SAE."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
import tyro

from sampled_sae.browser.collect import BrowseConfig
from sampled_sae.browser.neuronpedia import NeuronpediaConfig
from sampled_sae.utils.errors import UserError


@dataclass(frozen=True)
class Browse:
    """Write a page that shows the latents of an SAE: where each fires, which tokens it promotes, which are similar."""

    folder: tyro.conf.Positional[Path]
    """Folder of the SAE, or hf:OWNER/NAME[/FOLDER][@REVISION] on the hub. Explanations, scores and densities that
    evaluations left in it are shown."""
    text: str | None = None
    """Hub dataset, a file, a folder of files, or stdlib; preferably text that was not trained on. May be left out with
    --serve if the page is there already."""
    out: Path | None = None
    """Folder for index.html and its data. Default: browser in the SAE's own folder, where reports find it."""
    serve: bool = False
    """Serve the page on this machine, with the model loaded: it then also reads texts that you type."""
    port: int = 8008
    """Port of the server; 0 takes any that is free."""
    other: Path | None = None
    """Folder of a second SAE of the same width, whose nearest latents are shown too."""
    compare: Path | None = None
    """compare.json of `sampled-sae compare`, or its folder: lists the unique latents."""
    tokens: int = 200_000
    """Tokens of the text to read."""
    context: int = 128
    """Tokens per context; a latent shows each context at most once."""
    text_field: str = "text"
    """Field that holds a document's text in JSON, parquet and hub datasets."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    model: str | None = None
    """Model, where the name that is saved with the SAE does not lead to it."""
    layer: int | None = None
    """Layer, for an SAE that does not name its own."""
    hook: str | None = None
    """Hook point by name, such as model.layers.3.mlp, for an SAE that does not name its own."""
    neuronpedia: Path | None = None
    """Folder for the same numbers as batch files for Neuronpedia."""
    export: NeuronpediaConfig = field(default_factory=NeuronpediaConfig)
    """Names on Neuronpedia."""
    settings: Annotated[BrowseConfig, tyro.conf.arg(name="")] = field(default_factory=BrowseConfig)
    model_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model. Default: bfloat16 on a GPU, else float32."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the GPU, if there is one."""

    GROUPS: ClassVar[Mapping[str, Sequence[str]]] = {
        "SAE and page": ("folder", "out", "other", "compare", "neuronpedia", "serve", "port"),
        "Text": ("text", "tokens", "context", "text_field", "split", "subset"),
        "Model": ("model", "layer", "hook", "model_dtype", "device"),
    }
    EXAMPLES: ClassVar[Sequence[str]] = (
        "runs/b/saes/batchtopk-s0 --text stdlib --serve",
        "runs/b/saes/batchtopk-s0 --text held-out.jsonl --tokens 1000000 --other runs/b/saes/topk-s0 --out browser",
        "runs/b/saes/batchtopk-s0 --text stdlib --neuronpedia neuronpedia",
    )

    def run(self) -> None:
        from sampled_sae.api import browse
        from sampled_sae.data.text import TextSource

        if self.neuronpedia is None and self.export != NeuronpediaConfig():
            raise UserError("export: has no effect without --neuronpedia FOLDER")
        if self.text is None and not self.serve:
            raise UserError("text: must name a text, unless --serve is given and the page is there already")
        for name in ("other", "compare", "neuronpedia"):
            if self.text is None and getattr(self, name) is not None:
                raise UserError(f"{name}: has no effect without --text, which makes the page")
        made = browse(
            self.folder,
            self.model,
            None if self.text is None else TextSource(self.text, self.text_field, self.split, self.subset),
            self.out,
            tokens=self.tokens,
            context=self.context,
            layer=self.layer,
            hook=self.hook,
            other=self.other,
            comparison=self.compare,
            config=self.settings,
            neuronpedia=self.neuronpedia,
            export=self.export,
            device=self.device,
            dtype=self.model_dtype and getattr(torch, self.model_dtype),
            serve=self.port if self.serve else None,
        )
        if not self.serve:
            for note in made.notes:
                print(note, file=sys.stderr)
            print(made.summary)
        print(f"Page: {made.page}")
        if made.neuronpedia is not None:
            print(f"Neuronpedia: {made.neuronpedia}")
