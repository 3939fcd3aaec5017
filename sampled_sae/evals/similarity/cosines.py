"""All cosines between the rows of two dictionaries, a block at a time: 65,536 x 65,536 of them never lie in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.utils.errors import UserError


class Directions(NamedTuple):
    """A dictionary's rows as directions."""

    rows: Tensor  # [n, d] float32 of unit norm
    latent: Tensor  # [n] long: which latent each one is. Rows of zeros have no direction and are left out.


def directions(decoder: Tensor, name: str = "decoder") -> Directions:
    """Decoder rows [m, d] of any norm -> unit rows on the same device."""
    if decoder.ndim != 2:
        raise UserError(f"{name} has shape {list(decoder.shape)}: must be a matrix [latents, width]")
    rows = decoder.detach().float()
    largest = torch.linalg.vector_norm(rows, torch.inf, dim=1)
    if not bool(largest.isfinite().all()):
        raise UserError(f"{name} has entries that are nan or infinite: must be finite numbers")
    latent = largest.nonzero()[:, 0]
    if len(latent) < len(rows):
        rows, largest = rows[latent], largest[latent]
    # Squares of very small or large entries would be 0 or infinite.
    unit = rows / largest[:, None]
    unit /= unit.norm(dim=1, keepdim=True)
    return Directions(unit, latent)


def blocks(a: Tensor, b: Tensor, at_once: int) -> Iterator[tuple[int, Tensor]]:
    """Cosines of unit rows [m, d] and [n, d]: the first row's number and [r, n], in order.

    Every block is overwritten by the next one, so that no two of them are held; the reader may change it in place.
    """
    if not len(a) or not len(b):
        return
    height = min(len(a), max(1, at_once // len(b)))
    buffer = a.new_empty(height, len(b))
    for first in range(0, len(a), height):
        part = a[first : first + height]
        yield first, torch.mm(part, b.T, out=buffer[: len(part)])


def nearest(a: Tensor, b: Tensor, at_once: int) -> tuple[Tensor, Tensor]:
    """Unit rows [m, d] and [n, d] -> the largest cosine of each with any row of the other side, [m] and [n].

    One pass gives both; -inf where the other side has no rows.
    """
    rows, columns = a.new_full((len(a),), -torch.inf), b.new_full((len(b),), -torch.inf)
    for first, cosine in blocks(a, b, at_once):
        rows[first : first + len(cosine)] = cosine.amax(1)
        torch.maximum(columns, cosine.amax(0), out=columns)
    # Rounding may carry a cosine of 1 a little beyond.
    return rows.clamp_(max=1), columns.clamp_(max=1)


def best_of_rows(a: Tensor, b: Tensor, count: int, at_once: int, prices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` columns of the largest cosine, less the column's price [n], for each row: values and columns [m, c].

    Largest first; c is n where there are fewer columns than asked for.
    """
    count = min(count, len(b))
    values, columns = a.new_empty(len(a), count), torch.empty(len(a), count, dtype=torch.long, device=a.device)
    for first, cosine in blocks(a, b, at_once):
        if prices is not None:
            cosine.sub_(prices)
        found = cosine.topk(count, dim=1)
        values[first : first + len(cosine)], columns[first : first + len(cosine)] = found
    return values, columns


STEPS = 40_000  # Points of the quadrature; twice as many change no digit that is shown


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
