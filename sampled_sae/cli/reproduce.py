"""A command of the command line as the words that one would type for it."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from sampled_sae.cli.cache import Source
from sampled_sae.cli.compare import Compare
from sampled_sae.cli.eval import Eval
from sampled_sae.cli.train import Train
from sampled_sae.evals.autointerp.chat import ChatConfig
from sampled_sae.evals.probing.data import write_labelled
from sampled_sae.experiments.reproduce import check_packages, estimate, print_plan
from sampled_sae.experiments.scales import SCALES, STAND_IN, Scale
from sampled_sae.experiments.stages import Record, Stage, check_disk, chosen, run_stages, say
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.cost import peak, product_speed
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import make_folder, write_json


def typed(command: Any) -> str:
    """`sampled-sae NAME ...` for a command's dataclass; what is as usual is left out."""
    name = next(cls.__name__ for cls in reversed(type(command).__mro__) if dataclasses.is_dataclass(cls)).lower()
    return shlex.join(["sampled-sae", name, *words(command)])


def words(command: Any, unprefixed: tuple[str, ...] = ("source", "similarity"), before: str = "") -> list[str]:
    """The arguments, positional ones first; fields of the parts named in `unprefixed` go by their own names."""
    first: list[str] = []
    rest: list[str] = []
    for item in dataclasses.fields(command):
        value = getattr(command, item.name)
        if value == _usual(item):
            continue
        flag = f"--{before}{item.name}".replace("_", "-")
        if dataclasses.is_dataclass(value):
            inner = "" if item.name in unprefixed else f"{before}{item.name}."
            rest += words(value, unprefixed, inner)
        elif "Positional" in str(item.type):
            first += _many(value)
        elif isinstance(value, bool):
            rest.append(flag if value else flag.replace("--" + before, "--" + before + "no-"))
        else:
            rest += [flag, *_many(value)]
    return [*first, *rest]


def _usual(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _many(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, tuple) else [str(value)]


EVALS = ("core", "probing", "absorption", "autointerp")


@dataclass(frozen=True)
class Reproduce:
    """Run the whole paper: synthetic data, a sweep of SAEs, all evaluations, comparisons, and the report of it all.

    Interrupted at any point, the same command goes on; what is finished is not done again.
    """

    out: Path
    """Folder for everything; reproduce.json in it says how far the work is, index.html shows it."""
    scale: Literal["tiny", "small", "paper"] = "tiny"
    """tiny: offline on two cores in a quarter of an hour; small: one GPU, within an hour, offline; paper: the paper's
    own sizes, with the hub's model and datasets."""
    only: tuple[str, ...] | None = None
    """Stages to run: synthetic, train, core, probing, absorption, autointerp, compare, report."""
    skip: tuple[str, ...] = ()
    """Stages to leave out."""
    dry_run: bool = False
    """Only say what would be done, how long it would take, and what it would need on disk."""
    text: str | None = None
    """Text instead of the scale's: hub dataset, a file, a folder of files, or stdlib."""
    datasets: tuple[str, ...] | None = None
    """Probing datasets instead of the scale's: those of SAEBench by name, or files."""
    embedder: str | None = None
    """Sentence embeddings instead of the scale's: a hub name, a folder, or minilm."""
    autointerp: Literal["offline", "chat"] = "offline"
    """Who explains and judges latents: statistics and sentence embeddings, or a chat endpoint."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    figures: bool = True
    """Whether the report writes its figures as files too, which takes kaleido and a Chrome or Chromium."""
    device: str | None = None
    """cpu, cuda, cuda:1 and so on; the GPU if there is one by default."""

    def run(self) -> None:
        from sampled_sae.utils.system import usable_device

        scale, place = self._scale(), usable_device(self.device)
        asked = chosen(stages(scale, self.out, self.device), self.only, self.skip)
        record = Record(self.out, self.scale)
        left = [stage for stage in asked if not record.is_done(stage)]
        names = {stage.name for stage in left}
        costs = [cost for cost in estimate(scale, place.type, product_speed(place)) if cost.stage in names]
        print_plan(self.scale, scale, costs, [stage.name for stage in asked if stage not in left])
        if self.dry_run:
            for line in (f"{stage.name}: {line}" for stage in left for line in stage.commands):
                print(line)
            return
        check_packages(scale, names)
        check_disk(self.out, peak(costs))
        guessed = record.content.get("estimate", {}) | {cost.stage: cost._asdict() for cost in costs}
        about = {"settings": scale.to_dict(), "device": str(place), "estimate": guessed}
        try:
            run_stages(asked, self.out, self.scale, about, say)
        finally:
            shared_model.cache_clear()
        if (self.out / "index.html").exists():
            print(f"Everything: {self.out / 'index.html'}")

    def _scale(self) -> Scale:
        """The scale with what was asked for instead."""
        scale = SCALES[self.scale]
        if self.text is not None:
            scale = replace(scale, text=self.text)
        if self.datasets is not None:
            scale = replace(scale, probing=replace(scale.probing, datasets=self.datasets))
        interp = scale.autointerp
        if self.embedder is not None:
            interp = replace(interp, embedder=self.embedder)
        if self.autointerp == "chat":
            interp = replace(interp, explainer="chat", judge="chat", chat=self.chat)
        return replace(scale, autointerp=interp, figures=scale.figures and self.figures)


def stages(scale: Scale, out: Path, device: str | None = None) -> list[Stage]:
    """All stages of a scale in their order, with their results in `out`."""
    return [
        _synthetic(scale, out, device),
        _train(scale, out, device),
        *(_eval(name, scale, out, device) for name in EVALS),
        _compare(scale, out, device),
        _report(scale, out),
    ]


def _synthetic(scale: Scale, out: Path, device: str | None) -> Stage:
    from sampled_sae.cli.synthetic import Synthetic

    given = {name: value for name, value in scale.synthetic.to_dict().items() if value is not None}
    for name in ("seeds", "scores", "multipliers"):
        if name in given:
            given[name] = tuple(given[name])
    command = Synthetic(out / "synthetic", **given, resume=True, device=device)
    leaves = (out / "synthetic" / "results.json", out / "synthetic" / "index.html")
    return Stage("synthetic", scale.synthetic.to_dict(), command.run, leaves, keeps=True, commands=(typed(command),))


TRAINED = (
    *("model", "layer", "text", "context", "tokens", "latents", "k", "scores", "multipliers", "others", "seeds"),
    *("seed_multiplier", "saes_a_run", "lr", "dead_after", "batch_size", "max_norm", "heldout_tokens", "buffer_tokens"),
)
"""What decides the SAEs."""


def _train(scale: Scale, out: Path, device: str | None) -> Stage:
    folder, runs = out / "train", scale.runs()
    names = ["all"] if len(runs) == 1 else [f"part-{number}" for number in range(1, len(runs) + 1)]
    source = Source(
        model=scale.model,
        text=scale.text,
        layer=(scale.layer,),
        context=scale.context,
        max_norm=scale.max_norm,
        heldout_tokens=scale.heldout_tokens,
        buffer_tokens=scale.buffer_tokens,
    )
    commands = [
        Train(
            folder / name,
            source=source,
            tokens=scale.tokens,
            batch_size=scale.batch_size,
            configs=folder / f"{name}.json",
            seeds=(scale.seeds[0],),
            checkpoint_every=scale.checkpoint_every,
            resume=True,
            device=device,
        )
        for name in names
    ]

    def run() -> None:
        make_folder(folder)
        for name, configs, command in zip(names, runs, commands, strict=True):
            write_json(folder / f"{name}.json", [config.to_dict() for config in configs])
            command.run()

    settings = {name: value for name, value in scale.to_dict().items() if name in TRAINED}
    leaves = tuple(folder / name / "run.json" for name in names)
    return Stage("train", settings, run, leaves, keeps=True, commands=tuple(typed(command) for command in commands))


def _eval(name: str, scale: Scale, out: Path, device: str | None) -> Stage:
    about: dict[str, Any] = {"evals": (name,), "out": out / "evals", "device": device}
    if name in ("core", "autointerp"):
        about["text"] = scale.text
    about |= {
        "core": {"contexts": scale.contexts},
        "probing": {"probing": _on_disk(scale, out)},
        "absorption": {"absorption": scale.absorption},
        "autointerp": {"autointerp": scale.autointerp, "interp_tokens": scale.interp_tokens},
    }[name]
    command = SharedEval((out / "train",), **about)

    def run() -> None:
        if name == "probing" and STAND_IN in scale.probing.datasets:
            write_labelled(_labelled(out), (scale.probing.train_texts + scale.probing.test_texts) // 2)
        command.run()

    own: dict[str, Any] = {
        "core": {"text": scale.text, "contexts": scale.contexts},
        "probing": scale.probing.to_dict(),
        "absorption": scale.absorption.to_dict(),
        "autointerp": {"text": scale.text, "interp_tokens": scale.interp_tokens, **scale.autointerp.to_dict()},
    }[name]
    leaves = (out / "evals" / "table.csv",)
    return Stage(name, own, run, leaves, needs=("train",), commands=(typed(command),))


def _labelled(out: Path) -> Path:
    return out / "texts" / f"{STAND_IN}.jsonl"


def _on_disk(scale: Scale, out: Path) -> Any:
    """The settings of probing with the stand-in's file in place of its name."""
    names = tuple(str(_labelled(out)) if name == STAND_IN else name for name in scale.probing.datasets)
    return replace(scale.probing, datasets=names)


def _compare(scale: Scale, out: Path, device: str | None) -> Stage:
    command = Compare((out / "train",), out / "compare", scale.similarity, scale.autointerp.embedder, device)
    settings = {"embedder": scale.autointerp.embedder, **scale.similarity.to_dict()}
    # Core knows which latents live, autointerp what they stand for.
    reads, commands = ("core", "autointerp"), (typed(command),)
    leaves = (out / "compare" / "compare.json",)
    return Stage("compare", settings, command.run, leaves, needs=("train",), reads=reads, commands=commands)


def _report(scale: Scale, out: Path) -> Stage:
    from sampled_sae.cli.report import Report

    def folders() -> tuple[Path, ...]:
        marks = {"train": "*/run.json", "compare": "compare.json", "synthetic": "results.json"}
        return tuple(out / name for name, mark in marks.items() if any((out / name).glob(mark)))

    def run() -> None:
        from sampled_sae.reporting.reproduce_page import write_front
        from sampled_sae.reporting.write import write_report

        if not folders():
            raise UserError(f"report: there is nothing in {out} yet; run another stage first")
        written = write_report(folders(), out / "report", figures=scale.figures)
        for note in [*written.notes, *(note for sweep in written.sweeps for note in sweep.notes)]:
            print(note, file=sys.stderr)
        print(f"Page: {written.page}")
        print(f"Front page: {write_front(out, written)}")

    words = Report(tuple(out / name for name in ("train", "compare", "synthetic")), out / "report")
    leaves = (out / "report" / "index.html", out / "index.html")
    reads = ("synthetic", "train", *EVALS, "compare")
    return Stage("report", {"figures": scale.figures}, run, leaves, reads=reads, commands=(typed(words),))


@functools.lru_cache(maxsize=1)
def shared_model(name: str, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """The model of the evaluations, loaded for the first of them."""
    from sampled_sae.models.load import load_model

    return load_model(name, device, dtype)


@dataclass(frozen=True)
class SharedEval(Eval):
    """`sampled-sae eval` with the model of the stage before."""

    def _load(self, name: str, device: torch.device, dtype: torch.dtype) -> LanguageModel:
        return shared_model(name, device, dtype)
