"""Judges: from an explanation to the windows on which the latent should fire, by a chat model or by embeddings.

A judge gets sheets: an explanation and numbered windows, without the truth. Its answers are scored in trials.py.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from sampled_sae.evals.autointerp.chat import Answer, Chat, Done, Question
from sampled_sae.evals.autointerp.explain import CLOSE, OPEN, THOUGHTS, TokenText
from sampled_sae.evals.autointerp.schema import verdict_tokens
from sampled_sae.evals.autointerp.trials import Trial
from sampled_sae.models.embedder import Embedder

DETECTION = (
    "You are given an explanation of what one latent of a sparse autoencoder fires on, and {n} numbered excerpts of "
    "text. For each excerpt decide whether the latent fires on at least one token of it, going by the explanation, "
    "which should not be read too narrowly. Answer with the numbers of the excerpts on which it fires, separated by "
    "commas, such as {example}; or with None if there are none. Answer with nothing else."
)
FUZZING = (
    "You are given an explanation of what one latent of a sparse autoencoder fires on, and {n} numbered excerpts of "
    "text. In each, some tokens stand between << and >>. In some excerpts these are the tokens on which the latent "
    "fires, in the others they were picked at random. Answer with the numbers of the excerpts whose marked tokens fit "
    "the explanation, separated by commas, such as {example}; or with None if there are none. Answer with nothing else."
)
NONE = re.compile(r"(?i)\W*none\W*")
LIST = re.compile(r"(?i)[\[(]?\s*\d+(?:(?:\s*,\s*and\s+|\s*[,;]\s*|\s+and\s+|\s+)\d+)*\s*[\])]?\s*[.,]?")


class Sheet(NamedTuple):
    """One question to a judge."""

    explanation: str
    texts: list[str]  # the windows; with marks if the marks are what is judged
    marked: bool  # whether they are
    expected: int  # how many windows are right by the protocol: half, or SAEBench's 4 of 14


class Verdict(NamedTuple):
    """A judge's answer to one sheet."""

    named: list[bool] | None  # for each window whether the judge names it; none if there is no answer
    reason: str = ""  # why there is none


class Judge(Protocol):
    """Says which windows an explanation means."""

    name: str

    def judge(self, sheets: Sequence[Sheet], done: Done | None = None) -> list[Verdict]: ...


def make_sheet(trial: Trial, explanation: str, text: TokenText) -> Sheet:
    """A trial as the judge sees it."""
    texts = [text.show(item.window.tokens, item.marks) for item in trial.items]
    return Sheet(explanation, texts, trial.kind == "fuzzing", trial.expected)


class ChatJudge:
    """Asks a chat model for the numbers of the windows."""

    def __init__(self, chat: Chat):
        self.name = f"chat {chat.config.model}"
        self.chat = chat

    def judge(self, sheets: Sequence[Sheet], done: Done | None = None) -> list[Verdict]:
        """One call per sheet."""
        answers = self.chat.ask([self.question(sheet) for sheet in sheets], done)
        return [read_verdict(answer, len(sheet.texts)) for answer, sheet in zip(answers, sheets, strict=True)]

    def question(self, sheet: Sheet) -> Question:
        """What is asked about one sheet."""
        n = len(sheet.texts)
        lines = "\n".join(f"{number}. {text}" for number, text in enumerate(sheet.texts, 1))
        user = f"The explanation: this latent fires on {sheet.explanation}\n\nThe excerpts:\n\n{lines}"
        # The example must not always be the same, nor another one when the question is asked again.
        drawn = random.Random(zlib.crc32(user.encode())).sample(range(1, n + 1), max(1, sheet.expected))
        example = ", ".join(map(str, sorted(drawn)))
        system = (FUZZING if sheet.marked else DETECTION).format(n=n, example=example)
        return Question(system, user, verdict_tokens(n))


def read_verdict(answer: Answer, n: int) -> Verdict:
    """Numbers from 1 to n, or None; anything else is no answer, rather than a guess at one."""
    if answer.text is None:
        return Verdict(None, answer.reason)
    said = THOUGHTS.sub("", answer.text).strip()
    if NONE.fullmatch(said):
        return Verdict([False] * n)
    if not LIST.fullmatch(said):
        return Verdict(None, "the chat model's answer is no list of numbers")
    numbers = {int(number) for number in re.findall(r"\d+", said)}
    if not numbers <= set(range(1, n + 1)):
        return Verdict(None, "the chat model names windows that are not there")
    return Verdict([number in numbers for number in range(1, n + 1)])


QUOTED = re.compile(r"""(?<!\w)'([^']+)'(?!\w)|"([^"]+)"|`([^`]+)`|\u2018([^\u2019]+)\u2019|\u201c([^\u201d]+)\u201d""")
MARKED = re.compile(f"{OPEN}(.*?){CLOSE}")
SHEETS = 256  # Sheets whose texts are embedded together


class EmbeddingJudge:
    """Names the windows that are nearest in meaning, and in quoted tokens."""

    def __init__(self, embedder: Embedder, quoted: float = 1.0):
        """`quoted`: weight of quoted tokens against the cosine; 0 judges by the cosine alone."""
        self.name = f"offline {embedder.name}"
        self.embedder, self.quoted = embedder, quoted

    def judge(self, sheets: Sequence[Sheet], done: Done | None = None) -> list[Verdict]:
        """The `expected` nearest windows of each sheet."""
        found: list[Verdict] = []
        for first in range(0, len(sheets), SHEETS):
            found += self._judge(sheets[first : first + SHEETS])
            if done is not None:
                done(len(found))
        return found

    def _judge(self, sheets: Sequence[Sheet]) -> list[Verdict]:
        # Where marks are judged, the marked tokens alone.
        seen = [[" ".join(MARKED.findall(text)) if one.marked else text for text in one.texts] for one in sheets]
        meant = self.embedder.embed([sheet.explanation for sheet in sheets])
        found = self.embedder.embed([text for texts in seen for text in texts])
        sizes = [len(texts) for texts in seen]
        which = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(meant.device)
        cosines = (meant[which] * found).sum(1).cpu().split(sizes)
        verdicts = []
        for sheet, texts, cosine in zip(sheets, seen, cosines, strict=True):
            near = cosine + self.quoted * torch.tensor([quoted_share(sheet.explanation, text) for text in texts])
            order = near.argsort(descending=True, stable=True)[: sheet.expected].tolist()
            verdicts.append(Verdict([number in order for number in range(len(texts))]))
        return verdicts


def quoted_share(explanation: str, text: str) -> float:
    """Of the tokens that the explanation quotes, in the order of their weight, how much is in the text: 0 to 1."""
    quoted = ["".join(found).strip().lower() for found in QUOTED.findall(explanation)]
    for rank, token in enumerate(filter(None, quoted)):
        # Words as whole words or their beginnings.
        before = r"(?<![^\W_])" if token[0].isalnum() else ""
        if re.search(before + re.escape(token), text.lower()):
            return 1.0 / (1 + rank)
    return 0.0
