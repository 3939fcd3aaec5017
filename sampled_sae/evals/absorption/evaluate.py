"""Absorption by the first-letter task: how often a letter's own latents do not fire and others carry the letter.

A letter such as "begins with S" is a feature of every word, but an SAE that may use few latents at a time learns
latents for single words that hold the letter too; its own latent is then silent there. `evaluate_absorption_many`
shows the model each word of its vocabulary in a prompt that asks for the first letter, finds the letters' directions
by probes on the residual stream and their main latents by probes on the codes, and measures at words that the model
spells right how much of the direction comes from other latents. Model, words and probes on the residual stream are
shared by all SAEs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals import Progress
from sampled_sae.evals.absorption.probes import (
    Schedule,
    Spelling,
    f1,
    fit_by_adam,
    fit_exactly,
    learn_to_spell,
    start_at,
)
from sampled_sae.evals.absorption.schema import Absorber, AbsorptionConfig, AbsorptionResult, LetterResult
from sampled_sae.evals.absorption.words import LETTERS, LayerReadings, Prompts, make_prompts, read_layers
from sampled_sae.evals.bootstrap import Spread, spread
from sampled_sae.evals.reading import checked
from sampled_sae.hooks import Where
from sampled_sae.method.codes import SparseCodes
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError

FEW_WORDS = 20  # with fewer words to test on a letter's F1 hangs on single ones
MOST_ABSORBERS = 10  # absorbing latents per letter that are named in a result
SILENT = 1e-8  # a main latent below this does not fire


class Spoken(NamedTuple):
    """What the model makes of the words at one layer: shared by all SAEs there."""

    prompts: Prompts
    readings: LayerReadings
    spelling: Spelling


def read_words(
    model: LanguageModel, layer: Where, settings: AbsorptionConfig, progress: Progress = lambda done, total: None
) -> Spoken:
    """Read the words and fit the letters' probes; `progress` counts prompts."""
    prompts, layer = make_prompts(model.tokenizer, settings), model.where(layer)
    readings = read_layers(model, prompts, [layer], settings.prompts_at_once, progress)[layer]
    return Spoken(prompts, readings, learn_to_spell(readings, settings))


def evaluate_absorption_many(
    saes: Sequence[SAE],
    model: LanguageModel,
    layer: Where,
    settings: AbsorptionConfig | None = None,
    progress: Progress | None = None,
    spoken: Spoken | None = None,
) -> Iterator[AbsorptionResult]:
    """The result of each SAE of the hook point `layer`, in order, as soon as it is measured; `progress`
    counts words, for the model and then again for each SAE. `spoken` is what `read_words` returned for the same model,
    layer and settings, to read the words once for several calls."""
    settings = settings or AbsorptionConfig()
    layer = model.where(layer)
    list(checked(saes, model, layer))
    each = 0

    def report(done: int, words: int = 0) -> None:
        nonlocal each
        each = words or each
        if progress is not None:
            progress(done, each * (1 + len(saes)))

    spoken = spoken or read_words(model, layer, settings, report)
    prompts, readings, spelling = spoken
    each = len(prompts.train) + len(prompts.test) + len(prompts.fresh)
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
        # Absorption is measured at the words that the probes get right.
        x, letters = readings.measured.x[spelling.right].to(sae.device), readings.measured.letters[spelling.right]
        codes, scales = encode_words(sae, x, settings.words_at_once), sae.scales(x)
        if isinstance(scales, Tensor):  # the SAE normalizes each token, but the probes do not
            codes = codes._replace(value=codes.value * scales[codes.token].float())
        columns, directions = spelling.column[letters].to(sae.device), spelling.probes.weight.T
        found = absorption(x, codes, columns, directions, sae.W_dec.detach(), latents.main, settings)
        parts, letters = [part.cpu() for part in found], letters.cpu()
        own = {letter: Absorption(*(part[letters == letter] for part in parts)) for letter in spelling.letters}
    return [_letter(letter, readings, spelling, latents, own.get(letter), settings) for letter in range(len(LETTERS))]


def over_letters(letters: Sequence[LetterResult], settings: AbsorptionConfig) -> tuple[str | None, list[Spread | None]]:
    """Why there are no means, and those of the fraction, full absorption, splitting and the main latents' F1."""
    usable = [letter for letter in letters if letter.usable]
    if len(usable) < settings.min_letters:
        few = ", ".join(letter.letter for letter in letters if not letter.usable and letter.test_words < FEW_WORDS)
        hint = f"; {few} had fewer than {FEW_WORDS} words to test on: more words (max_words) may help" if few else ""
        why_not = (
            f"the model does not spell well enough at this layer: {len(usable)} of 26 letters have a probe on the "
            f"residual stream with F1 > {settings.min_f1}, min_letters = {settings.min_letters}{hint}"
        )
        return why_not, [None] * 4
    numbers = [
        (letter.fraction, letter.full, float(len(letter.main)), letter.sparse_f1[len(letter.main) - 1])
        for letter in usable
        if letter.fraction is not None and letter.full is not None
    ]
    if len(numbers) < len(usable):
        return "no latent of the SAE fires at any word", [None] * 4
    return None, [spread(values) for values in zip(*numbers, strict=True)]


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
    why_not = None
    if not train_words or not test_words:
        why_not = f"no words to {'test' if train_words else 'train'} on begin with it"
    elif score is None or score <= settings.min_f1:
        why_not = f"F1 of its probe on the residual stream is {score or 0:.3f}, not above {settings.min_f1}"
    elif found and not words:
        why_not = "none of the test words that its probe gets right could be read again"
    return LetterResult(
        letter=LETTERS[letter],
        why_not=why_not,
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
    probes = fit_by_adam(codes.renumbered(firing), truth.float(), start, schedule, s.seed)
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
    size = settings.words_at_once
    words = zip(projections.split(size), codes.split(size), letters.split(size), strict=True)
    parts = [_measure(*some, cosines, is_main, settings) for some in words]
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
