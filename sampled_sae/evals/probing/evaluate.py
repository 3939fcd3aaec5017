"""Sparse probing: linear probes on latents and on the residual stream, and their accuracy, F1 and AUC."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals import Progress
from sampled_sae.evals.probing.data import Labelled, load
from sampled_sae.evals.probing.features import CHARACTERS_A_TOKEN, Draws, Part, Task, bos_token, draw, read, tokenize
from sampled_sae.evals.probing.fit import fit, fit_adam, fit_one
from sampled_sae.evals.probing.schema import (
    DatasetResult,
    Probes,
    ProbingConfig,
    ProbingResult,
    Scores,
    TaskResult,
    over_datasets,
    summarise,
)
from sampled_sae.evals.reading import Steps, checked
from sampled_sae.hooks import Where
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError


def score(f: Tensor, positive: Tensor, there: Tensor) -> list[Scores]:
    """Values f [T, n] (above 0 means yes), the truth [T, n] bool, and which texts are there [T, n] bool -> [T]."""
    yes, no = positive & there, ~positive & there
    predicted = (f > 0) & there
    right = (predicted & yes).sum(1) + (~predicted & no).sum(1)
    hits = (predicted & yes).sum(1).double()
    accuracy = right.double() / there.sum(1)
    f1 = 2 * hits / (predicted.sum(1) + yes.sum(1)).clamp_min(1)
    return [Scores(*values) for values in torch.stack([accuracy, f1, _auc(f, yes, no)], dim=1).tolist()]


def _auc(f: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    # Entries that are not negatives are put above all values, where they do not count.
    below = torch.where(no, f, torch.inf).sort(dim=1).values
    wins = torch.searchsorted(below, f.contiguous()) + torch.searchsorted(below, f.contiguous(), right=True)
    return torch.where(yes, wins / 2, 0.0).sum(1) / (yes.sum(1) * no.sum(1))


class TopProbes(NamedTuple):
    """Probes of each task on its best columns."""

    columns: list[list[int]]  # for each task the columns that differ, the most first
    scores: dict[int, list[Scores]]  # for each k those of each task


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
    rows, positive, there = _padded([task.train for task in tasks], device)
    test_rows, test_positive, test_there = _padded([task.test for task in tasks], device)
    # A stable order, so that ties are broken the same way everywhere.
    best = size.sort(dim=1, descending=True, stable=True).indices[:, : max(k)]
    used, place = best.unique(return_inverse=True)
    values = columns(used)
    x = values[rows[:, :, None], place[:, None]]
    x_test = values[test_rows[:, :, None], place[:, None]]
    scores: dict[int, list[Scores]] = {}
    for number in k:
        w, b = fit(x[..., :number], positive, there)
        f = (x_test[..., :number] @ w[..., None]).squeeze(2) + b[:, None]
        scores[number] = score(f, test_positive, test_there)
    differ = size.gather(1, best) > 0
    return TopProbes([row[kept].tolist() for row, kept in zip(best.cpu(), differ.cpu(), strict=True)], scores)


def _padded(parts: Sequence[Part], device: torch.device) -> Iterator[Tensor]:
    """The same part of several tasks, filled up to the longest: rows, positive and whether a text is there, [T, n]."""
    filled = ([part.rows for part in parts], [part.positive for part in parts])
    for tensors in (*filled, [torch.ones_like(part.positive) for part in parts]):
        yield torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)


PROBE_WORK = 50  # a probe on all columns counts as much as so many texts that are read, for the progress shown


@torch.no_grad()
def evaluate_probing_many(
    saes: Sequence[SAE],
    model: LanguageModel,
    layer: Where,
    settings: ProbingConfig,
    progress: Progress | None = None,
) -> list[ProbingResult]:
    """Probe SAEs of the hook point `layer`; results in their order. `progress` gets (done, total)."""
    layer = model.where(layer)
    for which, sae in checked(saes, model, layer):
        if max(settings.k) > min(sae.d_sae, sae.d_in):
            raise UserError(
                f"k = {max(settings.k)}: {which} has {sae.d_sae} latents of width {sae.d_in}; must not be more"
            )
    if model.context is not None and settings.tokens > model.context:
        raise UserError(f"tokens = {settings.tokens}: {model.name} reads at most {model.context} tokens at once")
    bos_token(model.tokenizer, settings)
    work = _prepare(settings)
    probes = 1 + len(saes) * settings.all_latents
    steps = Steps(progress, sum(len(item.texts) + PROBE_WORK * len(item.draws.tasks) * probes for item in work))
    dtype = str(model.dtype).removeprefix("torch.")
    try:
        done = [_fitting(item, saes, model, layer, settings, steps) for item in work]
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"contexts_at_once = {settings.contexts_at_once}, tokens_at_once = {settings.tokens_at_once}, "
            f"all_latents = {settings.all_latents}: out of GPU memory; lower the first two, or leave out the last"
        ) from None
    return [
        ProbingResult(
            model.name, dtype, layer, summarise([one.tasks for one in found]), found, settings, over_datasets(found)
        )
        for found in map(list, zip(*done, strict=True))
    ]


class _Work(NamedTuple):
    """One dataset, ready to be read."""

    dataset: Labelled
    draws: Draws
    texts: list[int]  # numbers of the texts that some task uses


def _prepare(settings: ProbingConfig) -> list[_Work]:
    """All datasets with their tasks: what is wrong with one of them should be known before the model starts."""
    # Where texts are drawn anew, there should be others to draw.
    texts_a_class = (settings.train_texts + settings.test_texts) // 2 * (1 if len(settings.seeds) == 1 else 2)
    characters = settings.tokens * CHARACTERS_A_TOKEN
    work = []
    for dataset in load(settings.datasets, texts_a_class, characters):
        draws = draw(dataset, settings)
        used = {int(row) for task in draws.tasks for part in (task.train, task.test) for row in part.rows}
        work.append(_Work(dataset, draws, sorted(used)))
    return work


def _fitting(
    work: _Work, saes: Sequence[SAE], model: LanguageModel, layer: Where, settings: ProbingConfig, steps: Steps
) -> list[DatasetResult]:
    """One dataset for each SAE: mean codes of all SAEs that fit into memory together, else of one half at a time."""
    try:
        return _measure(work, saes, model, layer, settings, steps)
    except torch.cuda.OutOfMemoryError:
        if len(saes) == 1:
            raise
    torch.cuda.empty_cache()
    half = len(saes) // 2
    return [one for part in (saes[:half], saes[half:]) for one in _fitting(work, part, model, layer, settings, steps)]


def _measure(
    work: _Work, saes: Sequence[SAE], model: LanguageModel, layer: Where, settings: ProbingConfig, steps: Steps
) -> list[DatasetResult]:
    """One dataset for each SAE."""
    ids = tokenize([work.dataset.texts[number] for number in work.texts], model.tokenizer, settings)
    # Texts of about equal length together: little is padded then.
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    place = torch.full((len(work.dataset.texts),), -1)
    place[torch.tensor(work.texts)[order]] = torch.arange(len(order))
    tasks = [
        Task(label, seed, *(Part(place[part.rows], part.positive) for part in parts))
        for label, seed, *parts in work.draws.tasks
    ]
    weights = contrast(tasks, len(order))
    features = read(model, layer, saes, [ids[i] for i in order], weights, settings, steps.add)

    def on_all(rows: Callable[[Tensor], Tensor], like: Tensor) -> list[Scores]:
        """Probes on all columns, task by task; `like` has their device and, as its last dimension, their number."""
        found = []
        for task in tasks:
            found.append(_dense(rows, task, like.device, like.shape[1], settings))
            steps.add(PROBE_WORK)
        return found

    residual = features.residual
    top = top_probes(weights.to(residual.device) @ residual, lambda c: residual[:, c], tasks, settings.k)
    whole = on_all(residual.__getitem__, residual)
    results = []
    while features.codes:
        # One after the other, and each is let go of when it is done: together they may be large.
        means = features.codes.pop(0)
        mine = top_probes(means.difference, means.columns, tasks, settings.k)
        everything = on_all(means.rows, means.difference) if settings.all_latents else None
        results.append(_dataset_result(work, tasks, mine, everything, top, whole))
        del means
    return results


def _dense(
    rows: Callable[[Tensor], Tensor], task: Task, device: torch.device, columns: int, settings: ProbingConfig
) -> Scores:
    """A task's probe on all columns. `rows` turns numbers of texts [n] into their values [n, u]; `columns` is the
    number of all columns, those of zeros too."""
    x = rows(torch.cat([task.train.rows, task.test.rows]).to(device))
    train, test = x[: len(task.train.rows)], x[len(task.train.rows) :]
    positive, truth = task.train.positive.to(device), task.test.positive.to(device)
    if settings.dense_probe == "exact":
        f = fit_one(train, positive, test)
    else:
        f = fit_adam(train, positive, test, truth, columns, task.seed)
    return score(f[None], truth[None], torch.ones_like(truth)[None])[0]


def _dataset_result(
    work: _Work,
    tasks: Sequence[Task],
    top: TopProbes,
    everything: list[Scores] | None,
    residual_top: TopProbes,
    residual: list[Scores],
) -> DatasetResult:
    found = []
    for number, task in enumerate(tasks):
        scores = Probes(
            {k: scores[number] for k, scores in top.scores.items()},
            None if everything is None else everything[number],
            {k: scores[number] for k, scores in residual_top.scores.items()},
            residual[number],
        )
        counts = len(task.train.rows), len(task.test.rows)
        found.append(TaskResult(task.label, task.seed, *counts, top.columns[number], scores))
    data = work.dataset
    left_out = data.blank, data.repeated, data.other_split
    total = len(work.texts)
    return DatasetResult(data.name, summarise([found]), found, total, *left_out, work.draws.skipped, data.source)
