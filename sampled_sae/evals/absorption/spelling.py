"""Whether a model knows first letters: one probe a letter on the residual stream, the ground truth of absorption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.data.layers import LanguageModel
from sampled_sae.errors import UserError
from sampled_sae.evals.absorption.config import AbsorptionConfig
from sampled_sae.evals.absorption.probes import Dense, Probes, Schedule, f1, fit_by_adam, start_at
from sampled_sae.evals.absorption.reading import LayerReadings, Progress, read_layers
from sampled_sae.evals.absorption.words import LETTERS, make_prompts


class Spelling(NamedTuple):
    """Probes for the letters that some training word begins with, in the alphabet's order."""

    letters: list[int]
    """These letters, 0 to 25; all else here goes by their order."""
    probes: Probes
    """On the residual stream: weight [d, letters]."""
    f1: list[float | None]
    """On the test words; none for a letter that no test word begins with."""
    right: Tensor
    """Measured words whose own probe sees their letter in the test prompt, [n_measured] bool."""
    column: Tensor
    """The place of each letter of the alphabet, [26] int64; -1 for those without a probe."""

    def truth(self, letters: Tensor) -> Tensor:
        """First letters [n] -> [n, letters] bool."""
        return letters[:, None] == torch.tensor(self.letters, device=letters.device)


class LayerSpelling(NamedTuple):
    """How well the residual stream after one layer tells first letters."""

    layer: int
    words: int
    """Words that were read."""
    usable: int
    """Letters whose probe has an F1 above `min_f1`."""
    f1: dict[str, float | None]
    """By letter; none where there were no words to train or to test on."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return self._asdict()


def survey_layers(
    model: LanguageModel, layers: Sequence[int], settings: AbsorptionConfig, progress: Progress | None = None
) -> list[LayerSpelling]:
    """Which of these layers the first-letter task works at; each prompt goes through the model once for all of them."""
    layers = [model.check_layer(layer) for layer in layers]
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
    probes = fit_by_adam(Dense(train.x), truth, start, schedule, settings.seed)
    there, seen = test.letters[:, None] == alphabet, probes.scores(test.x) > 0
    scores = f1(seen, there).tolist()
    tested = there.any(0).tolist()
    right = (seen & there).any(1)[readings.test_rows]
    known = [score if any_words else None for score, any_words in zip(scores, tested, strict=True)]
    return Spelling(letters, probes, known, right, column)
