"""Settings of automated interpretability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch

from sampled_sae.config import (
    Bound,
    Config,
    Count,
    Distinct,
    NonNegative,
    OpenShare,
    Positive,
    ShareBelowOne,
    at_least,
)
from sampled_sae.evals.autointerp.chat import ChatConfig
from sampled_sae.evals.bootstrap import NOTHING, Estimate, estimate, totals
from sampled_sae.evals.core.schema import NormFactor
from sampled_sae.evals.results import save_explanations

Kind = Literal["detection", "balanced", "fuzzing"]
KINDS: tuple[Kind, ...] = ("detection", "balanced", "fuzzing")


LEAST = 2  # Least windows on each side of a balanced score
Half = Annotated[int, Bound(f"must be at least {LEAST}, or 0 for none", lambda value: value == 0 or value >= LEAST)]
Means = Literal["chat", "offline"]
CONTEXT = 128  # Tokens per context that autointerp reads, as in SAEBench


@dataclass(frozen=True, slots=True)
class AutointerpConfig(Config):
    """Which latents are explained and judged, by which means, and on how many windows of text.

    A window is a token with `buffer` tokens on each side, whole inside its context. The defaults of windows and counts
    are SAEBench's; it reads 2,000,000 tokens in contexts of 128.
    """

    explainer: Means = "offline"
    """Source of the explanations: a chat model, or statistics of tokens and contexts."""
    judge: Means = "offline"
    """Judge of which windows fire: a chat model, or sentence embeddings."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """The endpoint, if either of them is a chat model."""
    embedder: str | None = None
    """Sentence embeddings of the offline judge: a hub name, a folder, or minilm. Default: all-mpnet-base-v2."""
    tokens: Annotated[int, at_least(CONTEXT)] = 2_000_000
    """Tokens of text to read, in contexts of 128."""
    max_latents: Positive = 1000
    """Number of latents to explain, sampled from the live latents; each takes several calls of a chat model."""
    latents_per_bin: Count = 0
    """Latents drawn from each bin of firing density (below 0.1%, to 10%, above), instead of `max_latents` from all live
    ones. The overall means then do not represent all live latents; the means by density do. 0: off."""
    latents: Annotated[tuple[int, ...], Distinct] = ()
    """Latents to explain, instead of a sample."""
    dead_below: Count = 15
    """A latent is alive if it fires at more tokens than this."""
    skip_first: Count | None = None
    """Positions at the start of each context at which firing is not counted. Default: those that training excluded."""
    left_out: tuple[int, ...] | None = None
    """Ids of tokens at which firing is not counted; no ids exclude none. Default: the tokenizer's BOS, EOS and PAD, and
    the token at the end of documents."""
    norm_factor: NormFactor = 10.0
    """Firing is not counted at tokens whose norm is above this factor times the median, whose activations exceed all
    others. inf includes them, as SAEBench does."""
    buffer: Positive = 10
    """Tokens on each side of a window's center."""
    mark_above: ShareBelowOne = 0.01
    """A token counts as firing in a window if its activation is above this share of the latent's largest."""
    shown_top: Positive = 10
    """Windows of the largest activations that the explainer sees."""
    shown_weighted: Count = 5
    """Further windows that the explainer sees, sampled in proportion to the squared activation."""
    scored_top: Positive = 2
    """Detection: windows of the largest activations."""
    scored_weighted: Count = 2
    """Detection: windows drawn in proportion to the squared activation."""
    scored_random: Count = 10
    """Detection: random windows, which count as not firing without a check, as in SAEBench."""
    balanced_each: Half = 5
    """Balanced detection: number of windows that fire, and as many that were checked not to fire; 0 skips it."""
    fuzzing_each: Half = 5
    """Fuzzing: number of windows with the firing tokens marked, and as many with others marked; 0 skips it."""
    control: bool | None = None
    """Control: judge each latent by another latent's explanation too. Default: only with the offline judge, because it
    doubles the calls of a chat model."""
    contexts_at_once: Positive = 16
    """Contexts in one pass through the model; does not affect the results."""
    tokens_at_once: Positive = 2048
    """Tokens that an SAE encodes at once; does not affect the results."""
    keep_gib: NonNegative = 4.0
    """Memory for activations between the two readings of the text; if they need more, the model reads it twice."""
    resamples: Count = 1000
    """Resamples of the bootstrap over latents; 0 for no intervals."""
    level: OpenShare = 0.95
    """Confidence level of the intervals."""
    seed: int = 0
    """Seed of the draws of latents and windows, and of the bootstrap."""

    @property
    def controlled(self) -> bool:
        """Whether explanations of other latents are judged too."""
        return self.judge == "offline" if self.control is None else self.control

    @property
    def uses_chat(self) -> bool:
        """Whether an endpoint is needed."""
        return "chat" in (self.explainer, self.judge)


class CallEstimate(NamedTuple):
    """Most calls of the endpoint in a run; cached answers cost nothing."""

    calls: int  # questions
    prompt_tokens: int  # tokens of the questions, roughly
    answer_tokens: int  # most tokens of the answers


def most_latents(settings: AutointerpConfig) -> int:
    """Latents of one SAE that are explained, at most."""
    return len(settings.latents) or len(DENSITIES) * settings.latents_per_bin or settings.max_latents


def estimate_calls(settings: AutointerpConfig, saes: int) -> CallEstimate:
    """Calls and tokens for so many SAEs, before anything is read."""
    latents = saes * most_latents(settings)
    window, asked = 2 * settings.buffer + 1, []
    # Questions, windows of each, tokens per token of a window, tokens of the answer. A mark is some four tokens, a
    # number two; about one token in five is marked.
    if settings.explainer == "chat":
        shown = settings.shown_top + settings.shown_weighted
        asked.append((latents, shown, 1.8, EXPLANATION_TOKENS))
    if settings.judge == "chat":
        sheets = latents * (2 if settings.controlled else 1)
        detection = settings.scored_top + settings.scored_weighted + settings.scored_random
        kinds = ((detection, 1.0), (2 * settings.balanced_each, 1.0), (2 * settings.fuzzing_each, 1.8))
        asked += [(sheets, windows, size, verdict_tokens(windows)) for windows, size in kinds if windows]
    prompts = [n * math.ceil(INSTRUCTIONS + windows * (size * window + 2)) for n, windows, size, _ in asked]
    return CallEstimate(sum(n for n, *_ in asked), sum(prompts), sum(n * answer for n, _, _, answer in asked))


INSTRUCTIONS = 180  # Tokens of a question without its windows
EXPLANATION_TOKENS = 30  # Tokens of an explanation at most, as in SAEBench


def verdict_tokens(windows: int) -> int:
    """Tokens of a judge's answer at most: a number and a comma for each window, and some to spare."""
    return 2 * windows + 5


DENSITIES = {"below 0.1%": 0.001, "0.1% to 10%": 0.1, "above 10%": math.inf}  # upper ends of the bins of density


def density_bin(fired: int, tokens: int) -> str:
    """The bin of a latent that fires on so many of the tokens."""
    return next(name for name, end in DENSITIES.items() if fired < end * tokens)


class LatentScores(NamedTuple):
    """Scores of one latent; None without an answer of the judge."""

    detection: float | None = None  # share of SAEBench's windows judged correctly; naming none gives 10/14
    balanced: float | None = None  # balanced accuracy on as many windows that fire as do not; chance is 1/2
    fuzzing: float | None = None  # balanced accuracy at telling correct marks from wrong ones; chance is 1/2


class LatentResult(NamedTuple):
    """One latent."""

    latent: int
    fired: int  # counted tokens at which it fires
    explanation: str | None  # None if it could not be explained
    scores: LatentScores  # how well the explanation predicts where it fires
    control: LatentScores  # the same for the explanation of another latent
    random_that_fire: int  # SAEBench's random windows in which it does fire, although they count as not firing
    reasons: tuple[str, ...]  # why an explanation or a score is missing


class Score(NamedTuple):
    """A score over latents."""

    mean: Estimate  # with a bootstrap interval over latents
    deviation: float | None  # standard deviation over latents; none for fewer than two
    latents: int  # latents that have it


class Calls(NamedTuple):
    """Calls of a chat endpoint."""

    asked: int  # questions
    from_disk: int  # of these, answered before
    failed: int  # of these, without any answer
    prompt_tokens: int  # tokens of the questions that were sent, as the endpoint counts them
    answer_tokens: int  # tokens of the answers


class AutointerpResult(NamedTuple):
    """One SAE on one layer of one model."""

    layer: int | str  # the residual stream after this block, counted from 0, or a hook point by name
    tokens: int  # tokens of text at which firing counts
    high_norm: int  # tokens at which it does not, because their norm is too high
    alive: int | None  # latents that fire often enough; None if latents were named
    explainer: str
    judge: str
    detection: Score  # SAEBench's score
    balanced: Score  # with checked negatives
    fuzzing: Score  # by marks
    control: dict[str, Score]  # the three scores with explanations of other latents; empty without a control
    chosen: int  # latents that were to be explained
    skipped: dict[str, int]  # why latents, or single scores of them, are missing, and how many
    calls: Calls | None  # calls of this SAE; none without a chat model
    latents: list[LatentResult]  # each latent, by number
    settings: AutointerpConfig  # how it was measured
    by_density: dict[str, dict[str, Score]] | None = None
    """The three scores over the latents of each bin of firing density."""

    def best(self, n: int = 10) -> list[LatentResult]:
        """The latents of the highest scores: by detection, then balanced, then fuzzing."""
        scored = [latent for latent in self.latents if latent.scores.detection is not None]
        return sorted(scored, key=lambda latent: ([-(score or 0.0) for score in latent.scores], latent.latent))[:n]

    def save_explanations(self, folder: Path) -> Path:
        """Write evals/explanations.json in the SAE's folder; `score` is detection's, `control` the scores of another
        latent's explanation."""
        entries = {
            latent.latent: {
                "explanation": latent.explanation,
                "explainer": self.explainer,
                "score": latent.scores.detection,
                "scores": latent.scores._asdict(),
                "control": latent.control._asdict(),
                "fired": latent.fired,
            }
            for latent in self.latents
            if latent.explanation is not None
        }
        return save_explanations(folder, entries, explainer=self.explainer, judge=self.judge, layer=self.layer)


def summarise(values: Sequence[float | None], settings: AutointerpConfig) -> Score:
    """The scores of all latents -> their mean, with an interval."""
    there = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    n = len(there)
    if n == 0:
        return Score(NOTHING, None, 0)
    drawn = totals({"sum": there, "n": torch.ones(n)}, settings.resamples, settings.seed)
    mean = estimate(drawn["sum"] / drawn["n"], n, settings.level)
    return Score(mean, float(there.std()) if n > 1 else None, n)
