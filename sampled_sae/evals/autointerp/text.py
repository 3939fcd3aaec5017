"""Tokens and windows as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sampled_sae.errors import UserError

OPEN, CLOSE = "<<", ">>"
"""Around a marked token."""


class TokenText:
    """Token ids -> what they stand for, each by itself."""

    def __init__(self, tokenizer: Any):
        """A tokenizer of transformers."""
        if tokenizer is None:
            raise UserError("model: it comes without a tokenizer; windows cannot be shown as text")
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        """The token's text: with its leading space, line ends as ↵, halves of a character left out."""
        if token not in self._known:
            text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
            piece = self._tokenizer.convert_ids_to_tokens(token)
            # Some tokenizers drop the space of a token that stands alone.
            if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" "):
                text = f" {text}"
            self._known[token] = text.replace("�", "").replace("\n", "↵")
        return self._known[token]

    def show(self, tokens: Sequence[int], marks: Sequence[bool] | None = None) -> str:
        """A window as one line, with the marked tokens between << and >>."""
        if marks is None:
            return "".join(self[token] for token in tokens)
        pairs = zip(tokens, marks, strict=True)
        return "".join(f"{OPEN}{self[token]}{CLOSE}" if marked else self[token] for token, marked in pairs)
