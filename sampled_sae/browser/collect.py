"""What the browser keeps of each latent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from sampled_sae.browser.latents import (
    NONE,
    Neighbors,
    OutputTokens,
    Tick,
    TopTokens,
    Windows,
    histogram,
    neighbors,
    output_tokens,
    pick_windows,
    top_tokens,
)
from sampled_sae.browser.together import (
    Counterparts,
    Together,
    TokenLatents,
    coactivating,
    counterparts,
    token_latents,
)
from sampled_sae.config import Bound, Config, Count, Positive, Seed
from sampled_sae.data.contexts import find_end_of_text
from sampled_sae.evals.core.schema import special_tokens
from sampled_sae.evals.reading import Firings, Streams, collect_firings, counted_positions
from sampled_sae.hooks import Where
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class BrowseConfig(Config):
    """How much is shown of each latent, and which tokens count."""

    top: Positive = 10
    """Contexts of the largest activations."""
    bands: Annotated[int, Bound("must be from 1 to 100", lambda value: 1 <= value <= 100)] = 5
    """Equal parts of the range from 0 to the largest activation, from each of which contexts are drawn."""
    each: Count = 3
    """Contexts drawn from each of those parts."""
    tokens_kept: Positive = 8
    """Tokens with the largest share of a latent's activation; the search looks at these."""
    bins: Positive = 32
    """Bins of the histogram of activations."""
    promoted: Count = 10
    """Most promoted output tokens, and as many most suppressed ones."""
    near: Count = 5
    """Nearest latents by decoder cosine, in this SAE and in the other one."""
    together: Count = 5
    """Latents whose firing is most correlated with a latent's."""
    samples: Count = 24
    """Contexts of which the page shows the latents that fire at each token."""
    latents_kept: Positive = 8
    """Latents of the largest activations at each token of those contexts."""
    norm_factor: Annotated[float, Bound("must be at least 1 (inf for no high norms)", lambda value: value >= 1)] = 10.0
    """Tokens whose norm is above this many times the median are not read; inf reads all."""
    contexts_at_once: Positive = 16
    """Contexts in one pass through the model; it does not change the page."""
    tokens_at_once: Positive = 2048
    """Tokens that an SAE encodes at once."""
    seed: Seed = 0
    """Seed of the random draws of contexts."""


# Called with a stage and its unit (`reading: contexts`), the number of finished parts and of all parts.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Other:
    """A second SAE, with which the first one's latents are compared; `near` are its nearest for each of the first.

    `tokens` and `pairs`: where its latents fire in the same text; None unless it is of the same layer.
    """

    near: Neighbors
    tokens: TopTokens | None
    pairs: Counterparts | None


@dataclass(frozen=True)
class Browsed:
    """What is shown of the d_sae latents of an SAE; m is d_sae in the shapes."""

    contexts: Tensor  # [n, L] token ids: the text
    read: int  # tokens at which firing counted
    high_norm: int  # tokens that were left out for their norm
    limit: float  # norm above which they were
    firings: Firings  # all of them, which `windows` points into
    windows: Windows
    histogram: Tensor  # [m, bins] int64
    tokens: TopTokens
    near: Neighbors
    together: Together
    samples: TokenLatents
    output: OutputTokens | None  # None where the final norm or the unembedding of the model is unknown
    other: Other | None
    notes: list[str] = field(default_factory=list)  # what is missing, one line each


@torch.no_grad()
def collect(
    sae: SAE,
    model: LanguageModel,
    layer: Where,
    contexts: Tensor,
    settings: BrowseConfig,
    other: SAE | None = None,
    same_layer: bool = True,
    progress: Progress | None = None,
) -> Browsed:
    """Read contexts [n, L] once. `other` reads them too if it is an SAE of the same hook point of the same model."""
    if sae.d_in != (width := model.width_at(layer)):
        where = "" if isinstance(layer, int) else f" at {layer}"
        raise UserError(f"the SAE has width {sae.d_in}: must be {width}, the width of {model.name}{where}")
    if other is not None and other.d_in != sae.d_in:
        raise UserError(f"other: has width {other.d_in}: must be {sae.d_in}, as the first SAE has")
    contexts, progress = contexts.long().cpu(), progress or (lambda what, done, total: None)
    skip_first = int(sae.cfg.metadata.get("skip_first") or 0)
    if skip_first >= contexts.shape[1]:
        raise UserError(
            f"context = {contexts.shape[1]}: must be more than the {skip_first} first tokens that are skipped"
        )
    left_out = {*special_tokens(model.tokenizer), find_end_of_text(model.tokenizer)}
    counted = counted_positions(contexts, skip_first, sorted(left_out))
    factor, at_once = settings.norm_factor, settings.contexts_at_once
    streams = Streams(model, layer, contexts, counted, norm_factor=factor, at_once=at_once, keep_gib=0.0)
    saes = [sae, *([other] if other is not None and same_layer else [])]
    tick = _steps(progress, "reading: contexts", len(contexts))
    found = collect_firings(saes, streams, None, settings.tokens_at_once, tick)
    firings, read = found[0], int(counted.sum()) - streams.high_norm
    if not len(firings.value):
        raise UserError(f"no latent of this SAE fires on the {read:,} tokens read: there is nothing to browse")
    notes: list[str] = []
    output: OutputTokens | None = None
    try:
        if not model.writes_to_residual(layer):
            raise UserError(f"{layer} is not the residual stream, nor added to it")
        tick = _steps(progress, "output tokens: latents", sae.d_sae)
        output = output_tokens(sae.W_dec, model, settings.promoted, tick)
    except UserError as reason:
        notes.append(f"Promoted and suppressed tokens are missing: {reason}.")
    near = neighbors(sae.W_dec, None, settings.near, _steps(progress, "nearest: latents", sae.d_sae))
    second = None
    if other is not None:
        tick = _steps(progress, "nearest in the other: latents", sae.d_sae)
        its = neighbors(sae.W_dec, other.W_dec.to(sae.device), settings.near, tick)
        nearest = its.latent[:, 0] if settings.near else torch.full((sae.d_sae,), NONE)
        fires = [
            (top_tokens(one, contexts, settings.tokens_kept), counterparts(firings, one, nearest, settings.top))
            for one in found[1:]
        ]
        second = Other(its, *(fires[0] if fires else (None, None)))
    tick = _steps(progress, "coactivating: latents", sae.d_sae)
    return Browsed(
        contexts,
        read,
        streams.high_norm,
        streams.limit,
        firings,
        pick_windows(firings, settings.top, settings.bands, settings.each, settings.seed),
        histogram(firings, settings.bins),
        top_tokens(firings, contexts, settings.tokens_kept),
        near,
        coactivating(firings, read, settings.together, tick),
        token_latents(firings, settings.samples, settings.latents_kept),
        output,
        second,
        notes,
    )


def _steps(progress: Progress, what: str, total: int) -> Tick:
    """Adds up steps."""
    done = 0
    progress(what, 0, total)

    def tick(more: int) -> None:
        nonlocal done
        done += more
        progress(what, done, total)

    return tick
