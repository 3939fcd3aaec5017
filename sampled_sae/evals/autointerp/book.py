"""What becomes of the latents of one SAE: who explains and judges them, their cases, explanations and scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sampled_sae.data.layers import LanguageModel
from sampled_sae.evals.autointerp.chat import Answer, Chat
from sampled_sae.evals.autointerp.config import AutointerpConfig
from sampled_sae.evals.autointerp.explain import ChatExplainer, Done, Explained, Explainer
from sampled_sae.evals.autointerp.explain_offline import ContrastExplainer
from sampled_sae.evals.autointerp.judge import ChatJudge, Judge, Verdict, make_sheet
from sampled_sae.evals.autointerp.judge_offline import EmbeddingJudge
from sampled_sae.evals.autointerp.result import (
    KINDS,
    AutointerpResult,
    Calls,
    LatentResult,
    LatentScores,
    Score,
    score_trial,
    summarise,
)
from sampled_sae.evals.autointerp.stream import Firings
from sampled_sae.evals.autointerp.text import TokenText
from sampled_sae.evals.autointerp.trials import Case, build_case
from sampled_sae.evals.embed import open_embedder
from sampled_sae.sae import SAE

Ready = Mapping[int, str]
"""Explanations that are there already, by latent."""
NO_SCORES = LatentScores(None, None, None)
NEVER = "fires too rarely"


class Workers:
    """Explainer and judge, shared by all SAEs."""

    def __init__(self, model: LanguageModel, contexts: Tensor, settings: AutointerpConfig):
        self.text = TokenText(model.tokenizer)
        chat = Chat(settings.chat) if settings.uses_chat else None
        self.explainer: Explainer
        self.judge: Judge
        if settings.judge == "chat" and chat is not None:
            self.judge = ChatJudge(chat)
        else:
            self.judge = EmbeddingJudge(open_embedder(settings.embedder, model.device))
        if settings.explainer == "chat" and chat is not None:
            self.explainer = ChatExplainer(chat, self.text)
        else:
            self.explainer = ContrastExplainer(contexts, self.text, settings.buffer)

    def take_answers(self) -> list[Answer]:
        """The chat model's answers since the last time."""
        answers: list[Answer] = []
        for worker in (self.explainer, self.judge):
            if isinstance(worker, ChatExplainer | ChatJudge):
                answers += worker.answers
                worker.answers = []
        return answers


class Steps:
    """Adds up contexts read and latents explained and judged."""

    def __init__(
        self,
        progress: Callable[[int, int], None] | None,
        saes: Sequence[SAE],
        contexts: Tensor,
        settings: AutointerpConfig,
    ):
        latents = sum(len(settings.latents) or min(settings.max_latents, sae.m) for sae in saes)
        self.total = (1 if settings.latents else 2) * len(contexts) + 2 * latents
        self.done, self.progress = 0, progress

    def add(self, more: int) -> None:
        self.done = min(self.total, self.done + more)
        if self.progress is not None:
            self.progress(self.done, self.total)

    def within(self, parts: int, whole: int) -> Done:
        """Counts `parts` steps while `whole` items are done."""
        told = 0

        def done(items: int) -> None:
            nonlocal told
            now = parts * items // max(1, whole)
            if now > told:
                self.add(now - told)
                told = now

        return done

    def finish(self) -> None:
        self.add(self.total - self.done)


class Book:
    """What becomes of the chosen latents of one SAE."""

    def __init__(self, firings: Firings, contexts: Tensor, settings: AutointerpConfig):
        self.firings, self.settings = firings, settings
        self.cases: dict[int, Case] = {}
        self.reasons: dict[int, list[str]] = {latent: [] for latent in firings.latents}
        self.explanations: dict[int, str] = {}
        self.scores: dict[int, LatentScores] = {}
        self.control: dict[int, LatentScores] = {}
        for latent in firings.latents:
            if firings.count(latent) <= settings.dead_below:
                self.reasons[latent].append(NEVER)
                continue
            case = build_case(contexts, firings, latent, settings)
            if isinstance(case, str):
                self.reasons[latent].append(case)
            else:
                self.cases[latent] = case
                self.reasons[latent] += [f"{kind}: {why}" for kind, why in case.missing.items()]

    def explain(self, workers: Workers, ready: Ready, steps: Steps) -> None:
        cases = [case for latent, case in self.cases.items() if latent not in ready]
        said = dict(zip([case.latent for case in cases], self._ask(workers, cases, steps), strict=True))
        for latent in self.cases:
            explained = Explained(ready[latent]) if latent in ready else said[latent]
            if explained.text is None:
                self.reasons[latent].append(f"no explanation: {explained.reason}")
            else:
                self.explanations[latent] = explained.text

    def _ask(self, workers: Workers, cases: list[Case], steps: Steps) -> list[Explained]:
        return workers.explainer.explain(cases, steps.within(len(cases), len(cases))) if cases else []

    def judge(self, workers: Workers, steps: Steps) -> None:
        """Judge each latent by its own explanation, and by that of another as a control."""
        latents = list(self.explanations)
        sets = [self.explanations]
        if self.settings.controlled and len(latents) > 1:
            sets.append(self._exchanged())
        trials = [(latent, trial) for latent in latents for trial in self.cases[latent].trials]
        # Side by side, because an embedding of the same windows is then made once.
        sheets = [make_sheet(trial, texts[latent], workers.text) for latent, trial in trials for texts in sets]
        verdicts = workers.judge.judge(sheets, steps.within(len(latents), len(sheets))) if sheets else []
        self.scores = self._scores(verdicts[:: len(sets)], "")
        self.control = self._scores(verdicts[1 :: len(sets)], "control ") if len(sets) > 1 else {}

    def _exchanged(self) -> dict[int, str]:
        """Each latent with the explanation of another, all of them used once."""
        latents = list(self.explanations)
        generator = torch.Generator().manual_seed(self.settings.seed % 2**63)
        ring = [latents[number] for number in torch.randperm(len(latents), generator=generator).tolist()]
        return {latent: self.explanations[other] for latent, other in zip(ring, ring[1:] + ring[:1], strict=True)}

    def _scores(self, verdicts: Sequence[Verdict], prefix: str) -> dict[int, LatentScores]:
        found: dict[int, LatentScores] = {}
        given = iter(verdicts)
        for latent in self.explanations if verdicts else ():
            values: dict[str, float | None] = dict.fromkeys(KINDS)
            for trial in self.cases[latent].trials:
                verdict = next(given)
                if verdict.named is None:
                    self.reasons[latent].append(f"{prefix}{trial.kind}: {verdict.reason}")
                else:
                    values[trial.kind] = score_trial(trial, verdict.named)
            found[latent] = LatentScores(*(values[kind] for kind in KINDS))
        return found

    def result(
        self, layer: int, tokens: int, high_norm: int, alive: int | None, workers: Workers, ready: bool
    ) -> AutointerpResult:
        latents = [self._latent(latent) for latent in self.firings.latents]

        def summary(rows: list[LatentScores]) -> dict[str, Score]:
            return {kind: summarise([row[i] for row in rows], self.settings) for i, kind in enumerate(KINDS)}

        scores = summary([latent.scores for latent in latents])
        return AutointerpResult(
            layer,
            tokens,
            high_norm,
            alive,
            f"given, else {workers.explainer.name}" if ready else workers.explainer.name,
            workers.judge.name,
            scores["detection"],
            scores["balanced"],
            scores["fuzzing"],
            summary([latent.control for latent in latents]) if self.control else {},
            len(latents),
            dict(Counter(reason for latent in latents for reason in latent.reasons)),
            count_calls(workers.take_answers()) if self.settings.uses_chat else None,
            latents,
            self.settings,
        )

    def _latent(self, latent: int) -> LatentResult:
        case = self.cases.get(latent)
        return LatentResult(
            latent,
            self.firings.count(latent),
            self.explanations.get(latent),
            self.scores.get(latent, NO_SCORES),
            self.control.get(latent, NO_SCORES),
            0 if case is None else case.random_that_fire,
            tuple(self.reasons[latent]),
        )


def count_calls(answers: Sequence[Answer]) -> Calls:
    return Calls(
        len(answers),
        sum(answer.cached for answer in answers),
        sum(answer.text is None for answer in answers),
        sum(answer.prompt_tokens for answer in answers),
        sum(answer.answer_tokens for answer in answers),
    )
