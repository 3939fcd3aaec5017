"""`sampled-sae resume`: continue a training, or extend a finished one, from its folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import tyro


@dataclass(frozen=True)
class Resume:
    """Continue an interrupted training, or extend a finished one; model, text and settings are those of its folder."""

    folder: tyro.conf.Positional[Path]
    """Folder of the training: its --out."""
    extend: int | None = None
    """Further steps of a finished training. Adam and the learning rate's schedule begin anew over these steps: warm-up,
    the same peak, decay to the end. Pools stay as in the last step."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the kind that the training began on."""
    divide: str = "auto"
    """Under torchrun, how its processes share the work, as for `sampled-sae train`."""
    load_scores: tuple[Path, ...] = ()
    """Python files that register custom scores."""

    EXAMPLES: ClassVar[Sequence[str]] = (
        "runs/a",
        "runs/a --extend 2000",
        "runs/a --device cuda:1 --load-scores my_score.py",
    )

    def run(self) -> None:
        from sampled_sae.api import resume
        from sampled_sae.cli.train import print_saes
        from sampled_sae.method.scores import load_scores
        from sampled_sae.utils.ranks import leave

        for script in self.load_scores:
            load_scores(script)
        print_saes(resume(self.folder, extend=self.extend, device=self.device, keep=False, divide=self.divide))
        leave()
