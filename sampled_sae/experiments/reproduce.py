"""Before a reproduction starts: what it will take, and whether what it needs is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace

from sampled_sae.evals import registry
from sampled_sae.evals.autointerp.schema import estimate_calls
from sampled_sae.experiments.scales import Scale
from sampled_sae.experiments.synthetic import EXPERIMENTS, grid
from sampled_sae.training.checkpoint import KEEP
from sampled_sae.utils.cost import SPEEDS, Cost, Workload, peak
from sampled_sae.utils.errors import UserError

NEEDED = {
    "synthetic": {"scipy": "experiments", "plotly": "experiments"},
    "train": {"transformers": "lm"},
    "compare": {"scipy": "evals"},
    "report": {"plotly": "report"},
}
"""Packages of each stage, by the extra that they come with."""
PAGE = 12_000_000
"""Bytes of a page with its figures and tables."""


def check_packages(scale: Scale, names: Collection[str]) -> None:
    """Better to miss a package before the work than after hours of it."""
    from sampled_sae.models.embedder import PACKAGED as EMBEDDERS
    from sampled_sae.models.load import PACKAGED as MODELS

    for name in names:
        for package, extra in NEEDED.get(name, {}).items():
            if importlib.util.find_spec(package) is None:
                raise UserError(f"{package} is missing; pip install 'sampled-sae[{extra}]'")
    carried = [MODELS.get(scale.model)] * ("train" in names)
    carried += [EMBEDDERS.get(scale.autointerp.embedder or "")] * ("autointerp" in names)
    for package in filter(None, carried):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UserError(f"{package} is missing; pip install --no-deps {package}") from None


def print_plan(name: str, scale: Scale, costs: Sequence[Cost], done: Sequence[str]) -> None:
    """What will be done, how long it takes, and what it needs on disk."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sampled_sae.utils.progress import clock

    console = Console(width=None if sys.stdout.isatty() else 120)
    saes = f"{len(scale.saes())} SAEs of {scale.latents:,} latents on {scale.tokens:,} tokens of {scale.text}"
    console.print(Text(f"{name}: {scale.model}, layer {scale.layer}; {saes}"))
    if done:
        console.print(Text(f"Finished before: {', '.join(done)}"))
    if not costs:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    for head in ("about", "stays on disk", "more meanwhile"):
        table.add_column(head, justify="right")
    for cost in costs:
        table.add_row(cost.stage, clock(cost.seconds), _size(cost.kept), _size(cost.meanwhile))
    kept, most = sum(cost.kept for cost in costs), f"{_size(peak(costs))} at the peak"
    table.add_row("all", clock(sum(cost.seconds for cost in costs)), _size(kept), most)
    console.print(table)
    console.print(Text("Estimated from shapes and the speed of a product, measured just now; downloads come on top."))
    if scale.autointerp.uses_chat:
        calls = estimate_calls(scale.autointerp, len(scale.saes()))
        asked = f"at most {calls.calls:,} calls, about {calls.prompt_tokens:,} tokens of questions"
        console.print(Text(f"The chat endpoint is asked on top of that: {asked}."))


def _size(size: int) -> str:
    return "-" if not size else f"{size / 1e9:.2f} GB"


def estimate(scale: Scale, kind: str, product: float) -> list[Cost]:
    """The stages in their order, on a device of this kind ("cpu" or "cuda") with this product speed in FLOP/s."""
    saes, speed = scale.saes(), SPEEDS.get(kind, SPEEDS["cpu"])
    work = Workload(scale.shape, scale.layer, scale.context, scale.latents, len(saes), speed, product)
    figures = speed.figures if scale.figures else speed.figures / 6
    return [
        _synthetic(scale, work),
        _train(scale, work),
        *(registry()[name].cost(config, work) for name, config in scale.evaluations().items()),
        _compare(scale, work),
        Cost("report", figures, PAGE, 0),
    ]


def _bytes(d_sae: int, d_in: int) -> int:
    """Of the weights of one SAE, in 32 bits."""
    return 4 * (2 * d_sae * d_in + d_sae + d_in)


def _synthetic(scale: Scale, work: Workload) -> Cost:
    asked = scale.synthetic
    given = {name: getattr(asked, name) for name in ("steps", "seeds", "scores", "multipliers")}
    experiment = replace(EXPERIMENTS[asked.preset], **{name: v for name, v in given.items() if v is not None})
    m, d = experiment.latents, experiment.data.d
    saes = len(grid(experiment)) * len(experiment.seeds)
    step = work.step(m, d, experiment.batch_size)
    encode = 2 * m * d / (work.rate * work.speed.encode) + work.speed.element * m
    matching = work.speed.matching * m * experiment.data.features
    size = saes * _bytes(m, d)
    seconds = saes * (experiment.steps * step + 6 * experiment.heldout * encode + matching)
    return Cost("synthetic", seconds, size + PAGE, 3 * size * min(KEEP + 1, 5))


def _train(scale: Scale, work: Workload) -> Cost:
    width, runs = scale.shape.width, scale.runs()
    steps = max(1, scale.tokens // scale.batch_size)
    tokens = steps * scale.batch_size + scale.heldout_tokens
    seconds = len(runs) * (work.read(tokens) + work.speed.load)
    seconds += work.saes * steps * work.step(scale.latents, width, scale.batch_size)
    sizes = [sum(_bytes(config.d_sae, width) for config in run) for run in runs]
    # Weights and Adam's two moments; the newest ones and the one that is being written.
    checkpoints = min(KEEP + 1, -(-steps // scale.checkpoint_every))
    return Cost("train", seconds, sum(sizes), 3 * max(sizes) * checkpoints)


def _compare(scale: Scale, work: Workload) -> Cost:
    """Seeds with each other, and each configuration with the reference."""
    seeds, scored, cosines = len(scale.seeds), len(scale.scores), scale.latents**2
    pairs = (1 + scored) * seeds * (seeds - 1) // 2 + work.saes - seeds
    each = 2 * cosines * scale.shape.width / (work.rate * work.speed.encode)
    matched = scale.similarity.matching != "none" and scale.latents <= scale.similarity.exact_up_to
    each += work.speed.matching * cosines if matched else 0
    return Cost("compare", pairs * each + work.speed.load, 200_000 * work.saes, 0)
