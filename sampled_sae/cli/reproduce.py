"""`sampled-sae reproduce`: the paper from end to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from sampled_sae.evals.autointerp.chat import ChatConfig
from sampled_sae.experiments.scales import SCALES, Scale


@dataclass(frozen=True)
class Reproduce:
    """Run the whole paper: synthetic data, a sweep of SAEs, all evaluations, comparisons, and a report.

    After an interruption the same command continues; finished stages are not run again.
    """

    out: Path
    """Folder for everything; reproduce.json in it records the finished stages, index.html shows the results."""
    scale: Literal["tiny", "small", "paper"] = "tiny"
    """tiny: offline on two cores in a quarter of an hour; small: one GPU, within an hour, offline; paper: the paper's
    own sizes, with the hub's model and datasets."""
    only: tuple[str, ...] | None = None
    """Stages to run: synthetic, train, core, probing, absorption, autointerp, compare, report."""
    skip: tuple[str, ...] = ()
    """Stages to leave out."""
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
    """Write the report's figures as files too, which takes kaleido and a Chrome or Chromium."""
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
        interp = replace(interp, embedder=self.embedder or interp.embedder)
        figures = scale.figures and self.figures
        return replace(scale, text=self.text or scale.text, probing=probing, autointerp=interp, figures=figures)
