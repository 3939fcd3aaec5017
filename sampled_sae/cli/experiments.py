"""`sampled-sae reproduce`, `synthetic`, `merge` and `study`: the paper, its synthetic experiment, declared studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro

from sampled_sae.config import require
from sampled_sae.evals.autointerp.chat import ChatConfig
from sampled_sae.experiments.scales import SCALES, Scale
from sampled_sae.utils.errors import UserError


@dataclass(frozen=True)
class Reproduce:
    """Run the whole paper: synthetic data, a sweep of SAEs, all evaluations, comparisons, and a report.

    Run the same command again to continue after an interruption; finished stages are skipped.
    """

    out: Path
    """Folder for everything; reproduce.json in it records the finished stages, index.html shows the results."""
    scale: Literal["tiny", "small", "paper"] = "tiny"
    """tiny: offline on two cores in a quarter of an hour; small: one GPU, within an hour, offline; paper: the paper's
    own sizes, with the hub's model and datasets."""
    only: tuple[str, ...] | None = None
    """Stages to run: synthetic, train, core, probing, absorption, autointerp, compare, report."""
    skip: tuple[str, ...] = ()
    """Stages to skip."""
    dry_run: bool = False
    """Only print the stages, their commands, and how much time and disk they need."""
    text: str | None = None
    """Text that replaces the scale's: hub dataset, a file, a folder of files, or stdlib."""
    datasets: tuple[str, ...] | None = None
    """Probing datasets that replace the scale's: those of SAEBench by name, or files."""
    embedder: str | None = None
    """Sentence embedder that replaces the scale's: a hub name, a folder, or minilm."""
    autointerp: Literal["offline", "chat"] = "offline"
    """Explainer and judge of latents: statistics and sentence embeddings, or a chat endpoint."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    figures: bool = True
    """Write the report's figures as files too, which needs kaleido and Chrome or Chromium."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the GPU, if there is one."""

    GROUPS: ClassVar[Mapping[str, Sequence[str]]] = {
        "Run": ("out", "scale", "only", "skip", "dry_run", "device"),
        "Sources": ("text", "datasets", "embedder", "autointerp"),
        "Report": ("figures",),
    }
    EXAMPLES: ClassVar[Sequence[str]] = (
        "--scale tiny --out runs/paper",
        "--scale small --dry-run --out runs/paper",
        "--scale tiny --only train core report --out runs/paper",
    )

    def run(self) -> None:
        from sampled_sae.experiments.reproduce import reproduce

        reproduce(
            self.out,
            self.scale,
            settings=self.settings(),
            only=self.only,
            skip=self.skip,
            dry_run=self.dry_run,
            device=self.device,
        )

    def settings(self) -> Scale:
        """The scale with the given values."""
        scale = SCALES[self.scale]
        probing, interp = scale.probing, scale.autointerp
        if self.datasets is not None:
            probing = replace(probing, datasets=self.datasets)
        if self.autointerp == "chat":
            interp = replace(interp, explainer="chat", judge="chat", chat=self.chat)
        elif self.chat != ChatConfig():
            raise UserError("chat: has no effect without --autointerp chat")
        interp = replace(interp, embedder=self.embedder or interp.embedder)
        figures = scale.figures and self.figures
        return replace(scale, text=self.text or scale.text, probing=probing, autointerp=interp, figures=figures)


VALUES = ("seeds", "scores", "multipliers", "steps", "samples", "only", "data", "buckets", "coefficients")
"""Flags that replace a value of the preset."""


@dataclass(frozen=True)
class Synthetic:
    """The paper's synthetic experiment: known features, a grid of SAEs, a table and a page."""

    out: Path
    """Folder for the results, the page, the SAEs, the log and the checkpoints."""
    preset: Literal["demo", "paper", "paper-table", "paper-table-p20", "paper-finite", "synthsaebench"] = "demo"
    """demo: minutes on a laptop; paper: as the paper states it; paper-table: fresh samples, three seeds, for a GPU;
    paper-table-p20: the same with p = 0.20 for frequent features; paper-finite: 10,000 samples and 65,536 latents;
    synthsaebench: data after the specification of SynthSAEBench-16k, 20M samples. Other flags replace its
    values."""
    seeds: tuple[int, ...] | None = None
    """Seeds; each SAE is trained once with each."""
    scores: tuple[str, ...] | None = None
    """Scores of the constant pools."""
    multipliers: tuple[float, ...] | None = None
    """Pool multipliers l."""
    steps: int | None = None
    """Optimizer steps."""
    data: Literal["l0-61", "p-20"] | None = None
    """Reading of the paper's numbers: expected L0 of 61.5 (p = 0.107 for frequent features), or p = 0.20."""
    buckets: Literal["equal", "random"] | None = None
    """Features in equal shares for each bucket, or each in a random one."""
    coefficients: Literal["signed", "non_negative"] | None = None
    """Coefficients of both signs, or their absolute values."""
    samples: int | None = None
    """Size of a fixed training set."""
    only: tuple[str, ...] | None = None
    """Labels of the SAEs to train, as the table prints them."""
    resume: bool = False
    """Continue from the last checkpoint in `out`."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the GPU, if there is one."""
    load_scores: tuple[Path, ...] = ()
    """Python files that register custom scores."""

    GROUPS: ClassVar[Mapping[str, Sequence[str]]] = {
        "Run": ("out", "preset", "steps", "resume", "device"),
        "SAEs": ("scores", "multipliers", "seeds", "only", "load_scores"),
        "Data": ("data", "buckets", "coefficients", "samples"),
    }
    EXAMPLES: ClassVar[Sequence[str]] = (
        "--out demo",
        "--preset paper-table --seeds 0 1 2 --out runs/table",
        "--preset demo --scores l2 entropy --multipliers 5 30 --steps 500 --out runs/small",
    )

    def run(self) -> None:
        from sampled_sae.experiments import synthetic
        from sampled_sae.method.scores import load_scores

        for script in self.load_scores:
            load_scores(script)
        experiment = synthetic.experiment(self.preset, **{name: getattr(self, name) for name in VALUES})
        results = synthetic.run(self.preset, experiment, self.out, resume=self.resume, device=self.device)
        synthetic.show(results, self.out)


@dataclass(frozen=True)
class Merge:
    """Merge the results of several runs of the synthetic experiment, such as other seeds or runs on other machines."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders with a results.json each."""
    out: Path
    """Folder for the merged results and their page."""

    EXAMPLES: ClassVar[Sequence[str]] = (
        "runs/seed0 runs/seed1 --out runs/both",
        "runs/gpu runs/laptop --out runs/merged",
        "runs/part-* --out runs/all",
    )

    def run(self) -> None:
        from sampled_sae.experiments import synthetic

        synthetic.show(synthetic.merge(self.folders, self.out), self.out)


TEXTS = ("train_text", "select_text", "report_text")


def _pairs(field: str, given: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """NAME=PATH for each of some known names, as a dict."""
    found = dict((name, path) for name, _, path in (one.partition("=") for one in given))
    for name, path in found.items():
        right = f"must be NAME=PATH, with NAME among {', '.join(dict.fromkeys(known))}"
        require(path != "" and name in known, field, f"{name}={path}" if path else name, right)
    return found


@dataclass(frozen=True)
class StudyCommand:
    """Compare methods by a design that is declared before the runs: train, measure, paired differences, verdicts."""

    design: tyro.conf.Positional[Path]
    """JSON file with tokens, batch_size, settings, methods, stages and claims."""
    do: Literal["plan", "run", "autointerp", "tables"] = "plan"
    """plan: print what each stage has still to train, and estimated GPU minutes; run: train and measure what is not
    finished; autointerp: judge the latents that run has kept for it; tables: write the page with the results."""
    out: Path = Path("runs/study")
    """Folder of results.jsonl."""
    page: Path | None = None
    """tables: Markdown page whose tables are replaced. Default: results.md in --out."""
    figures: Path | None = None
    """tables: folder for figures as PNG. Default: no figures."""
    train_text: str | None = None
    """run: training text."""
    select_text: str | None = None
    """run: text for choosing learning rates and thresholds."""
    report_text: str | None = None
    """run: text for the reported core metrics."""
    tokens: int = 131_072
    """run: tokens of each of these two, evenly spaced over the text, or over its first tokens, 128 times as many."""
    probing: tuple[str, ...] = ()
    """run: datasets of the measure probing."""
    models: tuple[str, ...] = ()
    """run: folders or .gguf files of models in the design, as NAME=PATH. Default: the hub."""
    stages: tuple[str, ...] = ()
    """run: stages to run, in this order. Default: all."""
    words: int | None = None
    """run: words of absorption. Default: all."""
    until: float | None = None
    """run: time limit in seconds; nothing is started that would end after it. Default: no limit."""
    embedder: str | None = None
    """autointerp: sentence embeddings of the judge: a hub name, a folder, or minilm. Default: all-mpnet-base-v2."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the GPU, if there is one."""

    GROUPS: ClassVar[Mapping[str, Sequence[str]]] = {
        "Study": ("design", "do", "out", "embedder", "device"),
        "Run": ("train_text", "select_text", "report_text", "tokens", "models", "probing", "stages", "words", "until"),
        "Tables": ("page", "figures"),
    }
    EXAMPLES: ClassVar[Sequence[str]] = (
        "design.json",
        "design.json --do run --train-text a.jsonl --select-text b.jsonl --report-text c.jsonl --out runs/study",
        "design.json --do tables --out runs/study --page results.md",
    )

    def run(self) -> None:
        from sampled_sae.experiments import study
        from sampled_sae.experiments.design import load_study, plan
        from sampled_sae.experiments.results import write_results
        from sampled_sae.reporting.study import read_rows

        declared = load_study(self.design)
        if self.do == "plan":
            found = plan(declared, read_rows(self.out / study.RESULTS, declared.settings))
            total = [sum(values) for values in zip(*(row[1:] for row in found), strict=True)]
            for name, saes, training, whole in (*found, ("all", *total)):
                print(f"{name:16} {saes:4.0f} SAEs  {training:5.1f} min of training  {whole:5.1f} min in all")
        elif self.do == "tables":
            for path in write_results(declared, self.out, self.page or self.out / "results.md", self.figures):
                print(path)
        else:
            texts = [getattr(self, name) for name in TEXTS]
            if None in texts:
                missing = TEXTS[texts.index(None)]
                raise UserError(f"{missing}: must name a text; run trains, selects and reports on three different ones")
            train, select, report = texts
            models = _pairs("models", self.models, [setting.model for setting in declared.settings.values()])
            given: dict[str, Any] = {
                "tokens": self.tokens,
                "probing": self.probing,
                "words": self.words,
                "models": models,
            }
            material = study.Material(train, select, report, **given)
            if self.do == "autointerp":
                print(study.judge_slices(declared, material, self.out, self.embedder, device=self.device))
            else:
                whole = study.run_study(declared, material, self.out, self.stages, self.device, self.until)
                print(self.out / study.RESULTS, "" if whole else "(not finished: the same command continues)")
