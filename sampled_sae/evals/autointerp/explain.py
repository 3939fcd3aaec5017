"""Explainers: a chat model, or statistics of tokens and contexts; tokens and windows as text."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from sampled_sae.evals.autointerp.chat import Answer, Chat, Done, Question
from sampled_sae.evals.autointerp.schema import EXPLANATION_TOKENS
from sampled_sae.evals.autointerp.trials import Case
from sampled_sae.evals.reading import token_text
from sampled_sae.utils.errors import UserError

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
            self._known[token] = token_text(token, self._tokenizer).replace("�", "").replace("\n", "↵")
        return self._known[token]

    def show(self, tokens: Sequence[int], marks: Sequence[bool] | None = None) -> str:
        """A window as one line, with the marked tokens between << and >>."""
        pairs = zip(tokens, marks or [False] * len(tokens), strict=True)
        return "".join(f"{OPEN}{self[token]}{CLOSE}" if marked else self[token] for token, marked in pairs)


INSTRUCTIONS = (
    "You are looking at one latent of a sparse autoencoder that was trained on the activations of a language model. "
    "Below are excerpts of text on which it fires, the strongest first. The tokens on which it fires stand between << "
    "and >>. It may fire on particular words or parts of words, on a kind of word, on punctuation, or on most tokens "
    "of texts about some subject. Say in one short sentence of at most 20 words what the marked tokens have in common; "
    "mention spelling, capitals or position only where they matter. Cover most of the excerpts, do not list many "
    "words, and do not quote the excerpts at length. Begin with: This latent fires on"
)
OPENING = re.compile(
    r"(?is)^\W*(?:.*?\b(?:this|the)\s+(?:\w+\s+)?(?:latent|neuron|feature|unit)|it)\s+(?:\w+ly\s+)?(?:fires|activates)\s+"
    r"(?:\w+ly\s+)?(?:on|for|when|in)\b[\s:*]*"
)
"""Up to `this latent fires on`; the word fires inside an explanation is no opening."""
WRAPPED = re.compile(r"(?s)([\"'])((?:(?!\1).)*)\1")  # An answer that is one quotation
THOUGHTS = re.compile(r"(?s)<think>.*?(?:</think>|\Z)")


class Explained(NamedTuple):
    """The explanation of one latent."""

    text: str | None  # None if there is none
    reason: str = ""  # why there is none


class Explainer(Protocol):
    """Explains latents by what they fire on."""

    name: str

    def explain(self, cases: Sequence[Case], done: Done | None = None) -> list[Explained]: ...


class ChatExplainer:
    """Shows a chat model the windows with the firing tokens marked."""

    def __init__(self, chat: Chat, text: TokenText):
        self.name = f"chat {chat.config.model}"
        self.chat, self.text = chat, text

    def explain(self, cases: Sequence[Case], done: Done | None = None) -> list[Explained]:
        """One call per latent."""
        return [read_explanation(answer) for answer in self.chat.ask([self.question(case) for case in cases], done)]

    def question(self, case: Case) -> Question:
        """What is asked about one latent."""
        lines = [
            f"{number}. {self.text.show(window.tokens, [value > case.cut for value in window.activations])}"
            for number, window in enumerate(case.shown, 1)
        ]
        return Question(INSTRUCTIONS, "The excerpts:\n\n" + "\n".join(lines), EXPLANATION_TOKENS)


def read_explanation(answer: Answer) -> Explained:
    """The sentence without its opening; a thinking model's thoughts are no part of it."""
    if answer.text is None:
        return Explained(None, answer.reason)
    said = THOUGHTS.sub("", answer.text).strip()
    if wrapped := WRAPPED.fullmatch(said):
        said = wrapped[2]
    text = " ".join(OPENING.sub("", said, count=1).split()).strip(" .*")
    if not any(letter.isalnum() for letter in text):
        return Explained(None, "the chat model's answer holds no explanation")
    return Explained(text)


NAMED = 6  # Tokens named at most
BEFORE = 3  # Tokens before named at most
WORDS = 8  # Words of the contexts named at most
WINDOWS = 400  # Firings whose surroundings are looked at
COVERED = 0.8  # Share after which no more tokens are named
OFTEN = 0.25  # Share from which on the tokens before are worth a word
MANY = 0.3  # Share below which the named tokens are only examples


class ContrastExplainer:
    """Names what is more frequent where a latent fires than in the text [n, L] at large."""

    name = "offline contrast"

    def __init__(self, contexts: Tensor, text: TokenText, buffer: int):
        """`buffer`: tokens on each side that are its surroundings."""
        self.flat, self.length, self.text, self.buffer = contexts.flatten(), contexts.shape[1], text, buffer
        self._forms: dict[int, str] = {}
        ids, counts = self.flat.unique(return_counts=True)
        self.background: Counter[str] = Counter()
        for token, count in zip(ids.tolist(), counts.tolist(), strict=True):
            self.background[self.form(token)] += count
        self.total = len(self.flat)

    def explain(self, cases: Sequence[Case], done: Done | None = None) -> list[Explained]:
        """One sentence per latent."""
        found = []
        for number, case in enumerate(cases, 1):
            found.append(Explained(self.sentence(case.elsewhere, case.strength)))
            if done is not None:
                done(number)
        return found

    def sentence(self, places: Tensor, strength: Tensor) -> str:
        """Flat positions of firings [f] and activations [f] -> what sets them apart.

        A firing counts by the square of its activation, as it does in the draws of windows.
        """
        weight = strength.double().square()
        weight /= weight.sum()
        named, share = self._apart(self.flat[places], weight, NAMED)
        quoted = ", ".join(quote(form) for form in named)
        parts = [f"{quoted} ({share:.0%})" if share >= MANY else f"many tokens such as {quoted}"]
        if not named:
            parts = ["parts of characters"]
        inner = places % self.length > 0
        before, share = self._apart(self.flat[places[inner] - 1], weight[inner], BEFORE)
        if share >= OFTEN:
            parts[0] += f", after {' or '.join(quote(form) for form in before)}"
        if words := self._around(places, weight, set(named)):
            parts.append(f"in text with {', '.join(words)}")
        return "; ".join(parts)

    def form(self, token: int) -> str:
        """Tokens that differ in capitals or a leading space alone are one."""
        if token not in self._forms:
            text = self.text[token]
            self._forms[token] = text.strip().lower() or text
        return self._forms[token]

    def _apart(self, tokens: Tensor, weight: Tensor, most: int) -> tuple[list[str], float]:
        """The forms of tokens [f] that add most to the divergence from the text, until they cover what there is to
        cover, and their share of the weight [f]."""
        shares: dict[str, float] = defaultdict(float)
        for token, share in zip(tokens.tolist(), weight.tolist(), strict=True):
            shares[self.form(token)] += share
        gain = {
            form: share * math.log(share / ((self.background[form] + 0.5) / (self.total + 1)))
            for form, share in shares.items()
            if form  # a part of a character has no form
        }
        named: list[str] = []
        for form in sorted(gain, key=lambda form: (-gain[form], form))[:most]:
            if named and (sum(shares[other] for other in named) >= COVERED or gain[form] <= 0):
                break
            named.append(form)
        return named, sum(shares[form] for form in named)

    def _around(self, places: Tensor, weight: Tensor, firing: set[str]) -> list[str]:
        """Words in more of the surroundings than chance would have them, and of more than one context."""
        strongest = weight.argsort(descending=True, stable=True)[:WINDOWS]
        places, weight = places[strongest], weight[strongest] / weight[strongest].sum()
        found: dict[str, float] = defaultdict(float)
        contexts: dict[str, set[int]] = defaultdict(set)
        for place, share in zip(places.tolist(), weight.tolist(), strict=True):
            start = place - place % self.length
            first, last = max(start, place - self.buffer), min(start + self.length, place + self.buffer + 1)
            forms = {self.form(token) for token in self.flat[first:last].tolist()}
            for word in forms - firing:
                if len(word) > 2 and word.isalpha():
                    found[word] += share
                    contexts[word].add(start)
        scores = {}
        for word, share in found.items():
            chance = 1 - (1 - (self.background[word] + 0.5) / (self.total + 1)) ** (2 * self.buffer)
            if len(contexts[word]) > 1 and share > 2 * chance:
                scores[word] = share * math.log(share / chance)
        return sorted(scores, key=lambda word: (-scores[word], word))[:WORDS]


def quote(form: str) -> str:
    """A token in quotes that the judge finds again."""
    return f'"{form}"' if "'" in form else f"'{form}'"
