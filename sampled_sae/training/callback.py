"""The base class of callbacks; imports nothing that takes time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from sampled_sae.sae import SAE
    from sampled_sae.training.learner import Learner, Stats
    from sampled_sae.training.run import Run


class Callback:
    """What to do at each step, checkpoint and end of a run; every method is optional."""

    def needs_stats(self, step: int) -> bool:
        """Whether this step must be measured."""
        return False

    def on_batch(self, run: Run, step: int, x: Tensor) -> None:
        """Before the steps of all SAEs on x [batch, d_in], in the units of training."""

    def on_step(self, run: Run, learner: Learner, step: int, stats: Stats | None) -> None:
        """After each SAE's step; `stats` are floats if any callback needs them. May raise `Interrupted`."""

    def on_checkpoint(self, run: Run, step: int, folder: Path) -> None:
        """After a checkpoint of `step` steps is complete."""

    def on_end(self, run: Run, saes: list[SAE] | None) -> None:
        """Always called once a run has begun; None if it stopped early."""
