"""Documents -> contexts: token ids [context] without gaps, with an end-of-text token between two documents."""

from __future__ import annotations

import copy
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sampled_sae.config import Bound, Config, Count, Positive, require
from sampled_sae.models.language_model import adds_bos
from sampled_sae.utils.errors import UserError

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
"""Chat models call the end of a turn their EOS; the token that parted documents in pretraining is one of these."""
LONGEST = 2**20
"""Characters of a document that are tokenized in one piece: memory must not depend on the longest document."""
MOST = 2**22
"""Characters that are tokenized at once, to within one piece."""
HALVES = re.compile(r"[\ud800-\udfff]")
"""Halves of a surrogate pair: JSON may hold single ones, which are no text and no tokenizer takes."""


class Tokenizer(Protocol):
    """What is used of a tokenizer of transformers."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def get_vocab(self) -> dict[str, int]: ...

    def __call__(self, text: list[str], **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class TextConfig(Config):
    """How documents become contexts, and which of their positions are used."""

    context: Annotated[int, Bound("a context must have at least 2 tokens", lambda value: value >= 2)] = 1024
    """Tokens per context, BOS included."""
    bos: bool | Literal["auto"] = "auto"
    """Whether each context begins with the tokenizer's BOS; auto follows the model."""
    skip_first: Count = 0
    """Positions at the start of each context whose activations are left out; BOS is the first of them."""
    end_of_text: str | None = None
    """Token between two documents; none means <|endoftext|> or <|end_of_text|> if there is one, or else EOS."""
    documents_at_once: Positive = 64
    """Documents that are tokenized together; the contexts are the same whatever it is."""

    def check(self) -> None:
        right = f"must leave some of the {self.context} positions of a context"
        require(self.skip_first < self.context, "skip_first", self.skip_first, right)


def contexts(documents: Iterable[str], tokenizer: Tokenizer, config: TextConfig | None = None) -> Iterator[Tensor]:
    """Contexts [context] int64: the documents' tokens in their order, the last incomplete context dropped."""
    return ContextStream(documents, tokenizer, config)


class _Text(NamedTuple):
    """A document, or a part of a long one."""

    number: int
    text: str
    parted: bool
    """Whether an end-of-text token comes before it."""


class _Piece(NamedTuple):
    number: int
    ids: np.ndarray
    """[n] int64, with the end-of-text token that comes before."""


class ContextStream:
    """Contexts [context] int64, one after the other, from the beginning or from a `state`.

    `documents` are given from the first one on also with a `state`, which is what `position()` gave earlier: those
    that were used up are passed over without being tokenized.
    """

    def __init__(
        self,
        documents: Iterable[str],
        tokenizer: Tokenizer,
        config: TextConfig | None = None,
        state: Mapping[str, int] | None = None,
    ):
        self.config = config or TextConfig()
        self.end_of_text = find_end_of_text(tokenizer, self.config.end_of_text)
        self.before = _before(tokenizer, self.config.bos)
        self.given = 0
        self._encode = encoder(tokenizer)
        self._texts = _pieces(documents)
        self._ready: deque[_Piece] = deque()
        self._piece, self._used = _Piece(0, np.empty(0, np.int64)), 0
        if state is not None:
            self._continue(state)

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        parts, missing = [self.before], self.config.context - len(self.before)
        piece, used = self._piece, self._used
        while missing:
            part = piece.ids[used : used + missing]
            parts.append(part)
            used += len(part)
            missing -= len(part)
            if missing:
                following = self._following()
                if following is None:
                    self._check_any_given(missing)
                    raise StopIteration
                piece, used = following, 0
        # Only now: the position stays at the last whole context when the text ends within this one.
        self._piece, self._used = piece, used
        self.given += 1
        return torch.from_numpy(np.concatenate(parts))

    def position(self) -> dict[str, int]:
        """Where the last given context ended, as plain JSON: a `state` to continue from with the same settings.

        contexts: given so far; piece, tokens: number of the last piece used and how much of it; check: of its tokens.
        """
        check = zlib.crc32(self._piece.ids.astype("<i8").tobytes())
        return {"contexts": self.given, "piece": self._piece.number, "tokens": self._used, "check": check}

    def _continue(self, state: Mapping[str, int]) -> None:
        try:
            given, number, used = (int(state[name]) for name in ("contexts", "piece", "tokens"))
            check = int(state["check"])
        except (KeyError, TypeError, ValueError):
            raise UserError(f"state = {state!r}: must be what position() gave") from None
        if given == 0:
            return
        passed = sum(1 for _ in islice(self._texts, number))
        piece = self._following()
        if piece is None:
            raise UserError(f"text: ends after {passed} pieces, but piece {number} was used before: it has changed")
        self._piece, self._used, self.given = piece, used, given
        if used > len(piece.ids) or self.position()["check"] != check:
            raise UserError(
                f"text: piece {number} has other tokens than before; continue with the same text and tokenizer"
            )

    def _check_any_given(self, missing: int) -> None:
        size = self.config.context
        if self.given == 0:
            tokens = size - len(self.before) - missing
            raise UserError(
                f"text: {tokens} tokens in all, too few for one context of {size}; give more text or a smaller context"
            )

    def _following(self) -> _Piece | None:
        """The next piece, tokenized; none at the end of the text."""
        if not self._ready and (batch := self._batch()):
            self._ready.extend(self._tokenize(batch))
        return self._ready.popleft() if self._ready else None

    def _batch(self) -> list[_Text]:
        batch: list[_Text] = []
        characters = 0
        while len(batch) < self.config.documents_at_once and characters < MOST:
            text = next(self._texts, None)
            if text is None:
                break
            batch.append(text)
            characters += len(text.text)
        return batch

    def _tokenize(self, batch: list[_Text]) -> Iterator[_Piece]:
        encoded = self._encode([text.text for text in batch])
        for text, ids in zip(batch, encoded, strict=True):
            yield _Piece(text.number, np.array([self.end_of_text, *ids] if text.parted else ids, dtype=np.int64))


def encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
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
    for known in END_OF_TEXT:
        if known in vocabulary:
            return vocabulary[known]
    if tokenizer.eos_token_id is None:
        raise UserError("end_of_text = None: the tokenizer has no end-of-text token; name a token for it")
    return tokenizer.eos_token_id


def _before(tokenizer: Tokenizer, bos: bool | Literal["auto"]) -> np.ndarray:
    """What each context begins with, [0] or [1]."""
    if not (adds_bos(tokenizer) if bos == "auto" else bos):
        return np.empty(0, np.int64)
    if tokenizer.bos_token_id is None:
        raise UserError("bos = True: the tokenizer has no BOS token; must be False")
    return np.array([tokenizer.bos_token_id], dtype=np.int64)


def _pieces(documents: Iterable[str]) -> Iterator[_Text]:
    """Documents, long ones in parts, numbered from 0. Empty ones are left out."""
    if isinstance(documents, str):
        raise UserError(
            f"documents = {documents[:40]!r}: must be an iterable of texts, such as TextSource.documents() returns"
        )
    number = 0
    for index, document in enumerate(documents):
        if not isinstance(document, str):
            raise UserError(f"documents: item {index} is a {type(document).__name__}: must be a text")
        begins = True
        for text in _parts(document):
            yield _Text(number, _whole(text), parted=begins and number > 0)
            number, begins = number + 1, False


def _whole(text: str) -> str:
    try:
        text.encode()  # far quicker than to search for what is hardly ever there
    except UnicodeEncodeError:
        return HALVES.sub("\N{REPLACEMENT CHARACTER}", text)
    return text


def _parts(document: str) -> Iterator[str]:
    """Parts of at most LONGEST characters, cut before the space before a word where there is one.

    Tokenizers that join a space to the word after it then give the same tokens as for the whole.
    """
    start = 0
    while len(document) - start > LONGEST:
        end = _cut(document, start + LONGEST // 2, start + LONGEST)
        yield document[start:end]
        start = end
    if start < len(document):
        yield document[start:]


def _cut(document: str, lowest: int, highest: int) -> int:
    space = document.rfind(" ", lowest, highest)
    while space > 0 and document[space + 1].isspace():
        space = document.rfind(" ", lowest, space)
    return space if space > 0 else highest


class ContextBank:
    """All contexts of a text by number, read as far as needed; the first follows the last."""

    def __init__(self, source: Iterator[Tensor]):
        self.source: Iterator[Tensor] | None = source
        self.read: list[Tensor] = []

    def has(self, count: int) -> int:
        """Read until there are `count` contexts, or all; returns how many there are."""
        while self.source is not None and len(self.read) < count:
            context = next(self.source, None)
            if context is None:
                self.source = None
            else:
                self.read.append(context.to(torch.int32))
        return len(self.read)

    def take(self, first: int, count: int, skip: int) -> Tensor:
        """`count` contexts [count, L] from number `first` on, where the first `skip` of the text do not count."""
        there = self.has(skip + first + count) - skip
        return torch.stack([self.read[skip + number % there] for number in range(first, first + count)])
