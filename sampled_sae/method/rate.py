"""The default learning rate. docs/recipe.md has the runs it was fitted on and the settings it was tested on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from sampled_sae.method.config import SAEConfig
from sampled_sae.utils.errors import UserError

LEAST, MOST = 1e-4, 1e-2
"""Bounds of the rule at width 576."""


def default_lr(d_in: int, d_sae: int, k: int, batch_size: int, steps: int) -> float:
    """Peak learning rate of the default optimizer, to three digits.

    An element of a matrix moves by up to the rate in each step, while the elements of a unit row are about
    1 / sqrt(d_in): the rate goes with the latter. The other exponents were fitted.
    """
    rate = 1.3e-3 * (steps / 6000) ** -0.6 * (d_sae / 65_536) ** -0.3 * (k / 60) ** 0.3 * (batch_size / 4096) ** 0.25
    return float(f"{min(max(rate, LEAST), MOST) * math.sqrt(576 / d_in):.3g}")


def with_lr(config: SAEConfig, d_in: int, batch_size: int, steps: int) -> SAEConfig:
    """The configuration with its learning rate, by the rule if it has none of its own."""
    if config.optimizer.lr is not None:
        return config
    return _at(config, default_lr(d_in, config.d_sae, config.k, batch_size, steps))


def as_begun(given: list[SAEConfig], filled: list[SAEConfig], recorded: Any) -> list[SAEConfig]:
    """`filled`, but SAEs that were `given` without a rate have that of their run's record, a list of plain settings.

    The rule may have changed since the run began.
    """
    rates = [_rate_in(sae) for sae in recorded] if isinstance(recorded, list) else []
    rates += [None] * (len(given) - len(rates))
    triples = zip(given, filled, rates, strict=False)
    return [full if lr is None or own.optimizer.lr is not None else _at(full, lr) for own, full, lr in triples]


def summary(given: list[SAEConfig], filled: list[SAEConfig]) -> str:
    """One line with the learning rates, and whether the rule has chosen any."""
    rates = sorted({config.optimizer.lr for config in filled if config.optimizer.lr is not None})
    shown = f"learning rate {rates[0]:g}" if len(rates) == 1 else f"learning rates {rates[0]:g} to {rates[-1]:g}"
    if all(config.optimizer.lr is not None for config in given):
        return shown
    return f"{shown}, from d_in, d_sae, K, batch size and steps; change it with --lr (lr= in Python)"


def _at(config: SAEConfig, lr: float) -> SAEConfig:
    return replace(config, optimizer=replace(config.optimizer, lr=lr))


def _rate_in(sae: Any) -> float | None:
    try:
        return SAEConfig.from_dict(sae).optimizer.lr
    except (UserError, TypeError):  # damaged: the comparison with the run's configuration says so
        return None
