"""Which texts each probe is fitted to and tested on: one class against all others, balanced, drawn anew a seed."""

from __future__ import annotations

import random
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sampled_sae.evals.probing.data import Labelled
from sampled_sae.evals.probing.schema import ProbingConfig
from sampled_sae.utils.errors import UserError


class Part(NamedTuple):
    """Texts of one task, as many of its class as of the others."""

    rows: Tensor  # [n] long: numbers of the texts
    positive: Tensor  # [n] bool: whether each is of the task's class


class Task(NamedTuple):
    """One class against the others."""

    label: str
    seed: int
    train: Part
    test: Part


class Draws(NamedTuple):
    """What is to be done with one dataset."""

    tasks: list[Task]  # for each seed one for each class that has enough texts
    skipped: dict[str, str]  # why a class has no task


Item = TypeVar("Item")
Pools = dict[str, list[int]]  # numbers of the texts of each class, in random order


def draw(dataset: Labelled, settings: ProbingConfig) -> Draws:
    """The tasks of a dataset for each seed; text and class decide what is drawn, not the other datasets.

    As in SAEBench, each class has a pool of train_texts / 2 texts (and test_texts / 2 to test on); all of them are the
    positive texts of its task, and negative ones come evenly from the pools of the other classes.
    """
    members = _by_class(dataset)
    skipped: dict[str, str] = {}
    tasks: list[Task] = []
    for seed in settings.seeds:
        train, test = _pools(dataset, members, settings, seed)
        enough = {label for label in train if _enough(train[label], test[label], settings)}
        skipped = {label: _too_few(train[label], test[label], settings) for label in train if label not in enough}
        if len(enough) < 2:
            reasons = "; ".join(f"{label!r} has {reason}" for label, reason in skipped.items())
            raise UserError(f"datasets = {dataset.name!r}: must have two classes with enough texts, but {reasons}")
        for label in sorted(enough):
            parts = [
                _part(label, {name: pool[name] for name in enough}, f"{seed}/{side}/{label}")
                for side, pool in (("train", train), ("test", test))
            ]
            tasks.append(Task(label, seed, *parts))
    return Draws(tasks, skipped)


def _by_class(dataset: Labelled) -> Pools:
    members: Pools = {label: [] for label in dataset.classes}
    for number, label in enumerate(dataset.labels):
        members[label].append(number)
    return members


def _pools(dataset: Labelled, members: Pools, settings: ProbingConfig, seed: int) -> tuple[Pools, Pools]:
    """For each class the texts to fit to and those to test on."""
    train: Pools = {}
    test: Pools = {}
    for label, numbers in members.items():
        order = _shuffled(numbers, f"{seed}/{label}")
        splits = dataset.splits
        if splits is None:
            # The texts go to both sides in the same proportion as is asked for.
            share = settings.test_texts / (settings.train_texts + settings.test_texts)
            first = round(len(order) * share)
            sides = order[first:], order[:first]
        else:
            sides = [n for n in order if splits[n] == "train"], [n for n in order if splits[n] == "test"]
        train[label] = _evenly(sides[0], dataset.groups, settings.train_texts // 2)
        test[label] = _evenly(sides[1], dataset.groups, settings.test_texts // 2)
    return train, test


def _evenly(order: list[int], groups: list[str] | None, most: int) -> list[int]:
    """The first of an order, at most so many, and of each group equally many."""
    if groups is None:
        return order[:most]
    apart: dict[str, list[int]] = {}
    for number in order:
        apart.setdefault(groups[number], []).append(number)
    each = min(most // len(apart), *map(len, apart.values())) if apart else 0
    return [number for numbers in apart.values() for number in numbers[:each]]


def _part(label: str, pools: Pools, seed: str) -> Part:
    """All of a class and equally many of the others, in turn from each of them."""
    others = [name for name in sorted(pools) if name != label]
    # Which of the others gives one text more than the rest is left to chance too.
    others = _shuffled(others, seed)
    drawn = [_shuffled(pools[name], f"{seed}/{name}") for name in others]
    in_turn = [number for turn in zip_longest(*drawn) for number in turn if number is not None]
    size = min(len(pools[label]), len(in_turn))
    positive = _shuffled(pools[label], seed)[:size]
    rows = torch.tensor(positive + in_turn[:size])
    return Part(rows, torch.arange(2 * size) < size)


def _shuffled(items: list[Item], seed: str) -> list[Item]:
    """The same items in an order that depends on the seed alone, on every machine."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return order


def _enough(train: list[int], test: list[int], settings: ProbingConfig) -> bool:
    return len(train) >= settings.fewest_texts and len(test) >= settings.fewest_test_texts


def _too_few(train: list[int], test: list[int], settings: ProbingConfig) -> str:
    return (
        f"{len(train)} texts to fit to and {len(test)} to test on, fewer than "
        f"{settings.fewest_texts} and {settings.fewest_test_texts}"
    )
