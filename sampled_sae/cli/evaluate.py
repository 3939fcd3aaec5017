"""`sampled-sae eval`, `compare`, `report` and `browse`: from SAEs to numbers, and to pages that show them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from sampled_sae.browser.collect import BrowseConfig
from sampled_sae.browser.neuronpedia import NeuronpediaConfig
from sampled_sae.cli.cache import Reading
from sampled_sae.evals import chosen, registry
from sampled_sae.evals.similarity.members import SimilarityConfig
from sampled_sae.formats import is_sae, results_folder
from sampled_sae.formats.hub import local
from sampled_sae.utils.errors import UserError

OF_CORE = ("contexts", "context", "loss", "no-loss", "put-in", "contexts-at-once")


@dataclass(frozen=True, kw_only=True)
class OnText(Reading):
    """Flags of commands that read a text with the language model of saved SAEs."""

    model: str | None = None
    """Language model, if it cannot be found under the name saved with the SAE."""
    layer: int | None = None
    """Layer, for an SAE that does not name its own."""
    hook: str | None = None
    """Hook point by name, such as model.layers.3.mlp, for an SAE that does not name its own."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the GPU, if there is one."""

    @property
    def place(self) -> dict[str, Any]:
        """Hook point, device and precision, as functions of the library take them."""
        return {"layer": self.layer, "hook": self.hook, "device": self.device, "dtype": self.dtype}


@dataclass(frozen=True)
class Eval(OnText):
    """Evaluate SAEs. Results are written to evals/NAME.json in each SAE's folder, and to one table."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of SAEs, or of runs; hf:OWNER/NAME[/FOLDER][@REVISION] is one on the hub."""
    evals: tuple[str, ...] = ("core",)
    """Evaluations: core, probing, absorption, autointerp, those of installed packages, or a .py file with one."""
    text: str | None = None
    """Text for evaluations that need one: hub dataset, a file, a folder of files, or stdlib. Its first contexts are
    read; core refuses contexts that the SAE was trained on."""
    out: Path | None = None
    """Folder for the table of all SAEs and the files for SAEBench's tools. Default: evals in the first folder, or in
    the one that holds several SAEs side by side."""
    redo: bool = False
    """Measure again even if results with the same settings exist."""

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

        asked = chosen(self.evals)
        for name, usual in registry().items():
            given, default = getattr(self, name, None), usual.config()
            if usual not in asked and given not in (None, default):
                flag = next(
                    item.name for item in fields(given) if getattr(given, item.name) != getattr(default, item.name)
                )
                raise UserError(
                    f"{name}.{flag}: is not used, because {name} is not among --evals {' '.join(self.evals)}"
                )
        results = evaluate(
            self.folders,
            self.model,
            [Request(each, getattr(self, each.name, None) or each.config()) for each in asked],
            text=self.source_of(self.text),
            out=self.out or self._default_out(),
            redo=self.redo,
            **self.place,
        )
        print(results)
        print(results.table)

    def _default_out(self) -> Path:
        """In the first folder; if SAEs side by side are given, in the folder that holds them."""
        first, *others = [local(folder) for folder in self.folders] or [Path()]
        beside = others and all(folder.resolve().parent == first.resolve().parent for folder in others)
        together = beside and is_sae(first)
        return (first.resolve().parent if together else results_folder(first)) / "evals"


def make_eval() -> Any:
    """`Eval` with the settings of each evaluation in a group of its name."""
    groups = [(name, each.config, field(default_factory=each.config)) for name, each in registry().items()]
    described = {"__doc__": Eval.__doc__, "DESCRIPTIONS": {name: each.title for name, each in registry().items()}}
    return make_dataclass("Eval", groups, bases=(Eval,), frozen=True, namespace=described)


@dataclass(frozen=True)
class Compare:
    """Compare SAEs of the same activations: MMCS, one-to-one matching, and features that only one of two SAEs has."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of SAEs, or of runs, or hf:OWNER/NAME[/FOLDER][@REVISION]; at least two SAEs."""
    out: Path
    """Folder for compare.json, pairs.csv and unique.csv."""
    similarity: Annotated[SimilarityConfig, tyro.conf.arg(name="")] = field(default_factory=SimilarityConfig)
    embedder: str | None = None
    """Model of sentence-transformers for the explanations: a hub name, a folder, or minilm. Default:
    all-mpnet-base-v2, as in the paper."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the GPU, if there is one."""

    GROUPS: ClassVar[Mapping[str, Sequence[str]]] = {
        "SAEs and results": ("folders", "out", "device"),
        "Pairs": ("across", "reference", "seeds", "latents"),
        "Measures": ("matching", "exact_up_to", "candidates", "rounds", "tolerance", "threshold", "unique", "embedder"),
    }
    EXAMPLES: ClassVar[Sequence[str]] = (
        "runs/a --out runs/a/compare",
        "runs/a --seeds different --matching none --out runs/a/compare",
        "runs/a/saes/batchtopk-s0 hf:OWNER/NAME/layer-12 --out compare",
    )

    def run(self) -> None:
        from sampled_sae.api import compare
        from sampled_sae.reporting.comparison import print_comparison

        found = compare(self.folders, config=self.similarity, embedder=self.embedder, out=self.out, device=self.device)
        print_comparison(found.to_dict())
        print(f"\nAll numbers and histograms: {self.out / 'compare.json'}")


@dataclass(frozen=True)
class Report:
    """Write a page with the tables and figures of a sweep, from the files of training and evaluations."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, SAEs or comparisons; subfolders are searched."""
    out: Path
    """Folder for index.html, tables and figures."""
    model: str | None = None
    """Only SAEs of this model."""
    layer: int | None = None
    """Only SAEs of this layer."""
    figures: bool = True
    """Write the figures as PNG and PDF files too, which needs kaleido and Chrome or Chromium."""

    EXAMPLES: ClassVar[Sequence[str]] = (
        "runs/a --out report",
        "runs/a runs/b --out report --no-figures",
        "runs/layers --layer 12 --out report",
    )

    def run(self) -> None:
        from sampled_sae.api import report
        from sampled_sae.reporting.tables import Missing
        from sampled_sae.utils.measures import shown

        written = report(self.folders, self.out, model=self.model, layer=self.layer, figures=self.figures)
        for note in [*written.notes, *(note for sweep in written.sweeps for note in sweep.notes)]:
            print(shown(note), file=sys.stderr)
        for sweep in written.sweeps:
            print(f"{sweep.title}: {len(sweep.saes)} SAEs, {len(sweep.metrics)} metrics")
        print(f"Page: {written.page}")
        files = {"Tables": written.tables, "Figures": written.figures, "The paper's tables": written.paper}
        for what, paths in files.items():
            if paths:
                print(f"{what}: {paths[0].parent} ({len(paths)} files)")
        missing = sum(isinstance(table, Missing) for table in written.paper_tables)
        if missing:
            print(f"Of the paper's tables, {missing} need other SAEs or evaluations: sampled-sae reproduce makes all")


@dataclass(frozen=True)
class Browse(OnText):
    """Write a page that shows the latents of an SAE: where each fires, which tokens it promotes, which are similar."""

    folder: tyro.conf.Positional[Path]
    """Folder of the SAE, or hf:OWNER/NAME[/FOLDER][@REVISION] on the hub. The page shows explanations, scores and
    densities that evaluations wrote there."""
    text: str | None = None
    """Hub dataset, a file, a folder of files, or stdlib; preferably not the training text. May be omitted with
    --serve if the page exists."""
    out: Path | None = None
    """Folder for index.html and its data. Default: browser in the SAE's own folder, where reports find it."""
    serve: bool = False
    """Serve the page on this machine with the model loaded, so that you can enter your own text."""
    port: int = 8008
    """Port of the server; 0 selects a free port."""
    other: Path | None = None
    """Folder of a second SAE of the same width, whose nearest latents are shown too."""
    compare: Path | None = None
    """compare.json of `sampled-sae compare`, or its folder: lists the unique latents."""
    tokens: int = 200_000
    """Tokens of the text to read."""
    context: int = 128
    """Tokens per context; a latent shows each context at most once."""
    neuronpedia: Path | None = None
    """Folder for the same numbers as batch files for Neuronpedia."""
    export: NeuronpediaConfig = field(default_factory=NeuronpediaConfig)
    """Names on Neuronpedia."""
    settings: Annotated[BrowseConfig, tyro.conf.arg(name="")] = field(default_factory=BrowseConfig)

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

        if self.neuronpedia is None and self.export != NeuronpediaConfig():
            raise UserError("export: has no effect without --neuronpedia FOLDER")
        if self.text is None and not self.serve:
            raise UserError("text: must name a text, unless --serve is given and the page is there already")
        if not self.serve and self.port != Browse.port:
            raise UserError(f"port = {self.port}: has no effect without --serve")
        for name in ("other", "compare", "neuronpedia"):
            if self.text is None and getattr(self, name) is not None:
                raise UserError(f"{name}: has no effect without --text, which makes the page")
        made = browse(
            self.folder,
            self.model,
            self.source_of(self.text),
            self.out,
            tokens=self.tokens,
            context=self.context,
            other=self.other,
            comparison=self.compare,
            config=self.settings,
            neuronpedia=self.neuronpedia,
            export=self.export,
            serve=self.port if self.serve else None,
            **self.place,
        )
        if not self.serve:
            for note in made.notes:
                print(note, file=sys.stderr)
            print(made.summary)
        print(f"Page: {made.page}")
        if made.neuronpedia is not None:
            print(f"Neuronpedia: {made.neuronpedia}")
