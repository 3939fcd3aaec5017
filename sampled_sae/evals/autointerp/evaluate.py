"""Automated interpretability of many SAEs: latents are chosen, explained, judged and scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sampled_sae.evals.autointerp.chat import Chat
from sampled_sae.evals.autointerp.explain import ChatExplainer, ContrastExplainer, Explainer, TokenText
from sampled_sae.evals.autointerp.judge import ChatJudge, EmbeddingJudge, Judge, Verdict, make_sheet
from sampled_sae.evals.autointerp.schema import (
    DENSITIES,
    KINDS,
    AutointerpConfig,
    AutointerpResult,
    Calls,
    LatentResult,
    LatentScores,
    Score,
    density_bin,
    most_latents,
    summarise,
)
from sampled_sae.evals.autointerp.trials import Case, build_case, check_buffer, check_latents, score_trial
from sampled_sae.evals.reading import (
    Firings,
    Steps,
    Streams,
    check_contexts,
    checked,
    collect_firings,
    count_firings,
    counted_positions,
)
from sampled_sae.hooks import Where
from sampled_sae.models.embedder import open_embedder
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError


class Workers:
    """Explainer and judge, shared by all SAEs."""

    def __init__(self, model: LanguageModel, contexts: Tensor, settings: AutointerpConfig):
        self.text = TokenText(model.tokenizer)
        self.chat = Chat(settings.chat) if settings.uses_chat else None
        self.judge: Judge
        self.explainer: Explainer
        if settings.judge == "chat" and self.chat is not None:
            self.judge = ChatJudge(self.chat)
        else:
            self.judge = EmbeddingJudge(open_embedder(settings.embedder, model.device))
        if settings.explainer == "chat" and self.chat is not None:
            self.explainer = ChatExplainer(self.chat, self.text)
        else:
            self.explainer = ContrastExplainer(contexts, self.text, settings.buffer)

    def count_calls(self) -> Calls | None:
        """Calls of the chat model since the last time."""
        if self.chat is None:
            return None
        answers, self.chat.answers = self.chat.answers, []
        return Calls(
            len(answers),
            sum(answer.cached for answer in answers),
            sum(answer.text is None for answer in answers),
            sum(answer.prompt_tokens for answer in answers),
            sum(answer.answer_tokens for answer in answers),
        )


class Book:
    """Cases, explanations and scores of the chosen latents of one SAE."""

    def __init__(self, firings: Firings, contexts: Tensor, settings: AutointerpConfig):
        self.firings, self.settings = firings, settings
        self.cases: dict[int, Case] = {}
        self.reasons: dict[int, list[str]] = {latent: [] for latent in firings.latents}
        self.explanations: dict[int, str] = {}
        self.scores: dict[int, LatentScores] = {}
        self.control: dict[int, LatentScores] = {}
        for latent in firings.latents:
            if firings.count(latent) <= settings.dead_below:
                self.reasons[latent].append("fires too rarely")
                continue
            case = build_case(contexts, firings, latent, settings)
            if isinstance(case, str):
                self.reasons[latent].append(case)
            else:
                self.cases[latent] = case
                self.reasons[latent] += [f"{kind}: {why}" for kind, why in case.missing.items()]

    def explain(self, workers: Workers, steps: Steps) -> None:
        cases = list(self.cases.values())
        found = workers.explainer.explain(cases, steps.within(len(cases), len(cases))) if cases else []
        for latent, (text, reason) in zip(self.cases, found, strict=True):
            if text is None:
                self.reasons[latent].append(f"no explanation: {reason}")
            else:
                self.explanations[latent] = text

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
            values: dict[str, float] = {}
            for trial in self.cases[latent].trials:
                verdict = next(given)
                if verdict.named is None:
                    self.reasons[latent].append(f"{prefix}{trial.kind}: {verdict.reason}")
                else:
                    values[trial.kind] = score_trial(trial, verdict.named)
            found[latent] = LatentScores(**values)
        return found

    def result(
        self, layer: Where, tokens: int, high_norm: int, alive: int | None, workers: Workers
    ) -> AutointerpResult:
        latents = [
            LatentResult(
                latent,
                self.firings.count(latent),
                self.explanations.get(latent),
                self.scores.get(latent, LatentScores()),
                self.control.get(latent, LatentScores()),
                self.cases[latent].random_that_fire if latent in self.cases else 0,
                tuple(reasons),
            )
            for latent, reasons in self.reasons.items()
        ]

        def summary(rows: list[LatentScores]) -> dict[str, Score]:
            return {kind: summarise([row[i] for row in rows], self.settings) for i, kind in enumerate(KINDS)}

        scores = summary([latent.scores for latent in latents])
        bins: dict[str, list[LatentScores]] = {name: [] for name in DENSITIES}
        for latent in latents:
            bins[density_bin(latent.fired, tokens)].append(latent.scores)
        return AutointerpResult(
            layer,
            tokens,
            high_norm,
            alive,
            workers.explainer.name,
            workers.judge.name,
            scores["detection"],
            scores["balanced"],
            scores["fuzzing"],
            summary([latent.control for latent in latents]) if self.control else {},
            len(latents),
            dict(Counter(reason for latent in latents for reason in latent.reasons)),
            workers.count_calls(),
            latents,
            self.settings,
            {name: summary(rows) for name, rows in bins.items() if rows},
        )


def evaluate_autointerp(
    sae: SAE,
    model: LanguageModel,
    layer: Where,
    contexts: Tensor,
    settings: AutointerpConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AutointerpResult:
    """Explain and judge latents of an SAE of the hook point `layer` on contexts [n, L] of token ids."""
    [result] = evaluate_autointerp_many([sae], model, layer, contexts, settings, progress)
    return result


@torch.no_grad()
def evaluate_autointerp_many(
    saes: Sequence[SAE],
    model: LanguageModel,
    layer: Where,
    contexts: Tensor,
    settings: AutointerpConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[AutointerpResult]:
    """The same for several SAEs of one layer, in order, each as soon as it is measured: the text is read for all of
    them together. `progress(done, total)` counts contexts read, latents explained and latents judged."""
    settings = settings or AutointerpConfig()
    layer = model.where(layer)
    for _, sae in checked(saes, model, layer):
        check_latents(settings.latents, sae.d_sae)
    check_contexts(contexts)
    check_buffer(settings.buffer, contexts)
    contexts = contexts.long().cpu()
    counted = counted_positions(contexts, settings.skip_first or 0, settings.left_out or ())
    # Before anything is computed: a missing key or model must not cost an hour.
    workers = Workers(model, contexts, settings)
    latents = sum(min(most_latents(settings), sae.d_sae) for sae in saes)
    steps = Steps(progress, (1 if settings.latents else 2) * len(contexts) + 2 * latents)
    try:
        streams = Streams(
            model,
            layer,
            contexts,
            counted,
            norm_factor=settings.norm_factor,
            at_once=settings.contexts_at_once,
            keep_gib=0.0 if settings.latents else settings.keep_gib,
        )
        chosen, alive = _choose(saes, streams, settings, steps)
        found = collect_firings(saes, streams, chosen, settings.tokens_at_once, steps.add)
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"contexts_at_once = {settings.contexts_at_once}, tokens_at_once = {settings.tokens_at_once}: out of GPU "
            "memory; lower them"
        ) from None
    high = streams.high_norm
    del streams
    for number, firings in enumerate(found):
        book = Book(firings, contexts, settings)
        book.explain(workers, steps)
        book.judge(workers, steps)
        count = None if alive is None else alive[number]
        yield book.result(layer, int(counted.sum()) - high, high, count, workers)
    steps.finish()


def _choose(
    saes: Sequence[SAE], streams: Streams, settings: AutointerpConfig, steps: Steps
) -> tuple[list[list[int]], list[int] | None]:
    """For each SAE the latents that are explained, and how many are alive."""
    if settings.latents:
        return [sorted(settings.latents) for _ in saes], None
    chosen, alive = [], []
    for fired in count_firings(saes, streams, settings.tokens_at_once, steps.add):
        living = (fired > settings.dead_below).nonzero().squeeze(1)
        generator = torch.Generator().manual_seed(settings.seed % 2**63)
        drawn = living[torch.randperm(len(living), generator=generator)].tolist()
        if settings.latents_per_bin:
            bins: dict[str, list[int]] = {name: [] for name in DENSITIES}
            tokens = int(streams.counted.sum()) - streams.high_norm
            for latent in drawn:
                bins[density_bin(int(fired[latent]), tokens)].append(latent)
            chosen.append(sorted(latent for own in bins.values() for latent in own[: settings.latents_per_bin]))
        else:
            chosen.append(sorted(drawn[: settings.max_latents]))
        alive.append(len(living))
    return chosen, alive
