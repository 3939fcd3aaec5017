"""A judge without a chat model: it names the windows nearest to the explanation.

Near is a mean of two things, both read off the explanation and the windows alone: the cosine of their sentence
embeddings, and whether tokens that the explanation quotes are there. As many windows are named as the protocol makes
right, so that no threshold has to be set; a judge that knows nothing then scores 1/2 in the balanced scores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from sampled_sae.evals.autointerp.explain import Done
from sampled_sae.evals.autointerp.judge import Sheet, Verdict
from sampled_sae.evals.autointerp.text import CLOSE, OPEN
from sampled_sae.evals.embed import Embedder

QUOTED = re.compile(r"""(?<!\w)'([^']+)'(?!\w)|"([^"]+)"|`([^`]+)`|\u2018([^\u2019]+)\u2019|\u201c([^\u201d]+)\u201d""")
MARKED = re.compile(f"{OPEN}(.*?){CLOSE}")
SHEETS = 256
"""Sheets whose texts are embedded together."""


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
        seen = [[what_is_judged(text, sheet.marked) for text in sheet.texts] for sheet in sheets]
        texts = [text for sheet_texts in seen for text in sheet_texts]
        cosines = self._cosines([sheet.explanation for sheet in sheets], seen, texts)
        verdicts = []
        for sheet, windows, cosine in zip(sheets, seen, cosines, strict=True):
            near = cosine + self.quoted * torch.tensor([quoted_share(sheet.explanation, text) for text in windows])
            order = near.argsort(descending=True, stable=True)[: sheet.expected].tolist()
            verdicts.append(Verdict([number in order for number in range(len(windows))]))
        return verdicts

    def _cosines(self, explanations: list[str], seen: list[list[str]], texts: list[str]) -> list[Tensor]:
        """For each sheet [windows], on the host."""
        meant, found = self.embedder.embed(explanations), self.embedder.embed(texts)
        sizes = [len(windows) for windows in seen]
        which = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(meant.device)
        return list((meant[which] * found).sum(1).cpu().split(sizes))


def what_is_judged(text: str, marked: bool) -> str:
    """The window, or the marked tokens alone where the marks are judged."""
    return " ".join(MARKED.findall(text)) if marked else text


def quoted_share(explanation: str, text: str) -> float:
    """Of the tokens that the explanation quotes, in the order of their weight, how much is in the text: 0 to 1."""
    quoted = ["".join(found).strip().lower() for found in QUOTED.findall(explanation)]
    here = text.lower()
    for rank, token in enumerate(filter(None, quoted)):
        if contains(here, token):
            return 1.0 / (1 + rank)
    return 0.0


def contains(text: str, token: str) -> bool:
    """Whether a token is in a text, words as whole words or their beginnings."""
    if token[0].isalnum():
        return re.search(rf"(?<![^\W_]){re.escape(token)}", text) is not None
    return token in text
