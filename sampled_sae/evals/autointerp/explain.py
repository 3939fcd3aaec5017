"""From what a latent fires on to a sentence that says so: what explainers have in common, and the one that asks a
chat model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from sampled_sae.evals.autointerp.chat import Answer, Chat, Question
from sampled_sae.evals.autointerp.config import EXPLANATION_TOKENS
from sampled_sae.evals.autointerp.text import TokenText
from sampled_sae.evals.autointerp.trials import Case

Done = Callable[[int], None]
"""Is told how many are through."""

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
"""Up to `this latent fires on`; what an explanation itself says of fires is no opening."""
WRAPPED = re.compile(r"(?s)([\"'])((?:(?!\1).)*)\1")
"""An answer that is one quotation."""
THOUGHTS = re.compile(r"(?s)<think>.*?(?:</think>|\Z)")


class Explained(NamedTuple):
    """What an explainer says of one latent."""

    text: str | None
    """The explanation; none if there is none."""
    reason: str = ""
    """Why there is none."""


class Explainer(Protocol):
    """Explains latents by what they fire on."""

    name: str

    def explain(self, cases: Sequence[Case], done: Done | None = None) -> list[Explained]: ...


class ChatExplainer:
    """Shows a chat model the windows with the firing tokens marked."""

    def __init__(self, chat: Chat, text: TokenText):
        self.name = f"chat {chat.config.model}"
        self.chat, self.text = chat, text
        self.answers: list[Answer] = []
        """All answers so far, for the books."""

    def explain(self, cases: Sequence[Case], done: Done | None = None) -> list[Explained]:
        """One call a latent."""
        answers = self.chat.ask([self.question(case) for case in cases], done)
        self.answers += answers
        return [read_explanation(answer) for answer in answers]

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
