"""Defaults that follow from the sizes: the learning rate and the encoder's initial scale.

docs/recipe.md has the runs they were fitted on and the settings they were tested on.
"""

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


def encoder_scale(config: SAEConfig) -> float:
    """W_enc as a multiple of W_dec before the first step, to three digits.

    With a small K, larger activations at the start leave fewer latents dead.
    """
    if config.init.encoder_scale is not None:
        return config.init.encoder_scale
    return float(f"{min(max(0.5 * (60 / config.k) ** 0.3, 0.4), 0.7):.3g}")


def with_lr(config: SAEConfig, d_in: int, batch_size: int, steps: int) -> SAEConfig:
    """The configuration with its learning rate and encoder scale, by the rules if it has none of its own."""
    if config.init.encoder_scale is None:
        config = _scaled(config, encoder_scale(config))
    if config.optimizer.lr is not None:
        return config
    return _at(config, default_lr(d_in, config.d_sae, config.k, batch_size, steps))


def as_begun(given: list[SAEConfig], filled: list[SAEConfig], recorded: Any) -> list[SAEConfig]:
    """`filled`, but what SAEs were `given` without is that of their run's record, a list of plain settings.

    The rules may have changed since the run began.
    """
    records = [_read(sae) for sae in recorded] if isinstance(recorded, list) else []
    records += [None] * (len(given) - len(records))
    return [_as_in(*triple) for triple in zip(given, filled, records, strict=False)]


def _as_in(own: SAEConfig, full: SAEConfig, record: SAEConfig | None) -> SAEConfig:
    if record is None:
        return full
    if own.optimizer.lr is None and record.optimizer.lr is not None:
        full = _at(full, record.optimizer.lr)
    if own.init.encoder_scale is None and record.init.encoder_scale is not None:
        full = _scaled(full, record.init.encoder_scale)
    return full


def summary(given: list[SAEConfig], filled: list[SAEConfig]) -> str:
    """One line with the learning rates, and whether the rule has chosen any."""
    rates = sorted({config.optimizer.lr for config in filled if config.optimizer.lr is not None})
    shown = f"learning rate {rates[0]:g}" if len(rates) == 1 else f"learning rates {rates[0]:g} to {rates[-1]:g}"
    if all(config.optimizer.lr is not None for config in given):
        return shown
    return f"{shown}, from d_in, d_sae, K, batch size and steps; change it with --lr (lr= in Python)"


def _at(config: SAEConfig, lr: float) -> SAEConfig:
    return replace(config, optimizer=replace(config.optimizer, lr=lr))


def _scaled(config: SAEConfig, scale: float) -> SAEConfig:
    return replace(config, init=replace(config.init, encoder_scale=scale))


def _read(sae: Any) -> SAEConfig | None:
    try:
        return SAEConfig.from_dict(sae)
    except (UserError, TypeError):  # damaged: the comparison with the run's configuration says so
        return None
