"""Tokens as text: one line in one direction, and the bytes of tokens that are parts of a character."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.measures import shown

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece writes a token of one byte


class Words(NamedTuple):
    """Some tokens as text."""

    text: list[str]  # one line in one direction each; leading spaces are kept, line ends are ↵
    bytes: dict[int, list[int]]
    """The bytes of those that hold part of a character, by their number in the list: several together may be one."""


def words_of(tokens: Iterable[int], tokenizer: Any) -> Words:
    """The text of token ids, in their order."""
    if tokenizer is None:
        raise UserError("model: it comes without a tokenizer; tokens cannot be shown as text")
    ids = list(tokens)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    texts, parts = [], {}
    for number, (token, piece) in enumerate(zip(ids, pieces, strict=True)):
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if REPLACEMENT in text and (content := _bytes(piece)) is not None and not _is_text(content):
            parts[number] = list(content)
            text = "".join(f"\\x{byte:02x}" for byte in content)
        # Some tokenizers drop the space of a token that stands alone.
        elif isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" "):
            text = f" {text}"
        texts.append(shown(text.replace("\r\n", "\n").replace("\n", "↵").replace("\t", "⇥")))
    return Words(texts, parts)


def _is_text(content: bytes) -> bool:
    """Whether a replacement character was in the text itself."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _bytes(piece: str | None) -> bytes | None:
    """The bytes that a tokenizer's own name of a token stands for, where it is of a known kind."""
    if piece is None:
        return None
    if found := BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    try:
        return bytes(LETTERS[letter] for letter in piece)
    except KeyError:
        return None


def _letters() -> dict[str, int]:
    """Byte-level tokenizers name printable bytes by their Latin-1 letter, the others by letters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


LETTERS = _letters()
