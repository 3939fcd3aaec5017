"""Probes of one dataset: on the columns that differ most between a class and the others, and on all columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.probing.adam import fit_adam
from sampled_sae.evals.probing.draw import Part, Task
from sampled_sae.evals.probing.fit import fit, fit_one
from sampled_sae.evals.probing.scores import Scores, score


class Padded(NamedTuple):
    """The same part of several tasks, filled up to the longest."""

    rows: Tensor
    """[T, n] long; 0 where there is nothing."""
    positive: Tensor
    """[T, n] bool."""
    there: Tensor
    """[T, n] bool."""


class TopProbes(NamedTuple):
    """Probes of each task on its best columns."""

    columns: list[list[int]]
    """For each task the columns by how much they differ, the most first; those that do not differ are left out."""
    scores: dict[int, list[Scores]]
    """For each k those of each task."""


def contrast(tasks: Sequence[Task], texts: int) -> Tensor:
    """[T, texts] float64: weights with which a sum over texts is a task's mean+ - mean- of its train texts."""
    weights = torch.zeros(len(tasks), texts, dtype=torch.float64)
    for row, task in zip(weights, tasks, strict=True):
        sign = torch.where(task.train.positive, 1.0, -1.0).double()
        row[task.train.rows] = sign / (len(sign) / 2)
    return weights


def top_probes(
    difference: Tensor, columns: Callable[[Tensor], Tensor], tasks: Sequence[Task], k: Sequence[int]
) -> TopProbes:
    """Probes on the k columns with the largest |mean+ - mean-|, for each k.

    difference [T, m] of each task; `columns` turns numbers of columns [u] into their values [N, u] for all texts.
    """
    device, size = difference.device, difference.abs()
    train, test = (_padded([getattr(task, name) for task in tasks], device) for name in ("train", "test"))
    # A stable order, so that ties are broken the same way everywhere.
    best = size.sort(dim=1, descending=True, stable=True).indices[:, : max(k)]
    used, place = best.unique(return_inverse=True)
    values = columns(used)
    x = values[train.rows[:, :, None], place[:, None]]
    x_test = values[test.rows[:, :, None], place[:, None]]
    scores: dict[int, list[Scores]] = {}
    for number in k:
        w, b = fit(x[..., :number], train.positive, train.there)
        f = (x_test[..., :number] @ w[..., None]).squeeze(2) + b[:, None]
        scores[number] = score(f, test.positive, test.there)
    differ = size.gather(1, best) > 0
    return TopProbes([row[kept].tolist() for row, kept in zip(best.cpu(), differ.cpu(), strict=True)], scores)


def exact_probe(rows: Callable[[Tensor], Tensor], task: Task, device: torch.device) -> Scores:
    """The optimal probe of a task on all columns; `rows` turns numbers of texts [n] into their values [n, u]."""
    x = rows(torch.cat([task.train.rows, task.test.rows]).to(device))
    n = len(task.train.rows)
    return _score_one(fit_one(x[:n], task.train.positive.to(device), x[n:]), task.test)


def saebench_probe(rows: Callable[[Tensor], Tensor], task: Task, device: torch.device, columns: int) -> Scores:
    """The same by SAEBench's training; `columns` is the number of all columns, those of zeros too."""
    x = rows(torch.cat([task.train.rows, task.test.rows]).to(device))
    n = len(task.train.rows)
    truth = task.train.positive.to(device), task.test.positive.to(device)
    return _score_one(fit_adam(x[:n], truth[0], x[n:], truth[1], columns, task.seed), task.test)


def _score_one(f: Tensor, test: Part) -> Scores:
    positive = test.positive.to(f.device)[None]
    return score(f[None], positive, torch.ones_like(positive))[0]


def _padded(parts: Sequence[Part], device: torch.device) -> Padded:
    def together(tensors: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)

    there = [torch.ones_like(part.positive) for part in parts]
    return Padded(together([part.rows for part in parts]), together([part.positive for part in parts]), together(there))
