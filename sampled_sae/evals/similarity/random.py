"""What chance gives: the largest of many cosines is far above 0 even between directions that share nothing."""

from __future__ import annotations

import math

import torch

STEPS = 40_000
"""Points of the quadrature; twice as many change no digit that is shown."""


def random_best(width: int, others: int) -> float | None:
    """Expected largest cosine of a direction with `others` random ones, all even on the sphere in `width` dimensions.

    It is the MMCS of two dictionaries of random rows, where the other one has so many. The cosine t of two random
    directions has a density in proportion to (1 - t^2)^((width - 3) / 2), and the n of one row are independent, so
    that E[max] = 1 - integral of F(t)^n from -1 to 1. None where there are no others.
    """
    if others < 1 or width < 1:
        return None
    if width == 1:
        return 1 - 2 * 0.5**others
    # By the angle, t = -cos(angle): the density is sin(angle)^(width - 2), bounded in every dimension.
    angle = torch.linspace(0, math.pi, STEPS + 1, dtype=torch.float64)
    sine = angle.sin().clamp_min(1e-300)
    density = ((width - 2) * sine.log()).exp()
    below = torch.cat([density.new_zeros(1), torch.cumulative_trapezoid(density, angle)])
    power = (others * (below / below[-1]).clamp_min(1e-300).log()).exp()
    return 1 - float(torch.trapezoid(power * sine, angle))
