"""Documents -> contexts: token ids [context] without gaps, with an end-of-text token between two documents."""

from __future__ import annotations

import copy
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from sampled_sae.config import Bound, Config, Count, Positive, require
from sampled_sae.models.language_model import LanguageModel, adds_bos
from sampled_sae.utils.errors import UserError

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
"""Chat models call the end of a turn their EOS; the token that parted documents in pretraining is one of these."""
LONGEST = 2**20
"""Characters of a document that are tokenized in one piece: memory must not depend on the longest document."""
MOST = 2**22
"""Characters that are tokenized at once, to within one piece."""
GROWTH = 8
"""A long text is tokenized in larger batches: many cores wait less for the longest document of each."""
HALVES = re.compile(r"[\ud800-\udfff]")
"""Halves of a surrogate pair: JSON may hold single ones, which are no text and no tokenizer takes."""
Encode = Callable[[list[str]], list[list[int]]]


class Tokenizer(Protocol):
    """What is used of a tokenizer of transformers."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def get_vocab(self) -> dict[str, int]: ...

    def __call__(self, text: list[str], **options: Any) -> Any: ...


ContextLength = Annotated[int, Bound("a context must have at least 2 tokens", lambda value: value >= 2)]


@dataclass(frozen=True, slots=True)
class TextConfig(Config):
    """How documents become contexts, and which of their positions are used."""

    context: ContextLength = 1024
    """Tokens per context, BOS included."""
    bos: bool | Literal["auto"] = "auto"
    """Whether each context begins with the tokenizer's BOS; auto follows the model."""
    skip_first: Count = 0
    """Positions to exclude at the start of each context, BOS included."""
    end_of_text: str | None = None
    """Token between two documents. Default: <|endoftext|> or <|end_of_text|> if there is one, else EOS."""
    documents_at_once: Positive = 64
    """Documents to tokenize together at first, later up to eight times as many; does not change the contexts."""

    def check(self) -> None:
        right = f"must leave some of the {self.context} positions of a context"
        require(self.skip_first < self.context, "skip_first", self.skip_first, right)


def contexts(documents: Iterable[str], tokenizer: Tokenizer, config: TextConfig | None = None) -> Iterator[Tensor]:
    """Contexts [context] int64: the documents' tokens in their order, the last incomplete context dropped."""
    config = config or TextConfig()
    before, end_of_text = _before(tokenizer, config.bos), find_end_of_text(tokenizer, config.end_of_text)
    return _filled(_tokenized(documents, encoder(tokenizer), end_of_text, config.documents_at_once), before, config)


def _filled(pieces: Iterable[np.ndarray], before: np.ndarray, config: TextConfig) -> Iterator[Tensor]:
    """Token ids, [n] at a time -> contexts [context] that begin with `before`."""
    given, size = False, config.context - len(before)
    parts, missing = [before], size
    for ids in pieces:
        while len(ids) >= missing:
            yield torch.from_numpy(np.concatenate([*parts, ids[:missing]]))
            given, ids, parts, missing = True, ids[missing:], [before], size
        parts.append(ids)
        missing -= len(ids)
    if not given:
        total, right = size - missing, "give more text or a smaller context"
        raise UserError(f"text: {total} tokens in all, too few for one context of {config.context}; {right}")


def _tokenized(documents: Iterable[str], encode: Encode, end_of_text: int, at_once: int) -> Iterator[np.ndarray]:
    """The token ids [n] int64 of each piece, with the end-of-text token that comes before it."""
    for batch in _batches(_pieces(documents), at_once):
        encoded = encode([text for text, _ in batch])
        for (_, parted), ids in zip(batch, encoded, strict=True):
            yield np.array([end_of_text, *ids] if parted else ids, dtype=np.int64)


def _batches(pieces: Iterable[tuple[str, bool]], at_once: int) -> Iterator[list[tuple[str, bool]]]:
    """Pieces in batches, the first of `at_once`, the next ones twice as many each, up to GROWTH times."""
    batch, characters, size = list[tuple[str, bool]](), 0, at_once
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[0])
        if len(batch) == size or characters >= MOST:
            yield batch
            batch, characters, size = [], 0, min(2 * size, GROWTH * at_once)
    if batch:
        yield batch


def encoder(tokenizer: Tokenizer) -> Encode:
    """Texts -> their token ids, nothing added.

    A special token that is quoted in a document is text: it is split like any other word.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "encode_batch_fast"):
        # The call below keeps books in Python; this one leaves Python free to drive the model. It changes a copy.
        own: Any = copy.deepcopy(backend)
        own.no_truncation()
        own.no_padding()
        own.encode_special_tokens = True
        return lambda texts: [encoding.ids for encoding in own.encode_batch_fast(texts, add_special_tokens=False)]
    options = dict(add_special_tokens=False, split_special_tokens=True, padding=False, truncation=False)
    # Quiet, or else it warns of documents longer than the model's context.
    return lambda texts: tokenizer(texts, **options, return_attention_mask=False, verbose=False)["input_ids"]


def find_end_of_text(tokenizer: Tokenizer, name: str | None = None) -> int:
    """The id of the token between two documents: the named one, or the one by which pretraining parts them."""
    vocabulary = tokenizer.get_vocab()
    if name is not None:
        require(name in vocabulary, "end_of_text", name, "the tokenizer has no such token")
        return vocabulary[name]
    found = next((vocabulary[known] for known in END_OF_TEXT if known in vocabulary), tokenizer.eos_token_id)
    if found is None:
        raise UserError("end_of_text = None: the tokenizer has no end-of-text token; name a token for it")
    return found


def _before(tokenizer: Tokenizer, bos: bool | Literal["auto"]) -> np.ndarray:
    """What each context begins with, [0] or [1]."""
    if not (adds_bos(tokenizer) if bos == "auto" else bos):
        return np.empty(0, np.int64)
    if tokenizer.bos_token_id is None:
        raise UserError("bos = True: the tokenizer has no BOS token; must be False")
    return np.array([tokenizer.bos_token_id], dtype=np.int64)


def _pieces(documents: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Documents, long ones in parts, without empty ones; each with whether an end-of-text token comes before it."""
    if isinstance(documents, str):
        raise UserError(
            f"documents = {documents[:40]!r}: must be an iterable of texts, such as TextSource.documents() returns"
        )
    first = True
    for index, document in enumerate(documents):
        if not isinstance(document, str):
            raise UserError(f"documents: item {index} is a {type(document).__name__}: must be a text")
        for number, text in enumerate(_parts(document)):
            try:
                text.encode()  # far quicker than to search for what is hardly ever there
            except UnicodeEncodeError:
                text = HALVES.sub("\N{REPLACEMENT CHARACTER}", text)
            yield text, number == 0 and not first
            first = False


def _parts(document: str) -> Iterator[str]:
    """Parts of at most LONGEST characters, cut before the space before a word where there is one.

    Tokenizers that join a space to the word after it then give the same tokens as for the whole.
    """
    start = 0
    while len(document) - start > LONGEST:
        lowest, end = start + LONGEST // 2, start + LONGEST
        space = document.rfind(" ", lowest, end)
        while space > 0 and document[space + 1].isspace():
            space = document.rfind(" ", lowest, space)
        end = space if space > 0 else end
        yield document[start:end]
        start = end
    if start < len(document):
        yield document[start:]


class ContextBank:
    """All contexts of a text by number, read as far as needed, by several threads too; the first follows the last."""

    def __init__(self, source: Iterator[Tensor]):
        self.source, self.read = source, list[Tensor]()
        self._one_reader = threading.Lock()
        self._error: Exception | None = None

    def has(self, count: int) -> int:
        """Read until there are `count` contexts, or all; returns how many there are."""
        if len(self.read) >= count:
            return len(self.read)
        with self._one_reader:
            if self._error is not None:  # that another thread met: the source has nothing more to say
                raise self._error
            try:
                new = islice(self.source, max(0, count - len(self.read)))
                self.read.extend(context.to(torch.int32) for context in new)
            except Exception as error:
                self._error = error
                raise
        return len(self.read)

    def take(self, first: int, count: int, skip: int) -> Tensor:
        """`count` contexts [count, L] from number `first` on, where the first `skip` of the text do not count."""
        there = self.has(skip + first + count) - skip
        return torch.stack([self.read[skip + number % there] for number in range(first, first + count)])


BOS_GAIN = 0.5  # nats per token by which BOS must lower the loss on PROBE for a warning
PROBE = "The quick brown fox jumps over the lazy dog, and then it runs back into the forest behind the old house."


def warn_without_bos(model: LanguageModel) -> None:
    """Print a line if the model's loss on a short sentence is far lower with BOS: it was trained with one."""
    bos = model.tokenizer.bos_token_id
    tokens = torch.tensor(encoder(model.tokenizer)([PROBE]))[:, : (model.context or 64) - 1]
    if bos is None or tokens.shape[1] < 3:
        return
    losses = []
    for first in ([], [bos]):
        logits = model.logits(torch.cat([torch.tensor([first], dtype=torch.long), tokens], dim=1))[0, len(first) :]
        losses.append(float(torch.nn.functional.cross_entropy(logits[:-1].float().cpu(), tokens[0, 1:])))
    if losses[0] - losses[1] > BOS_GAIN:
        without, with_ = (f"{loss:.2f}" for loss in losses)
        found = f"the loss on a short sentence is {without} without BOS and {with_} with it"
        print(f"{model.name}: {found}; the model expects BOS: set bos to true", file=sys.stderr)
