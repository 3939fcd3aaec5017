"""How much of a letter's direction other latents than its main ones carry: the fraction, and full absorption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.absorption.codes import Codes
from sampled_sae.evals.absorption.config import AbsorptionConfig

SILENT = 1e-8
"""A main latent below this does not fire."""


class Absorption(NamedTuple):
    """Of each word [n], for its own first letter."""

    fraction: Tensor
    """0 where the main latents carry the letter, 1 where others do alone."""
    full: Tensor
    """Whether one latent took the place of silent main latents."""
    absorbers: Tensor
    """Latents that the fraction counts, [n, absorbers], largest first; -1 for none."""
    top: Tensor
    """The latent with the largest projection on the probe; -1 where nothing fires."""


@torch.no_grad()
def absorption(
    x: Tensor,
    codes: Codes,
    letters: Tensor,
    directions: Tensor,
    decoder: Tensor,
    main: Sequence[Sequence[int]],
    settings: AbsorptionConfig,
) -> Absorption:
    """Measure words by what fires at them.

    x [n, d] is the residual stream at the words, `letters` [n] their first letters, directions [letters, d] the
    weights of the probes, decoder [m, d] and `main` the main latents of each letter.
    """
    decoder = decoder.float()
    directions = torch.nn.functional.normalize(directions.to(decoder), dim=1)
    cosines = directions @ torch.nn.functional.normalize(decoder, dim=1).T
    is_main = torch.zeros_like(cosines, dtype=torch.bool)
    for letter, latents in enumerate(main):
        is_main[letter, list(latents)] = True
    projections = (x.to(directions) * directions[letters]).sum(1)
    parts = []
    for first in range(0, max(1, len(x)), settings.words_at_once):
        last = min(first + settings.words_at_once, len(x))
        part, some = codes.part(first, last), slice(first, last)
        parts.append(_measure(projections[some], part, letters[some], cosines, is_main, settings))
    return Absorption(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _measure(
    a: Tensor, codes: Codes, letters: Tensor, cosines: Tensor, is_main: Tensor, settings: AbsorptionConfig
) -> Absorption:
    """The same for some words; a [n] is what the probe's direction holds of each."""
    letter = letters[codes.rows]
    cosine, own = cosines[letter, codes.latents], is_main[letter, codes.latents]
    r = codes.values * cosine
    main = codes.padded(torch.where(own, r, 0.0)).sum(1)
    candidate = ~own & (cosine >= settings.min_cosine) & (r > 0)
    largest, place = _largest(codes.padded(torch.where(candidate, r, 0.0)), settings.absorbers)
    latents = codes.padded(codes.latents + 1) - 1  # -1 where there is none
    others = largest.sum(1)
    # Of nothing, or of less, there is no share.
    enough = (a > 0) & (others >= settings.min_share * a)
    counted = torch.minimum(others, a - main)
    fraction = torch.where(main <= 0, 1.0, counted / (counted + main).clamp(min=1e-30)).clamp(0, 1)
    fraction = torch.where(enough & (main < a), fraction, 0.0)
    absorbers = torch.where((largest > 0) & (fraction > 0)[:, None], latents.gather(1, place), -1)
    top, which = codes.padded(r).max(1)
    top_cosine = codes.padded(cosine).gather(1, which[:, None]).squeeze(1)
    silent = codes.padded(torch.where(own, codes.values, 0.0)).amax(1) < SILENT
    full = silent & (top_cosine >= settings.min_cosine_full) & (a > 0) & (top >= settings.min_share * a)
    return Absorption(fraction, full, absorbers, latents.gather(1, which[:, None]).squeeze(1))


def _largest(table: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their places, [n, k]; 0 where a row is shorter."""
    values, places = table.topk(min(k, table.shape[1]), dim=1)
    missing = k - values.shape[1]
    return torch.nn.functional.pad(values, (0, missing)), torch.nn.functional.pad(places, (0, missing))


class Absorber(NamedTuple):
    """A latent that takes a letter's place at some words."""

    latent: int
    words: int
    """Words in whose fraction it counts."""
    full: int
    """Words that it absorbs alone."""


def count_absorbers(found: Absorption, most: int) -> tuple[list[Absorber], int]:
    """The latents that absorb at most words, up to `most` of them, and how many there are in all."""
    words = Counter(latent for latent in found.absorbers.flatten().tolist() if latent >= 0)
    full = Counter(found.top[found.full].tolist())
    every = [Absorber(latent, words[latent], full[latent]) for latent in words.keys() | full.keys()]
    every.sort(key=lambda item: (-item.words, -item.full, item.latent))
    return every[:most], len(every)
