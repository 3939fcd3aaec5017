"""Linear probes for first letters: 26 at once by Adam, and exact fits on a few latents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals import Progress
from sampled_sae.evals.absorption.schema import AbsorptionConfig, Start
from sampled_sae.evals.absorption.words import LETTERS, LayerReadings, make_prompts, read_layers
from sampled_sae.evals.probing.fit import fit
from sampled_sae.hooks import Where
from sampled_sae.method.codes import SparseCodes
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.errors import UserError

BETAS, EPSILON = (0.9, 0.999), 1e-8  # Adam's
ROUNDING = 1e-9  # size of weights that come from rounding alone


class Probes(NamedTuple):
    """One linear probe per letter: x @ weight + bias is above 0 where the letter is seen."""

    weight: Tensor  # [width, letters]
    bias: Tensor  # [letters]


class Schedule(NamedTuple):
    """How Adam goes over the words."""

    epochs: int
    batch: int
    lr: float  # in the first epoch
    end_lr: float  # where the learning rate would be after the last; it falls by the same factor each epoch
    decay: float  # weight decay, added to the gradient
    l1: float = 0.0  # weight of the probes' mean L1 norm


def _batches(inputs: Tensor | SparseCodes, order: Tensor, size: int) -> Iterator[Tensor | SparseCodes]:
    if isinstance(inputs, Tensor):
        yield from (inputs[rows] for rows in order.split(size))
        return
    for part in inputs.rows(order).split(size):
        # A GPU adds in any order; the product of dense matrices is the same each time, and fast there.
        yield part.dense() if part.value.is_cuda else part


def _times(x: Tensor | SparseCodes, weight: Tensor) -> Tensor:
    """x [b, width], weight [width, letters] -> x weight [b, letters]; of codes, only what fires is multiplied."""
    if isinstance(x, Tensor):
        return x @ weight
    products = weight[x.latent] * x.value[:, None]
    return weight.new_zeros(x.tokens, weight.shape[1]).index_add_(0, x.token, products)


def _gradient(x: Tensor | SparseCodes, errors: Tensor) -> Tensor:
    """x [b, width], errors [b, letters] -> x^T errors [width, letters]."""
    if isinstance(x, Tensor):
        return x.T @ errors
    products = errors[x.token] * x.value[:, None]
    return errors.new_zeros(x.d_sae, errors.shape[1]).index_add_(0, x.latent, products)


@torch.no_grad()
def fit_by_adam(inputs: Tensor | SparseCodes, truth: Tensor, start: Probes, schedule: Schedule, seed: int) -> Probes:
    """Fit one balanced logistic probe on inputs [n, width] per column of truth [n, letters] (1: has the letter).

    The loss is the mean over words and letters of the cross-entropy, in which words with the letter weigh as much in
    all as those without it. Adam stops where the schedule ends, converged or not: with few steps, as SAEBench takes,
    that decides what the probe finds. `start` is overwritten.
    """
    generator = torch.Generator().manual_seed(seed)
    weight, bias = start
    means, squares = ([torch.zeros_like(p) for p in start] for _ in range(2))
    positive = (len(truth) - truth.sum(0)) / truth.sum(0)
    fall = math.exp(math.log(schedule.end_lr / schedule.lr) / schedule.epochs)
    step = 0
    for epoch in range(schedule.epochs):
        lr = schedule.lr * fall**epoch
        order = torch.randperm(len(truth), generator=generator).to(truth.device)
        shuffled = truth[order].split(schedule.batch)
        for batch, y in zip(_batches(inputs, order, schedule.batch), shuffled, strict=True):
            step += 1
            seen = torch.sigmoid(_times(batch, weight) + bias)
            errors = torch.where(y > 0, (seen - 1) * positive, seen) / y.numel()
            gradients = [_gradient(batch, errors), errors.sum(0)]
            if schedule.l1:
                gradients[0].add_(weight.sign(), alpha=schedule.l1 / truth.shape[1])
            for p, g, mean, square in zip(start, gradients, means, squares, strict=True):
                _adam(p, g.add_(p, alpha=schedule.decay), mean, square, lr, step)
    return start


def _adam(p: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, lr: float, step: int) -> None:
    mean.lerp_(gradient, 1 - BETAS[0])
    square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
    scale = square.sqrt().div_(math.sqrt(1 - BETAS[1] ** step)).add_(EPSILON)
    p.addcdiv_(mean, scale, value=-lr / (1 - BETAS[0] ** step))


def start_at(kind: Start, width: int, letters: int, seed: int, device: torch.device) -> Probes:
    """Where Adam starts: at 0, or where a linear layer of torch does after `torch.manual_seed(seed)`."""
    if kind == "zero":
        return Probes(torch.zeros(width, letters, device=device), torch.zeros(letters, device=device))
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        layer = torch.nn.Linear(width, letters)
    return Probes(layer.weight.detach().T.contiguous().to(device), layer.bias.detach().to(device))


def fit_exactly(x: Tensor, truth: Tensor, counts: Tensor) -> Probes:
    """Balanced logistic regressions with an L2 penalty (scikit-learn's C = 1), each on inputs of its own.

    x [letters, n, k], truth [letters, n] bool and how often each row is there [letters, n] -> weight [letters, k] and
    bias [letters], float64. Rows with the letter weigh as much in all as those without it.
    """
    counts = counts.double()
    words, with_letter = counts.sum(1, keepdim=True), (counts * truth).sum(1, keepdim=True)
    weight, bias = fit(x, truth, counts * words / (2 * torch.where(truth, with_letter, words - with_letter)))
    # Inputs that tell nothing give 0: its sign must not be that of rounding.
    told = weight.abs().amax(1).maximum(bias.abs()) > ROUNDING
    return Probes(torch.where(told[:, None], weight, 0.0), torch.where(told, bias, 0.0))


def f1(seen: Tensor, truth: Tensor) -> Tensor:
    """seen and truth [n, letters] bool -> F1 [letters] float64; 0 where nothing is seen and nothing there."""
    both = (seen & truth).sum(0).double()
    either = (seen.sum(0) + truth.sum(0)).double()
    return torch.where(either > 0, 2 * both / either.clamp(min=1), 0.0)


class Spelling(NamedTuple):
    """Probes for the letters that some training word begins with, in the alphabet's order."""

    letters: list[int]  # these letters, 0 to 25; all else here goes by their order
    probes: Probes  # on the residual stream: weight [d, letters]
    f1: list[float | None]  # on the test words; none for a letter that no test word begins with
    right: Tensor  # measured words whose own probe sees their letter in the test prompt, [n_measured] bool
    column: Tensor  # the place of each letter of the alphabet, [26] int64; -1 for those without a probe

    def truth(self, letters: Tensor) -> Tensor:
        """First letters [n] -> [n, letters] bool."""
        return letters[:, None] == torch.tensor(self.letters, device=letters.device)


class LayerSpelling(NamedTuple):
    """How well probes predict first letters from the residual stream after one layer."""

    layer: Where
    words: int  # words that were read
    usable: int  # letters whose probe has an F1 above `min_f1`
    f1: dict[str, float | None]  # by letter; none where there were no words to train or to test on


def survey_layers(
    model: LanguageModel, layers: Sequence[Where], settings: AbsorptionConfig, progress: Progress | None = None
) -> list[LayerSpelling]:
    """Which of these layers the first-letter task works at; each prompt goes through the model once for all of them."""
    layers = [model.where(layer) for layer in layers]
    prompts = make_prompts(model.tokenizer, replace(settings, fresh_prompts=False))
    found = read_layers(model, prompts, layers, settings.prompts_at_once, progress or (lambda done, total: None))
    surveyed = []
    for layer in layers:
        spelling = learn_to_spell(found[layer], settings)
        by_letter = dict(zip(spelling.letters, spelling.f1, strict=True))
        scores = {name: by_letter.get(letter) for letter, name in enumerate(LETTERS)}
        usable = sum(score is not None and score > settings.min_f1 for score in scores.values())
        surveyed.append(LayerSpelling(layer, prompts.words, usable, scores))
    return surveyed


def learn_to_spell(readings: LayerReadings, settings: AbsorptionConfig) -> Spelling:
    """Fit the probes on the training words and test them."""
    train, test = readings.train, readings.test
    device = train.x.device
    letters: list[int] = train.letters.unique().tolist()
    if len(letters) < 2:
        raise UserError(f"the words to train on begin with {len(letters)} letter: probes need words of at least two")
    column = torch.full((len(LETTERS),), -1, device=device)
    column[letters] = torch.arange(len(letters), device=device)
    s = settings
    start = start_at(s.start, train.x.shape[1], len(letters), s.seed, device)
    schedule = Schedule(s.probe_epochs, s.probe_batch, s.lr, s.end_lr, s.probe_decay)
    alphabet = torch.tensor(letters, device=device)
    truth = (train.letters[:, None] == alphabet).float()
    probes = fit_by_adam(train.x, truth, start, schedule, s.seed)
    there, seen = test.letters[:, None] == alphabet, test.x @ probes.weight + probes.bias > 0
    tested = zip(f1(seen, there).tolist(), there.any(0).tolist(), strict=True)
    right = (seen & there).any(1)[readings.test_rows]
    return Spelling(letters, probes, [score if words else None for score, words in tested], right, column)
