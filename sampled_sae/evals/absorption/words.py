"""The first-letter task: words of a tokenizer's vocabulary, and prompts that ask for their first letter."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sampled_sae.evals import Progress
from sampled_sae.evals.absorption.schema import AbsorptionConfig
from sampled_sae.hooks import Where
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.errors import UserError

LETTERS = ascii_lowercase
TEXTS_AT_ONCE = 4096  # prompts that are tokenized together


class Word(NamedTuple):
    """A word that is one token of the vocabulary."""

    text: str  # ASCII letters, with or without a leading space
    token: int  # its id

    @property
    def letter(self) -> int:
        """Its first letter, 0 to 25; capitals count as small ones."""
        return LETTERS.index(self.text.strip()[0].lower())


class Prompt(NamedTuple):
    """A word after solved lines; what would follow the word is left off, for nothing of it is read."""

    word: Word
    tokens: np.ndarray  # [L] int64, the last one is the word


class Prompts(NamedTuple):
    """All prompts of an evaluation."""

    train: list[Prompt]  # probes are fitted on these
    test: list[Prompt]  # probes are tested on these
    fresh: list[Prompt]  # the test words after other lines; empty if none were asked for
    words: int  # words that were drawn for the task
    left_out: int  # words of the vocabulary that come out as other tokens in a prompt
    tail: int  # tokens of the template after the word


def make_prompts(tokenizer: Any, settings: AbsorptionConfig) -> Prompts:
    """Words of the vocabulary, split, each in one prompt; the same for the same seed."""
    words, left_out = find_words(tokenizer, settings)
    rng = random.Random(settings.seed)
    shuffled = rng.sample(words, len(words))[: settings.max_words]
    cut = int(len(shuffled) * settings.train_share)
    train, test = shuffled[:cut], shuffled[cut:]
    # A word is never among its own lines.
    if min(len(train), len(test)) <= settings.lines:
        raise UserError(
            f"max_words = {settings.max_words}: {len(train)} words to train and {len(test)} to test, of {len(words)} "
            f"that the tokenizer has; lines = {settings.lines} need more than {settings.lines} of each"
        )
    texts = [(word, prompt_text(word, part, settings, rng)) for part in (train, test) for word in part]
    if settings.fresh_prompts:
        texts += [(word, prompt_text(word, shuffled, settings, rng)) for word in test]
    [line] = _encode(tokenizer, ["\n" + settings.template.format(word=words[0].text)])
    tail = len(line) - 1 - line.index(words[0].token)
    prompts = _tokenize(tokenizer, texts, tail, settings)
    parts = prompts[: len(train)], prompts[len(train) : len(shuffled)], prompts[len(shuffled) :]
    kept = [[prompt for prompt in part if prompt is not None] for part in parts]
    odd = {word.token for (word, _), prompt in zip(texts, prompts, strict=True) if prompt is None}
    return Prompts(kept[0], kept[1], kept[2], len(shuffled), left_out + len(odd), tail)


def find_words(tokenizer: Any, settings: AbsorptionConfig) -> tuple[list[Word], int]:
    """The vocabulary's words in the order of their ids, and how many are left out: those that a line splits."""
    # Some tokenizers list their vocabulary in another order each time.
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = [Word(_as_text(tokenizer, token), number) for token, number in vocabulary]
    words = [word for word in words if re.fullmatch(" ?[A-Za-z]+", word.text)]
    if not words:
        raise UserError("the tokenizer has no words of ASCII letters: the first-letter task needs some")
    lines = _encode(tokenizer, ["\n" + settings.template.format(word=word.text) for word in words])
    frames = [_frame(line, word.token) for line, word in zip(lines, words, strict=True)]
    # What most words stand in is the template; a word of several tokens, or one that melts into its neighbours, is not.
    counts = Counter(frame for frame in frames if frame is not None)
    usual = counts.most_common(1)[0][0] if counts else None
    kept = [word for word, frame in zip(words, frames, strict=True) if frame is not None and frame == usual]
    return kept, len(words) - len(kept)


def prompt_text(word: Word, examples: Sequence[Word], settings: AbsorptionConfig, rng: random.Random) -> str:
    """Solved lines of some examples, then the word's own line up to its answer."""
    drawn = rng.sample(examples, settings.lines)
    while any(example.text == word.text for example in drawn):
        drawn = rng.sample(examples, settings.lines)
    solved = [f"{settings.template.format(word=w.text)} {LETTERS[w.letter].upper()}" for w in drawn]
    # The first line too comes after a newline, so that words stand alike everywhere.
    return "".join(f"\n{line}" for line in (*solved, settings.template.format(word=word.text)))


def _tokenize(
    tokenizer: Any, texts: Sequence[tuple[Word, str]], tail: int, settings: AbsorptionConfig
) -> list[Prompt | None]:
    """Prompts up to their word, which `tail` tokens follow; none where the word is another token there."""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    before = [first] if settings.bos and first is not None else []
    prompts: list[Prompt | None] = []
    for (word, _), ids in zip(texts, _encode(tokenizer, [text for _, text in texts]), strict=True):
        ok = len(ids) > tail and ids[-tail - 1] == word.token
        prompts.append(Prompt(word, np.array([*before, *ids[:-tail]], np.int64)) if ok else None)
    return prompts


def _frame(line: list[int], token: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The tokens before and after a token; none if it is not in the line."""
    if token not in line:
        return None
    place = line.index(token)
    return tuple(line[:place]), tuple(line[place + 1 :])


def _encode(tokenizer: Any, texts: Sequence[str]) -> Iterator[list[int]]:
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        yield from tokenizer(list(texts[first : first + TEXTS_AT_ONCE]), add_special_tokens=False)["input_ids"]


def _as_text(tokenizer: Any, token: str) -> str:
    text: str = tokenizer.convert_tokens_to_string([token])
    # Some tokenizers drop the space that this sign stands for at the start of a text.
    return f" {text}" if token.startswith("▁") and not text.startswith(" ") else text


class Readings(NamedTuple):
    """Words and what one layer of the model holds at them."""

    x: Tensor  # the residual stream at the word's token, [n, d] float32
    letters: Tensor  # first letters, [n] int64, 0 to 25
    words: list[str]  # the words themselves


class LayerReadings(NamedTuple):
    """One layer's readings of all prompts."""

    train: Readings  # words that probes are fitted on
    test: Readings  # words that test them
    measured: Readings  # test words on which absorption is measured: `test` itself, or the same words in fresh prompts
    test_rows: Tensor  # where each measured word is in `test`, [n_measured] int64


def read_layers(
    model: LanguageModel, prompts: Prompts, layers: Sequence[Where], at_once: int, progress: Progress
) -> dict[Where, LayerReadings]:
    """Every prompt once through the model, up to the last of the layers; `progress` counts prompts."""
    streams = _read(model, [*prompts.train, *prompts.test, *prompts.fresh], layers, at_once, progress)
    first, second = len(prompts.train), len(prompts.train) + len(prompts.test)
    place = {prompt.word.token: row for row, prompt in enumerate(prompts.test)}
    # A fresh prompt may be readable where the first one was not.
    fresh = [row for row, prompt in enumerate(prompts.fresh) if prompt.word.token in place]
    found = {}
    for layer, x in streams.items():
        test = _readings(x[first:second], prompts.test)
        if prompts.fresh:
            measured = _readings(x[second:][fresh], [prompts.fresh[row] for row in fresh])
            rows = torch.tensor([place[prompts.fresh[row].word.token] for row in fresh], device=x.device)
        else:
            measured, rows = test, torch.arange(len(prompts.test), device=x.device)
        found[layer] = LayerReadings(_readings(x[:first], prompts.train), test, measured, rows)
    return found


def _read(
    model: LanguageModel, prompts: Sequence[Prompt], layers: Sequence[Where], at_once: int, progress: Progress
) -> dict[Where, Tensor]:
    """The residual stream at each prompt's last token, [n, d] float32 by layer."""
    streams = {layer: torch.empty(len(prompts), model.width_at(layer), device=model.device) for layer in layers}
    lengths = np.array([len(prompt.tokens) for prompt in prompts])
    done = 0
    # Prompts of one length at a time, so that nothing is padded.
    for length in np.unique(lengths):
        same = np.flatnonzero(lengths == length)
        for start in range(0, len(same), at_once):
            rows = same[start : start + at_once]
            tokens = torch.from_numpy(np.stack([prompts[row].tokens for row in rows]))
            where = torch.from_numpy(rows).to(model.device)
            for layer, stream in model.activations(tokens, layers).items():
                streams[layer][where] = stream[:, -1].float()
            done += len(rows)
            progress(done, len(prompts))
    return streams


def _readings(x: Tensor, prompts: Sequence[Prompt]) -> Readings:
    letters = torch.tensor([prompt.word.letter for prompt in prompts], device=x.device)
    return Readings(x, letters, [prompt.word.text for prompt in prompts])
