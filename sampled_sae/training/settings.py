"""Settings of a training that all its SAEs share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sampled_sae.config import Config, Count, Positive, Seed, require

InputNorm = Literal["sqrt_d_in", "one", "none"]


@dataclass(frozen=True, slots=True)
class TrainConfig(Config):
    """Settings that all SAEs of a run share."""

    steps: Positive
    """Optimizer steps."""
    batch_size: Positive = 4096
    """Tokens per step."""
    seed: Seed = 0
    """Seed of the data order, and of each SAE without a seed of its own."""
    input_norm: InputNorm = "sqrt_d_in"
    """Root mean square norm that the inputs are scaled to in training; saved SAEs take raw activations all the same."""
    heldout_tokens: Positive = 65_536
    """Tokens kept out of training to measure c and to calibrate the threshold; at most a tenth of a tensor."""
    log_every: Positive = 50
    """Steps between log lines."""
    checkpoint_every: Positive | None = None
    """Steps between checkpoints. Default: 1,000, and at least a minute apart."""
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where else the log goes."""
    extends: Count = 0
    """Steps of the finished training that this one extends; 0 for a training of its own."""

    def check(self) -> None:
        require(self.extends < self.steps, "extends", self.extends, f"must be less than steps = {self.steps}")


CHECKPOINT_STEPS, CHECKPOINT_SECONDS = 1000, 60.0
"""Least steps and seconds between two checkpoints if no number of steps is set: they cost more than what they save."""
FREE = ("log_every", "checkpoint_every", "log_to")
"""Settings that may change when a run is resumed."""
