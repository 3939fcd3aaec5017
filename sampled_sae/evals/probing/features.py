"""Input of the probes: the texts of each task, and the mean over a text's tokens of residual stream and SAEs' codes.

A task is one class against all others, balanced, with texts drawn anew for each seed.
The model reads each text once for all SAEs; only means are kept. An SAE's means are sparse: a text of 128 tokens
activates a few thousand of 65,536 latents.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sampled_sae.data.contexts import HALVES, Tokenizer
from sampled_sae.evals.probing.data import Labelled
from sampled_sae.evals.probing.schema import ProbingConfig
from sampled_sae.evals.reading import not_finite
from sampled_sae.hooks import Where
from sampled_sae.method.codes import SparseCodes
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.system import matmul_precision

TEXTS_AT_ONCE = 1024  # texts that are tokenized together
CHARACTERS_A_TOKEN = 64  # characters read of a text per token: enough unless tokens are ten times as long as usual


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
    least = settings.fewest_texts, -(-settings.fewest_texts // 4)
    skipped: dict[str, str] = {}
    tasks: list[Task] = []
    for seed in settings.seeds:
        train, test = _pools(dataset, settings, seed)
        counts = {label: (len(train[label]), len(test[label])) for label in train}
        enough = {label for label, n in counts.items() if n[0] >= least[0] and n[1] >= least[1]}
        skipped = {
            label: f"{n[0]} texts to fit to and {n[1]} to test on, fewer than {least[0]} and {least[1]}"
            for label, n in counts.items()
            if label not in enough
        }
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


def _pools(dataset: Labelled, settings: ProbingConfig, seed: int) -> tuple[Pools, Pools]:
    """For each class the texts to fit to and those to test on."""
    members: Pools = {label: [] for label in dataset.classes}
    for number, label in enumerate(dataset.labels):
        members[label].append(number)
    train, test = dict[str, list[int]](), dict[str, list[int]]()
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
    # Which of the others gives one text more than the rest is left to chance too.
    others = _shuffled([name for name in sorted(pools) if name != label], seed)
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


def tokenize(texts: Sequence[str], tokenizer: Tokenizer, settings: ProbingConfig) -> list[list[int]]:
    """Texts -> their first tokens, without BOS; at least one each.

    A special token that is quoted in a text is read as its letters.
    """
    most = settings.tokens - settings.bos
    options = dict(add_special_tokens=False, split_special_tokens=True, padding=False, truncation=False)
    found: list[list[int]] = []
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        part = [HALVES.sub("\N{REPLACEMENT CHARACTER}", text) for text in texts[first : first + TEXTS_AT_ONCE]]
        # verbose=False: no warnings about texts longer than the model's context.
        ids = tokenizer(part, **options, return_attention_mask=False, verbose=False)["input_ids"]
        found += [list(one[:most]) for one in ids]
    for text, one in zip(texts, found, strict=True):
        if not one:
            raise UserError(f"datasets: the text {text[:40]!r} gives no token; take it out")
    return found


def bos_token(tokenizer: Tokenizer, settings: ProbingConfig) -> list[int]:
    """Token ids before each text: one or none."""
    if not settings.bos:
        return []
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    raise UserError("bos = True: the tokenizer has neither BOS nor EOS; must be False")


class MeanCodes:
    """Mean codes [N, d_sae] of N texts by one SAE, as sparse codes; texts are added in their order."""

    def __init__(self, sae: SAE, contrast: Tensor):
        """`contrast` [T, N]: weights of the texts in sums that are taken on the way, one per task."""
        self.contrast = contrast.to(sae.device, torch.float64)
        self.difference = torch.zeros(len(contrast), sae.d_sae, dtype=torch.float64, device=sae.device)
        """[T, d_sae]: the weighted sums over the texts so far."""
        self._parts: list[SparseCodes] = []

    def add(self, first: int, means: Tensor) -> None:
        """Mean codes [t, d_sae] of the texts from number `first` on."""
        self.difference += self.contrast[:, first : first + len(means)] @ means.double()
        codes = SparseCodes.from_dense(means)
        self._parts.append(codes._replace(token=codes.token.int(), latent=codes.latent.int()))

    @property
    def codes(self) -> SparseCodes:
        """The mean codes of all texts, as the codes of one token per text."""
        self._parts = [SparseCodes.cat(self._parts)]
        return self._parts[0]

    def columns(self, latents: Tensor) -> Tensor:
        """Latents [u], each once -> their means [N, u] float64."""
        return self.codes.columns(latents).double()

    def rows(self, texts: Tensor) -> Tensor:
        """Numbers of texts [n], each once -> the means [n, u] of the u latents that are not 0 in all of them."""
        codes = self.codes
        wanted = torch.zeros(codes.tokens, dtype=torch.bool, device=texts.device)
        wanted[texts] = True
        used = torch.zeros(codes.d_sae, dtype=torch.bool, device=texts.device)
        used[codes.latent[wanted[codes.token]]] = True
        return codes.columns(used.nonzero().squeeze(1), texts)


class Features(NamedTuple):
    """Input of the probes of one dataset."""

    residual: Tensor  # [N, d_in] float64: mean residual stream of each text
    codes: list[MeanCodes]  # mean codes of each text, for each SAE


def read(
    model: LanguageModel,
    layer: Where,
    saes: Sequence[SAE],
    ids: list[list[int]],
    contrast: Tensor,
    settings: ProbingConfig,
    progress: Callable[[int], None],
) -> Features:
    """Token ids of N texts, sorted by length -> their features; `contrast` [T, N] as in `MeanCodes`.

    `progress` is called after each batch with its number of texts.
    """
    before = bos_token(model.tokenizer, settings)
    codes = [MeanCodes(sae, contrast) for sae in saes]
    residual: list[Tensor] = []
    for first in range(0, len(ids), settings.contexts_at_once):
        part = [[*before, *one] for one in ids[first : first + settings.contexts_at_once]]
        longest = max(map(len, part))
        # Padding at the end affects no token before it and is in no mean: any id will do.
        padded = torch.tensor([one + [one[-1]] * (longest - len(one)) for one in part])
        stream = model.activations(padded, [layer])[layer][:, len(before) :]
        lengths = torch.tensor([len(one) - len(before) for one in part])[:, None]
        # 1 / length at a text's tokens, 0 after them
        weights = ((torch.arange(stream.shape[1]) < lengths).double() / lengths).to(stream.device)
        residual.append((stream.double() * weights[..., None]).sum(1))
        for sae, means in zip(saes, codes, strict=True):
            means.add(first, _pool(sae, stream, weights, settings))
        progress(len(part))
    found = torch.cat(residual)
    if not bool(found.isfinite().all()):
        raise not_finite(model, layer)
    return Features(found, codes)


def _pool(sae: SAE, stream: Tensor, weights: Tensor, settings: ProbingConfig) -> Tensor:
    """Residual stream [t, L, d_in] and weights of its tokens [t, L] -> mean codes [t, d_sae]."""
    at_once = max(1, settings.tokens_at_once // stream.shape[1])
    means = []
    for x, weight in zip(stream.split(at_once), weights.split(at_once), strict=True):
        with matmul_precision("high" if settings.tf32 else "highest"):
            z = sae.encode(x)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        with matmul_precision("highest"):
            means.append(torch.bmm(weight[:, None].to(z.device, z.dtype), z).squeeze(1))
    return torch.cat(means)
