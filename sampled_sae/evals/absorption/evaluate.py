"""Absorption by the first-letter task: how often a letter's own latents do not fire and others carry the letter.

A letter such as "begins with S" is a feature of every word, but an SAE that may use few latents at a time learns
latents for single words that hold the letter too; its own latent is then silent there. `evaluate_absorption_many`
shows the model each word of its vocabulary in a prompt that asks for the first letter, finds the letters' directions
by probes on the residual stream and their main latents by probes on the codes, and measures at words that the model
spells right how much of the direction comes from other latents. Model, words and probes on the residual stream are
shared by all SAEs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sampled_sae.evals.absorption.probes import Spelling, learn_to_spell
from sampled_sae.evals.absorption.schema import AbsorptionConfig, AbsorptionResult, LetterResult
from sampled_sae.evals.absorption.score import (
    Absorption,
    MainLatents,
    absorption,
    count_absorbers,
    encode_words,
    find_main_latents,
)
from sampled_sae.evals.absorption.words import LETTERS, LayerReadings, Progress, make_prompts, read_layers
from sampled_sae.evals.bootstrap import Spread, spread
from sampled_sae.evals.reading import checked
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError

FEW_WORDS = 20  # with fewer words to test on a letter's F1 hangs on single ones
MOST_ABSORBERS = 10  # absorbing latents per letter that are named in a result


def evaluate_absorption_many(
    saes: Sequence[SAE],
    model: LanguageModel,
    layer: int,
    settings: AbsorptionConfig | None = None,
    progress: Progress | None = None,
) -> Iterator[AbsorptionResult]:
    """The result of each SAE of the residual stream after `layer`, in order, as soon as it is measured; `progress`
    counts words, for the model and then again for each SAE."""
    settings = settings or AbsorptionConfig()
    layer = model.check_layer(layer)
    list(checked(saes, model, layer))
    prompts = make_prompts(model.tokenizer, settings)
    each = len(prompts.train) + len(prompts.test) + len(prompts.fresh)

    def report(done: int, _: int = 0) -> None:
        if progress is not None:
            progress(done, each * (1 + len(saes)))

    readings = read_layers(model, prompts, [layer], settings.prompts_at_once, report)[layer]
    spelling = learn_to_spell(readings, settings)
    for number, sae in enumerate(saes, start=1):
        try:
            letters = measure_sae(sae, readings, spelling, settings)
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                f"words_at_once = {settings.words_at_once}, sparse_batch = {settings.sparse_batch}: out of memory on "
                f"{sae.device} with an SAE of {sae.d_sae} latents; lower words_at_once first, it changes no number"
            ) from None
        why_not, means = over_letters(letters, settings)
        yield AbsorptionResult(
            model=model.name,
            dtype=str(model.dtype).removeprefix("torch."),
            layer=layer,
            words=prompts.words,
            left_out=prompts.left_out,
            tail=prompts.tail,
            usable_letters=sum(letter.usable for letter in letters),
            not_evaluable=why_not,
            fraction=means[0],
            full=means[1],
            splits=means[2],
            main_f1=means[3],
            letters=letters,
            settings=settings,
        )
        report(each * (1 + number))


def measure_sae(
    sae: SAE, readings: LayerReadings, spelling: Spelling, settings: AbsorptionConfig
) -> list[LetterResult]:
    """All 26 letters of one SAE."""
    train, test = (encode_words(sae, part.x, settings.words_at_once) for part in (readings.train, readings.test))
    latents, own = None, dict[int, Absorption]()
    if len(train.value):
        truths = [spelling.truth(part.letters.to(sae.device)) for part in (readings.train, readings.test)]
        latents = find_main_latents(train, test, truths[0], truths[1], settings)
        own = _absorbed(sae, readings, spelling, latents, settings)
    return [_letter(letter, readings, spelling, latents, own.get(letter), settings) for letter in range(len(LETTERS))]


def over_letters(letters: Sequence[LetterResult], settings: AbsorptionConfig) -> tuple[str | None, list[Spread | None]]:
    """Why there are no means, and those of the fraction, full absorption, splitting and the main latents' F1."""
    usable = [letter for letter in letters if letter.usable]
    if len(usable) < settings.min_letters:
        why_not = (
            f"the model does not spell well enough at this layer: {len(usable)} of 26 letters have a probe on the "
            f"residual stream with F1 > {settings.min_f1}, min_letters = {settings.min_letters}{_few_words(letters)}"
        )
        return why_not, [None] * 4
    measured = [letter for letter in usable if letter.fraction is not None and letter.full is not None]
    if len(measured) < len(usable):
        return "no latent of the SAE fires at any word", [None] * 4
    numbers = (
        [letter.fraction for letter in measured if letter.fraction is not None],
        [letter.full for letter in measured if letter.full is not None],
        [float(len(letter.main)) for letter in measured],
        [letter.sparse_f1[len(letter.main) - 1] for letter in measured],
    )
    return None, [spread(values) for values in numbers]


def _few_words(letters: Sequence[LetterResult]) -> str:
    """What else it may be."""
    few = [letter.letter for letter in letters if not letter.usable and letter.test_words < FEW_WORDS]
    if not few:
        return ""
    return f"; {', '.join(few)} had fewer than {FEW_WORDS} words to test on: more words (max_words) may help"


def _absorbed(
    sae: SAE, readings: LayerReadings, spelling: Spelling, latents: MainLatents, settings: AbsorptionConfig
) -> dict[int, Absorption]:
    """By letter, the words that the probes get right."""
    right = spelling.right
    x, letters = readings.measured.x[right].to(sae.device), readings.measured.letters[right]
    codes = encode_words(sae, x, settings.words_at_once)
    columns, directions = spelling.column[letters].to(sae.device), spelling.probes.weight.T
    found = absorption(x, codes, columns, directions, sae.W_dec.detach(), latents.main, settings)
    found, letters = Absorption(*(values.cpu() for values in found)), letters.cpu()
    return {letter: _rows(found, letters == letter) for letter in spelling.letters}


def _rows(found: Absorption, which: Tensor) -> Absorption:
    return Absorption(*(values[which] for values in found))


def _letter(
    letter: int,
    readings: LayerReadings,
    spelling: Spelling,
    latents: MainLatents | None,
    found: Absorption | None,
    settings: AbsorptionConfig,
) -> LetterResult:
    train_words, test_words = (int((part.letters == letter).sum()) for part in (readings.train, readings.test))
    place = spelling.letters.index(letter) if letter in spelling.letters else None
    score = None if place is None else spelling.f1[place]
    words = 0 if found is None else len(found.fraction)
    absorbers, absorbing = count_absorbers(found, MOST_ABSORBERS) if found else ([], 0)
    sparse_f1, ranked, main = list[float](), list[int](), list[int]()
    if place is not None and latents is not None:
        sparse_f1, ranked, main = latents.f1[place], latents.ranked[place], latents.main[place]
    return LetterResult(
        letter=LETTERS[letter],
        why_not=_why_not(train_words, test_words, score, found, settings),
        train_words=train_words,
        test_words=test_words,
        f1=score,
        sparse_f1=sparse_f1,
        ranked=ranked,
        main=main,
        words=words,
        fraction=float(found.fraction.double().mean()) if found and words else None,
        full=float(found.full.double().mean()) if found and words else None,
        full_words=int(found.full.sum()) if found else 0,
        absorbers=absorbers,
        absorbing=absorbing,
    )


def _why_not(
    train_words: int, test_words: int, score: float | None, found: Absorption | None, settings: AbsorptionConfig
) -> str | None:
    for words, what in ((train_words, "train"), (test_words, "test")):
        if not words:
            return f"no words to {what} on begin with it"
    if score is None or score <= settings.min_f1:
        return f"F1 of its probe on the residual stream is {score or 0:.3f}, not above {settings.min_f1}"
    if found and not len(found.fraction):
        return "none of the test words that its probe gets right could be read again"
    return None
