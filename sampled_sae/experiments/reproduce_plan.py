"""Before a reproduction starts: what it will take, and whether what it needs is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Collection, Sequence

from sampled_sae.errors import UserError
from sampled_sae.evals.autointerp.config import estimate_calls
from sampled_sae.experiments.reproduce_estimate import Cost, peak
from sampled_sae.experiments.reproduce_scales import Scale

NEEDED = {
    "synthetic": {"scipy": "experiments", "plotly": "experiments"},
    "train": {"transformers": "lm"},
    "compare": {"scipy": "evals"},
    "report": {"plotly": "report"},
}
"""Packages of each stage, by the extra that they come with."""


def check_packages(scale: Scale, names: Collection[str]) -> None:
    """Better to miss a package before the work than after hours of it."""
    from sampled_sae.data.models import PACKAGED as MODELS
    from sampled_sae.evals.embed import PACKAGED as EMBEDDERS

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

    from sampled_sae.progress import clock

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
