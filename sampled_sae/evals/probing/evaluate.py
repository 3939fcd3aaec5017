"""Sparse probing: how much of a label a few of an SAE's latents tell, as in SAEBench.

For each class of each dataset, texts of that class are told from texts of the others by a logistic regression on the
mean over a text's tokens of the k latents that differ most between the two. Beside it stand the same on all latents
and on the residual stream. The model reads each text once for all SAEs, and probes on the residual stream are fitted
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.data.layers import LanguageModel
from sampled_sae.errors import UserError
from sampled_sae.evals.given import checked
from sampled_sae.evals.probing.config import ProbingConfig
from sampled_sae.evals.probing.data import Labelled
from sampled_sae.evals.probing.draw import Draws, Part, Task, draw
from sampled_sae.evals.probing.features import CHARACTERS_A_TOKEN, Entries, bos_token, read, tokenize
from sampled_sae.evals.probing.load import load
from sampled_sae.evals.probing.probe import TopProbes, contrast, exact_probe, saebench_probe, top_probes
from sampled_sae.evals.probing.result import DatasetResult, Probes, ProbingResult, TaskResult, summarise, to_saebench
from sampled_sae.evals.probing.scores import Scores
from sampled_sae.sae import SAE

__all__ = ["ProbingConfig", "ProbingResult", "evaluate_probing", "evaluate_probing_many", "to_saebench"]

PROBE_WORK = 50
"""A probe on all columns counts as much as so many texts that are read, for the progress shown."""

Rows = Callable[[Tensor], Tensor]


def evaluate_probing(
    sae: SAE,
    model: LanguageModel,
    layer: int,
    settings: ProbingConfig,
    progress: Callable[[int, int], None] | None = None,
) -> ProbingResult:
    """Probe an SAE of the residual stream after `layer`."""
    return evaluate_probing_many([sae], model, layer, settings, progress)[0]


@torch.no_grad()
def evaluate_probing_many(
    saes: Sequence[SAE],
    model: LanguageModel,
    layer: int,
    settings: ProbingConfig,
    progress: Callable[[int, int], None] | None = None,
) -> list[ProbingResult]:
    """The same for several SAEs of one layer, in their order. `progress` is called with (done, total)."""
    layer = model.check_layer(layer)
    _check(saes, model, layer, settings)
    work = _prepare(settings)
    told = _Told(progress, sum(_cost(item, saes, settings) for item in work))
    dtype = str(model.dtype).removeprefix("torch.")
    try:
        done = [_measure(item, saes, model, layer, settings, told) for item in work]
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"contexts_at_once = {settings.contexts_at_once}, tokens_at_once = {settings.tokens_at_once}, "
            f"all_latents = {settings.all_latents}: out of GPU memory; lower the first two, or leave out the last"
        ) from None
    results = []
    for number in range(len(saes)):
        found = [of_dataset[number] for of_dataset in done]
        summary = summarise([dataset.tasks for dataset in found])
        results.append(ProbingResult(model.name, dtype, layer, summary, found, settings))
    return results


class _Work(NamedTuple):
    """One dataset, ready to be read."""

    dataset: Labelled
    draws: Draws
    texts: list[int]
    """Numbers of the texts that some task uses."""


class _Told:
    """Counts what is done and tells it."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int):
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, more: int) -> None:
        self.done += more
        if self.progress is not None:
            self.progress(self.done, self.total)


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


def _cost(work: _Work, saes: Sequence[SAE], settings: ProbingConfig) -> int:
    probes = len(work.draws.tasks) * (1 + len(saes) * settings.all_latents)
    return len(work.texts) + PROBE_WORK * probes


def _measure(
    work: _Work, saes: Sequence[SAE], model: LanguageModel, layer: int, settings: ProbingConfig, told: _Told
) -> list[DatasetResult]:
    """One dataset for each SAE."""
    ids = tokenize([work.dataset.texts[number] for number in work.texts], model.tokenizer, settings)
    # Texts of about equal length together: little is padded then.
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    place = torch.full((len(work.dataset.texts),), -1)
    place[torch.tensor(work.texts)[order]] = torch.arange(len(order))
    tasks = [_moved(task, place) for task in work.draws.tasks]
    weights = contrast(tasks, len(order))
    features = read(model, layer, saes, [ids[i] for i in order], weights, settings, told)

    residual = features.residual
    top = top_probes(weights.to(residual.device) @ residual, lambda c: residual[:, c], tasks, settings.k)
    whole = _dense(residual.__getitem__, tasks, residual.device, model.width, settings, told)
    results = []
    while features.codes:
        # One after the other, and each is let go of when it is done: together they may be large.
        entries = features.codes.pop(0)
        mine, everything = _probe(entries, tasks, settings, told)
        results.append(_dataset_result(work, tasks, mine, everything, top, whole))
    return results


def _probe(
    entries: Entries, tasks: Sequence[Task], settings: ProbingConfig, told: _Told
) -> tuple[TopProbes, list[Scores] | None]:
    """One SAE's probes on its best latents and on all of them."""
    top = top_probes(entries.difference, entries.columns, tasks, settings.k)
    if not settings.all_latents:
        return top, None
    return top, _dense(entries.rows, tasks, entries.difference.device, entries.m, settings, told)


def _dense(
    rows: Rows, tasks: Sequence[Task], device: torch.device, columns: int, settings: ProbingConfig, told: _Told
) -> list[Scores]:
    """Probes on all columns, task by task."""
    found = []
    for task in tasks:
        if settings.dense_probe == "exact":
            found.append(exact_probe(rows, task, device))
        else:
            found.append(saebench_probe(rows, task, device, columns))
        told(PROBE_WORK)
    return found


def _moved(task: Task, place: Tensor) -> Task:
    """The same task with the texts' new numbers."""
    train, test = (Part(place[part.rows], part.positive) for part in (task.train, task.test))
    return Task(task.label, task.seed, train, test)


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
    return DatasetResult(data.name, summarise([found]), found, len(work.texts), *left_out, work.draws.skipped)


def _check(saes: Sequence[SAE], model: LanguageModel, layer: int, settings: ProbingConfig) -> None:
    for which, sae in checked(saes, model, layer):
        if max(settings.k) > min(sae.m, sae.d):
            raise UserError(f"k = {max(settings.k)}: {which} has {sae.m} latents of width {sae.d}; must not be more")
    if model.context is not None and settings.tokens > model.context:
        raise UserError(f"tokens = {settings.tokens}: {model.name} reads at most {model.context} tokens at once")
    bos_token(model.tokenizer, settings)
