"""Before a reproduction starts: what it will take, and whether what it needs is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Collection, Sequence

from sampled_sae.evals.autointerp.schema import estimate_calls
from sampled_sae.experiments.scales import Scale
from sampled_sae.training.checkpoint import KEEP
from sampled_sae.utils.cost import PAGE, SPEEDS, Cost, Work, peak
from sampled_sae.utils.errors import UserError

NEEDED = {
    "synthetic": {"scipy": "experiments", "plotly": "experiments"},
    "train": {"transformers": "lm"},
    "compare": {"scipy": "evals"},
    "report": {"plotly": "report"},
}
"""Packages of each stage, by the extra that they come with."""


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
    work = Work(scale, SPEEDS.get(kind, SPEEDS["cpu"]), product)
    size = sum(work.bytes_of(config.d_sae, scale.shape.width) for config in scale.saes())
    # Weights and Adam's two moments; the newest ones and the one that is being written.
    checkpoints = min(KEEP + 1, -(-work.steps // scale.checkpoint_every))
    largest = max(sum(work.bytes_of(c.d_sae, scale.shape.width) for c in run) for run in scale.runs())
    results = 2_000_000 * len(scale.saes())
    return [
        work.synthetic(),
        Cost("train", work.train(), size, 3 * largest * checkpoints),
        Cost("core", work.core(), results // 10, 0),
        Cost("probing", work.probing(), results // 10, 0),
        Cost("absorption", work.absorption(), results // 10, 0),
        Cost("autointerp", work.autointerp(), results, 0),
        Cost("compare", work.compare(), results // 10, 0),
        Cost("report", work.speed.figures if scale.figures else work.speed.figures / 6, PAGE, 0),
    ]
