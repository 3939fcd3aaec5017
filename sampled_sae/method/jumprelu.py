"""JumpReLU's formulas: thresholds, the windows around them, the penalty that moves L0 to K. See docs/method.md."""

from __future__ import annotations

import torch
from torch import Tensor

from sampled_sae.method.config import JumpReLUConfig, SAEConfig
from sampled_sae.method.parameters import JumpReLUParameters

FINE = 0.1
"""Relative width of a window that has at least 12 steps of 16 bits."""


def thresholds(weights: JumpReLUParameters, config: JumpReLUConfig) -> Tensor:
    """The threshold of each latent [m]."""
    return weights.threshold if config.variant == "dictionary_learning" else weights.threshold.exp()


def encoder_input(x: Tensor, weights: JumpReLUParameters, config: JumpReLUConfig) -> Tensor:
    """What the encoder takes of x [batch, d_in]."""
    return x if config.variant == "dictionary_learning" else x - weights.b_dec


def window(theta: Tensor, config: JumpReLUConfig) -> Tensor:
    """Width of the window around each threshold [m]."""
    return config.bandwidth * (theta if config.variant == "relative" else torch.ones_like(theta))


def fine(config: JumpReLUConfig) -> bool:
    """Whether windows may hold so few of the steps of 16 bits that activations need 32."""
    return config.variant == "dictionary_learning" or config.bandwidth < FINE


def penalty(x: Tensor, l0: float, step: int, steps: int, config: SAEConfig) -> tuple[Tensor, Tensor]:
    """The penalty on the L0 of batch x [batch, d_in] at a step, and its derivative."""
    settings, k = config.jumprelu, config.k
    assert settings is not None
    warmup = min(settings.warmup_steps, steps // 5)
    weight = settings.penalty * (min(1.0, step / warmup) if warmup else 1.0)
    scale = x.new_ones(())
    if settings.variant == "relative":
        scale = (x - x.mean(0)).square().sum() / len(x)
    return weight * scale * (l0 / k - 1) ** 2, weight * scale * 2 * (l0 / k - 1) / k
