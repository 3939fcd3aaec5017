"""The main latents of each letter: what an L1 probe on the codes points to, as far as each further one helps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.absorption.codes import Codes
from sampled_sae.evals.absorption.config import AbsorptionConfig
from sampled_sae.evals.absorption.probes import Schedule, Sparse, f1, fit_by_adam, fit_exactly, start_at


class MainLatents(NamedTuple):
    """For each letter that has a probe, in their order."""

    ranked: list[list[int]]
    """Latents of the largest weights of the L1 probe, largest first."""
    f1: list[list[float]]
    """On the test words, by the first 1, 2, ... of these."""
    main: list[list[int]]
    """The first ones, as many as are main latents."""


def find_main_latents(
    train: Codes, test: Codes, train_truth: Tensor, test_truth: Tensor, settings: AbsorptionConfig
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


def rank_latents(codes: Codes, truth: Tensor, settings: AbsorptionConfig) -> Tensor:
    """The latents with the largest weights in an L1 probe, [letters, k], largest first; k is at most `max_k`."""
    s = settings
    schedule = Schedule(s.sparse_epochs, s.sparse_batch, s.lr, s.end_lr, s.sparse_decay, s.l1)
    start = start_at(s.start, codes.m, truth.shape[1], s.seed, codes.values.device)
    # Latents that fire at no word have no part in any other's weight, and nothing to say.
    firing = codes.latents.unique()
    inside = codes.renumbered(firing)
    start = start._replace(weight=start.weight[firing])
    probes = fit_by_adam(Sparse(inside, inside.rows), truth.float(), start, schedule, s.seed)
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
