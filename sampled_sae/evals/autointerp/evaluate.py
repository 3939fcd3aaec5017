"""Automated interpretability: latents are explained by what they fire on, and the explanations tried on other windows.

The text is read twice at most: once to count how often each latent fires, and once for those that were drawn. Then
one explainer writes a sentence a latent, and one judge says from it which windows fire; either of them is a chat model
or works offline. `AutointerpConfig` says which, and how many windows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sampled_sae.data.layers import LanguageModel
from sampled_sae.errors import UserError
from sampled_sae.evals.autointerp.book import Book, Ready, Steps, Workers
from sampled_sae.evals.autointerp.config import AutointerpConfig
from sampled_sae.evals.autointerp.examples import check_buffer, check_latents
from sampled_sae.evals.autointerp.result import AutointerpResult, to_saebench
from sampled_sae.evals.autointerp.stream import Streams, collect_firings, count_firings, counted_positions
from sampled_sae.evals.given import check_contexts, checked
from sampled_sae.sae import SAE

__all__ = ["AutointerpConfig", "AutointerpResult", "evaluate_autointerp", "evaluate_autointerp_many", "to_saebench"]


def evaluate_autointerp(
    sae: SAE,
    model: LanguageModel,
    layer: int,
    contexts: Tensor,
    settings: AutointerpConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
    explanations: Ready | None = None,
) -> AutointerpResult:
    """Explain and judge latents of an SAE of the residual stream after `layer` on contexts [n, L] of token ids."""
    ready = None if explanations is None else [explanations]
    return evaluate_autointerp_many([sae], model, layer, contexts, settings, progress, ready)[0]


@torch.no_grad()
def evaluate_autointerp_many(
    saes: Sequence[SAE],
    model: LanguageModel,
    layer: int,
    contexts: Tensor,
    settings: AutointerpConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
    explanations: Sequence[Ready | None] | None = None,
    finished: Callable[[int, AutointerpResult], None] | None = None,
) -> list[AutointerpResult]:
    """The same for several SAEs of one layer, in their order: the text is read for all of them together.

    `explanations`: for each SAE those that are there already and are only to be judged; other latents are explained.
    `progress(done, total)` counts contexts read, latents explained and latents judged. `finished` is given each SAE's
    number and result as soon as it is there.
    """
    settings = settings or AutointerpConfig()
    layer = model.check_layer(layer)
    _check(saes, model, layer, contexts, settings, explanations)
    contexts = contexts.long().cpu()
    counted = counted_positions(contexts, settings.skip_first, settings.left_out)
    # Before anything is computed: a missing key or model must not cost an hour.
    workers = Workers(model, contexts, settings)
    steps = Steps(progress, saes, contexts, settings)
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
        found = collect_firings(saes, chosen, streams, settings.tokens_at_once, steps.add)
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"contexts_at_once = {settings.contexts_at_once}, tokens_at_once = {settings.tokens_at_once}: out of GPU "
            "memory; lower them"
        ) from None
    high = streams.high_norm
    del streams
    results = []
    for number, firings in enumerate(found):
        ready = (explanations[number] if explanations else None) or {}
        book = Book(firings, contexts, settings)
        book.explain(workers, ready, steps)
        book.judge(workers, steps)
        count = None if alive is None else alive[number]
        results.append(book.result(layer, int(counted.sum()) - high, high, count, workers, bool(ready)))
        if finished is not None:
            finished(number, results[-1])
    steps.finish()
    return results


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
        drawn = living[torch.randperm(len(living), generator=generator)[: settings.max_latents]]
        chosen.append(sorted(drawn.tolist()))
        alive.append(len(living))
    return chosen, alive


def _check(
    saes: Sequence[SAE],
    model: LanguageModel,
    layer: int,
    contexts: Tensor,
    settings: AutointerpConfig,
    explanations: Sequence[Ready | None] | None,
) -> None:
    if explanations is not None and len(explanations) != len(saes):
        raise UserError(f"explanations are for {len(explanations)} SAEs: must be for {len(saes)}")
    for _, sae in checked(saes, model, layer):
        check_latents(settings.latents, sae.m)
    check_contexts(contexts)
    check_buffer(settings.buffer, contexts)
