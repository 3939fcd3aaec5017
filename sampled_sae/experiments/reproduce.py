"""The paper from end to end: stages that call the public functions, an estimate of their cost, a page of results."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sampled_sae import api
from sampled_sae.evals import registry
from sampled_sae.experiments import synthetic
from sampled_sae.experiments.scales import SCALES, STAND_IN, Scale, write_labelled
from sampled_sae.experiments.stages import Record, Stage, changed, check_disk, chosen, run_stages, typed
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.training.checkpoint import KEEP
from sampled_sae.utils.cost import SPEEDS, Cost, Workload, peak, product_speed
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.system import usable_device
from sampled_sae.utils.third_party import require_package

NEEDED = {
    "synthetic": {"scipy": "experiments", "plotly": "experiments"},
    "train": {"transformers": "lm"},
    "compare": {"scipy": "evals"},
    "report": {"plotly": "report"},
}
"""Packages of each stage, by the extra that installs them."""
PAGE = 12_000_000  # bytes of a page with its figures and tables
OF_TRAINING = (
    *("model", "layer", "text", "context", "tokens", "d_sae", "k", "scores", "multipliers", "others", "seeds"),
    *("seed_multiplier", "saes_per_run", "lr", "dead_after", "batch_size", "high_norm_factor", "heldout_tokens"),
    "buffer_tokens",
)
"""Fields of a scale that decide the SAEs."""


def reproduce(
    out: str | Path,
    scale: str = "tiny",
    *,
    settings: Scale | None = None,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    dry_run: bool = False,
    device: str | None = None,
) -> None:
    """Run the stages of a scale that are not finished in `out`; the same call continues after an interruption.

    `settings` replaces those of the named scale. `dry_run` prints the plan and the commands, and does nothing.
    """
    out, place = Path(out), usable_device(device)
    work = Paper(settings or SCALES[scale], out, device)
    asked = chosen(work.stages(), only, skip)
    record = Record(out, scale)
    left = [stage for stage in asked if not record.is_done(stage)]
    names = {stage.name for stage in left}
    costs = [cost for cost in estimate(work.scale, place.type, product_speed(place)) if cost.stage in names]
    print_plan(scale, work.scale, costs, [stage.name for stage in asked if stage not in left])
    if dry_run:
        for stage in left:
            print(*(f"{stage.name}: {line}" for line in stage.commands), sep="\n")
        return
    check_packages(work.scale, names)
    check_disk(out, peak(costs))
    estimates = record.content.get("estimate", {}) | {cost.stage: cost._asdict() for cost in costs}
    run_stages(asked, out, scale, {"settings": work.scale.to_dict(), "device": str(place), "estimate": estimates})
    if (out / "index.html").exists():
        print(f"All results: {out / 'index.html'}")


@dataclass(frozen=True)
class Paper:
    """The stages of the paper at one scale, with their results in `out`."""

    scale: Scale
    out: Path
    device: str | None = None

    @cached_property
    def model(self) -> LanguageModel:
        """The language model of training and evaluations, loaded for the first of them."""
        return api.load_model(self.scale.model, self.device)

    def stages(self) -> list[Stage]:
        """All stages in their order."""
        evaluations = [self._evaluate(name, config) for name, config in self.scale.evaluations().items()]
        return [self._synthetic(), self._train(), *evaluations, self._compare(), self._report()]

    def _synthetic(self) -> Stage:
        folder, part = self.out / "synthetic", self.scale.synthetic.to_dict()

        def run() -> None:
            experiment = synthetic.experiment(**part)
            synthetic.show(synthetic.run(part["preset"], experiment, folder, resume=True, device=self.device), folder)

        command = typed("synthetic", out=folder, resume=True, device=self.device, **part)
        leaves = (folder / "results.json", folder / "index.html")
        return Stage("synthetic", part, run, leaves, keeps=True, commands=(command,))

    def _train(self) -> Stage:
        scale, folder, runs = self.scale, self.out / "train", self.scale.runs()
        names = ["all"] if len(runs) == 1 else [f"part-{number}" for number in range(1, len(runs) + 1)]
        collected = {name: getattr(scale, name) for name in ("context", "buffer_tokens", "high_norm_factor")}
        common = {name: getattr(scale, name) for name in ("tokens", "batch_size", "heldout_tokens", "checkpoint_every")}
        common["input_norm"] = "one"  # as `scale.saes()` has the paper's recipe

        def run() -> None:
            from sampled_sae.utils.files import make_folder, write_json

            make_folder(folder)
            source = api.activations(self.model, scale.text, scale.layer, **collected)
            for name, configs in zip(names, runs, strict=True):
                write_json(folder / f"{name}.json", [config.to_dict() for config in configs])
                settings: dict[str, Any] = common | {"seed": scale.seeds[0], "resume": True, "device": self.device}
                api.train(source, configs, out=folder / name, **settings)

        about = {"model": scale.model, "text": scale.text, "layer": scale.layer, "resume": True, "device": self.device}
        about |= {f"source.{name}": value for name, value in collected.items()} | common | {"seeds": scale.seeds[0]}
        commands = [typed("train", out=folder / name, configs=folder / f"{name}.json", **about) for name in names]
        settings = {name: value for name, value in scale.to_dict().items() if name in OF_TRAINING}
        leaves = tuple(folder / name / "run.json" for name in names)
        return Stage("train", settings, run, leaves, keeps=True, commands=tuple(commands))

    def _evaluate(self, name: str, config: Any) -> Stage:
        folder, labelled = self.out / "evals", self.out / "texts" / f"{STAND_IN}.jsonl"
        text = self.scale.text if registry()[name].needs.text else None
        used = config
        if name == "probing":
            files = (str(labelled) if dataset == STAND_IN else dataset for dataset in config.datasets)
            used = replace(config, datasets=tuple(files))

        def run() -> None:
            if used != config:
                write_labelled(labelled, (config.train_texts + config.test_texts) // 2)
            print(api.evaluate(self.out / "train", self.model, [used], text=text, out=folder, device=self.device))

        about = {"evals": name, "text": text, "out": folder, "device": self.device, name: used}
        settings = ({} if text is None else {"text": text}) | config.to_dict()
        command = typed("eval", self.out / "train", **about)
        return Stage(name, settings, run, (folder / "table.csv",), needs=("train",), commands=(command,))

    def _compare(self) -> Stage:
        folder, config, embedder = self.out / "compare", self.scale.similarity, self.scale.autointerp.embedder

        def run() -> None:
            from sampled_sae.reporting.comparison import print_comparison

            found = api.compare(self.out / "train", config=config, embedder=embedder, out=folder, device=self.device)
            print_comparison(found.to_dict())

        command = typed(
            "compare", self.out / "train", out=folder, embedder=embedder, device=self.device, **changed(config)
        )
        settings = {"embedder": embedder, **config.to_dict()}
        # Core counts which latents fire, autointerp explains them.
        reads, leaves = ("core", "autointerp"), (folder / "compare.json",)
        return Stage("compare", settings, run, leaves, needs=("train",), reads=reads, commands=(command,))

    def _report(self) -> Stage:
        marks = {"train": "*/run.json", "compare": "compare.json", "synthetic": "results.json"}

        def run() -> None:
            from sampled_sae.reporting.report_page import write_front

            folders = [self.out / name for name, mark in marks.items() if any((self.out / name).glob(mark))]
            if not folders:
                raise UserError(f"report: there is nothing in {self.out} yet; run another stage first")
            written = api.report(folders, self.out / "report", figures=self.scale.figures)
            for note in [*written.notes, *(note for sweep in written.sweeps for note in sweep.notes)]:
                print(note, file=sys.stderr)
            print(f"Page: {written.page}\nFront page: {write_front(self.out, written.paper_tables)}")

        command = typed("report", *(self.out / name for name in marks), out=self.out / "report")
        leaves = (self.out / "report" / "index.html", self.out / "index.html")
        reads = ("synthetic", "train", *self.scale.evaluations(), "compare")
        return Stage("report", {"figures": self.scale.figures}, run, leaves, reads=reads, commands=(command,))


# ---- before the start -------------------------------------------------------------------------------


def check_packages(scale: Scale, names: Collection[str]) -> None:
    """Refuse to start without a package that a later stage needs."""
    from sampled_sae.models.embedder import PACKAGED as EMBEDDERS
    from sampled_sae.models.load import PACKAGED as MODELS

    for name in names:
        for package, extra in NEEDED.get(name, {}).items():
            require_package(package, extra)
    carried = [MODELS.get(scale.model)] * ("train" in names)
    carried += [EMBEDDERS.get(scale.autointerp.embedder or "")] * ("autointerp" in names)
    for package in filter(None, carried):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UserError(f"{package} is missing; pip install --no-deps {package}") from None


def print_plan(name: str, scale: Scale, costs: Sequence[Cost], done: Sequence[str]) -> None:
    """Print what will be done, how long it takes, and what it needs on disk."""
    from rich.table import Table

    from sampled_sae.evals.autointerp.schema import estimate_calls
    from sampled_sae.reporting.tables import console_of, safe
    from sampled_sae.utils.progress import clock

    def size(count: int) -> str:
        return f"{count / 1e9:.2f} GB" if count else "-"

    console = console_of(120)
    saes = f"{len(scale.saes())} SAEs of {scale.d_sae:,} latents on {scale.tokens:,} tokens of {scale.text}"
    console.print(safe(f"{name}: {scale.model}, layer {scale.layer}; {saes}"))
    if done:
        console.print(safe(f"Finished before: {', '.join(done)}"))
    if not costs:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    for head in ("time", "disk", "extra disk while running"):
        table.add_column(head, justify="right")
    for cost in costs:
        table.add_row(cost.stage, clock(cost.seconds), size(cost.kept), size(cost.meanwhile))
    kept, most = sum(cost.kept for cost in costs), f"{size(peak(costs))} at the peak"
    table.add_row("all", clock(sum(cost.seconds for cost in costs)), size(kept), most)
    console.print(table)
    console.print(safe("Estimated from shapes and the measured speed of a matrix product; downloads not included."))
    if scale.autointerp.uses_chat:
        calls = estimate_calls(scale.autointerp, len(scale.saes()))
        asked = f"at most {calls.calls:,} calls, about {calls.prompt_tokens:,} prompt tokens"
        console.print(safe(f"Calls of the chat endpoint, not included: {asked}."))


def estimate(scale: Scale, kind: str, product: float) -> list[Cost]:
    """The cost of each stage, on a device of this kind ("cpu" or "cuda") with this product speed in FLOP/s."""
    saes, speed = scale.saes(), SPEEDS.get(kind, SPEEDS["cpu"])
    work = Workload(scale.shape, scale.layer, scale.context, scale.d_sae, len(saes), speed, product)
    figures = speed.figures if scale.figures else speed.figures / 6
    return [
        _cost_of_synthetic(scale, work),
        _cost_of_training(scale, work),
        *(registry()[name].cost(config, work) for name, config in scale.evaluations().items()),
        _cost_of_comparing(scale, work),
        Cost("report", figures, PAGE, 0),
    ]


def _bytes(d_sae: int, d_in: int) -> int:
    """Of the weights of one SAE, in 32 bits."""
    return 4 * (2 * d_sae * d_in + d_sae + d_in)


def _cost_of_synthetic(scale: Scale, work: Workload) -> Cost:
    experiment = synthetic.experiment(**scale.synthetic.to_dict())
    m, d = experiment.d_sae, experiment.data.d
    saes = len(synthetic.grid(experiment)) * len(experiment.seeds)
    step = work.step(m, d, experiment.batch_size)
    encode = 2 * m * d / (work.rate * work.speed.encode) + work.speed.element * m
    matching = work.speed.matching * m * experiment.data.features
    size = saes * _bytes(m, d)
    seconds = saes * (experiment.steps * step + 6 * experiment.heldout * encode + matching)
    return Cost("synthetic", seconds, size + PAGE, 3 * size * min(KEEP + 1, 5))


def _cost_of_training(scale: Scale, work: Workload) -> Cost:
    width, runs = scale.shape.width, scale.runs()
    steps = max(1, scale.tokens // scale.batch_size)
    tokens = steps * scale.batch_size + scale.heldout_tokens
    seconds = len(runs) * (work.read(tokens) + work.speed.load)
    seconds += work.saes * steps * work.step(scale.d_sae, width, scale.batch_size)
    sizes = [sum(_bytes(config.d_sae, width) for config in run) for run in runs]
    # Weights and Adam's two moments; the newest ones and the one that is being written.
    checkpoints = min(KEEP + 1, -(-steps // scale.checkpoint_every))
    return Cost("train", seconds, sum(sizes), 3 * max(sizes) * checkpoints)


def _cost_of_comparing(scale: Scale, work: Workload) -> Cost:
    """Seeds with each other, and each configuration with the reference."""
    seeds, scored, cosines = len(scale.seeds), len(scale.scores), scale.d_sae**2
    pairs = (1 + scored) * seeds * (seeds - 1) // 2 + work.saes - seeds
    each = 2 * cosines * scale.shape.width / (work.rate * work.speed.encode)
    matched = scale.similarity.matching != "none" and scale.d_sae <= scale.similarity.exact_up_to
    each += work.speed.matching * cosines if matched else 0
    return Cost("compare", pairs * each + work.speed.load, 200_000 * work.saes, 0)
