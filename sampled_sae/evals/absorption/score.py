"""The main latents of each letter: what an L1 probe on the codes points to, as far as each further one helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.absorption.probes import Schedule, Sparse, f1, fit_by_adam, fit_exactly, start_at
from sampled_sae.evals.absorption.schema import Absorber, AbsorptionConfig
from sampled_sae.method.codes import SparseCodes
from sampled_sae.sae import SAE


class MainLatents(NamedTuple):
    """For each letter that has a probe, in their order."""

    ranked: list[list[int]]  # latents of the largest weights of the L1 probe, largest first
    f1: list[list[float]]  # on the test words, by the first 1, 2, ... of these.
    main: list[list[int]]  # the first ones, as many as are main latents


@torch.no_grad()
def encode_words(sae: SAE, x: Tensor, at_once: int) -> SparseCodes:
    """x [n, d_in] -> float32 codes on the SAE's device, scaled as if every decoder row had norm 1.

    SAEs trained here have unit rows already; for others this makes activations comparable.
    """
    codes = sae.encode_sparse(x, max_values=at_once * sae.d_sae)
    codes = codes._replace(value=(codes.value * sae.W_dec.norm(dim=1)[codes.latent]).float())
    return codes.where(codes.value > 0)


def find_main_latents(
    train: SparseCodes, test: SparseCodes, train_truth: Tensor, test_truth: Tensor, settings: AbsorptionConfig
) -> MainLatents:
    """Codes of the words and truth [n, letters] bool -> main latents; some latent must fire at a training word."""
    ranked = rank_latents(train, train_truth, settings)
    named, places = ranked.unique(return_inverse=True)
    x, truth, counts = without_silent_words(train.columns(named), places, train_truth)
    tested = test.columns(named)[:, places].permute(1, 0, 2).double()
    columns = []
    for k in range(1, ranked.shape[1] + 1):
        probes = fit_exactly(x[:, :, :k], truth, counts)
        scores = (tested[:, :, :k] @ probes.weight[:, :, None]).squeeze(2) + probes.bias[:, None]
        columns.append(f1(scores.T > 0, test_truth))
    by_k: list[list[float]] = torch.stack(columns, dim=1).tolist()
    latents: list[list[int]] = ranked.tolist()
    main = [ids[: split(scores, settings.f1_jump)] for ids, scores in zip(latents, by_k, strict=True)]
    return MainLatents(latents, by_k, main)


def rank_latents(codes: SparseCodes, truth: Tensor, settings: AbsorptionConfig) -> Tensor:
    """The latents with the largest weights in an L1 probe, [letters, k], largest first; k is at most `max_k`."""
    s = settings
    schedule = Schedule(s.sparse_epochs, s.sparse_batch, s.lr, s.end_lr, s.sparse_decay, s.l1)
    start = start_at(s.start, codes.d_sae, truth.shape[1], s.seed, codes.value.device)
    # Latents that fire at no word do not change any other weight.
    firing = codes.latent.unique()
    start = start._replace(weight=start.weight[firing])
    probes = fit_by_adam(Sparse(codes.renumbered(firing)), truth.float(), start, schedule, s.seed)
    # Not by size alone: a latent that speaks against the letter is not its latent.
    places = probes.weight.topk(min(s.max_k, len(firing)), dim=0).indices
    return firing[places].T


def split(scores: list[float], jump: float) -> int:
    """F1 by the first 1, 2, ... latents -> how many are main ones: each raises it by more than `jump`, or is first."""
    count = 1
    while count < len(scores) and scores[count] > scores[count - 1] + jump:
        count += 1
    return count


def without_silent_words(columns: Tensor, places: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put the many words at which none of a letter's latents fire together into two rows, one with the letter.

    Activations [n, named], each letter's places among them [letters, k] and truth [n, letters] -> inputs
    [letters, rows, k], truth [letters, rows] and how many words each row stands for, [letters, rows].
    """
    inputs = []
    for own, is_letter in zip(places, truth.T, strict=True):
        x = columns[:, own]
        fires = x.any(1)
        silent = torch.stack([(~fires & is_letter).sum(), (~fires & ~is_letter).sum()])
        x = torch.cat([x.new_zeros(2, len(own)), x[fires]])
        y = torch.cat([is_letter.new_tensor([True, False]), is_letter[fires]])
        inputs.append((x, y, torch.cat([silent, silent.new_ones(len(x) - 2)])))
    x, y, counts = (torch.nn.utils.rnn.pad_sequence(list(part), True) for part in zip(*inputs, strict=True))
    return x, y, counts


SILENT = 1e-8  # a main latent below this does not fire


class Absorption(NamedTuple):
    """Of each word [n], for its own first letter."""

    fraction: Tensor  # 0 where the main latents carry the letter, 1 where others do alone
    full: Tensor  # whether one latent took the place of silent main latents
    absorbers: Tensor  # latents that the fraction counts, [n, absorbers], largest first; -1 for none
    top: Tensor  # the latent with the largest projection on the probe; -1 where nothing fires


@torch.no_grad()
def absorption(
    x: Tensor,
    codes: SparseCodes,
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
    size = settings.words_at_once
    for part, a, letter in zip(codes.split(size), projections.split(size), letters.split(size), strict=True):
        parts.append(_measure(a, part, letter, cosines, is_main, settings))
    return Absorption(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _measure(
    a: Tensor, codes: SparseCodes, letters: Tensor, cosines: Tensor, is_main: Tensor, settings: AbsorptionConfig
) -> Absorption:
    """The same for some words; a [n] is what the probe's direction holds of each."""
    letter = letters[codes.token]
    cosine, own = cosines[letter, codes.latent], is_main[letter, codes.latent]
    r = codes.value * cosine
    main = codes.padded(torch.where(own, r, 0.0)).sum(1)
    candidate = ~own & (cosine >= settings.min_cosine) & (r > 0)
    largest, place = _largest(codes.padded(torch.where(candidate, r, 0.0)), settings.absorbers)
    latents = codes.padded(codes.latent + 1) - 1  # -1 where there is none
    others = largest.sum(1)
    # Of nothing, or of less, there is no share.
    enough = (a > 0) & (others >= settings.min_share * a)
    counted = torch.minimum(others, a - main)
    fraction = torch.where(main <= 0, 1.0, counted / (counted + main).clamp(min=1e-30)).clamp(0, 1)
    fraction = torch.where(enough & (main < a), fraction, 0.0)
    absorbers = torch.where((largest > 0) & (fraction > 0)[:, None], latents.gather(1, place), -1)
    top, which = codes.padded(r).max(1)
    top_cosine = codes.padded(cosine).gather(1, which[:, None]).squeeze(1)
    silent = codes.padded(torch.where(own, codes.value, 0.0)).amax(1) < SILENT
    full = silent & (top_cosine >= settings.min_cosine_full) & (a > 0) & (top >= settings.min_share * a)
    return Absorption(fraction, full, absorbers, latents.gather(1, which[:, None]).squeeze(1))


def _largest(table: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their places, [n, k]; 0 where a row is shorter."""
    values, places = table.topk(min(k, table.shape[1]), dim=1)
    missing = k - values.shape[1]
    return torch.nn.functional.pad(values, (0, missing)), torch.nn.functional.pad(places, (0, missing))


def count_absorbers(found: Absorption, most: int) -> tuple[list[Absorber], int]:
    """The latents that absorb at most words, up to `most` of them, and how many there are in all."""
    words = Counter(latent for latent in found.absorbers.flatten().tolist() if latent >= 0)
    full = Counter(found.top[found.full].tolist())
    every = [Absorber(latent, words[latent], full[latent]) for latent in words.keys() | full.keys()]
    every.sort(key=lambda item: (-item.words, -item.full, item.latent))
    return every[:most], len(every)
