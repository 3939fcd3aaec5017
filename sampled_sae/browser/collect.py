"""What the browser keeps of each latent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sampled_sae.browser.decoder import Neighbours, OutputTokens, neighbours, output_tokens
from sampled_sae.browser.windows import TopTokens, Windows, histogram, pick_windows, top_tokens
from sampled_sae.config import numbers, require, whole_numbers
from sampled_sae.data.contexts import find_end_of_text
from sampled_sae.evals.core.schema import special_tokens
from sampled_sae.evals.reading import Firings, Streams, collect_firings, counted_positions
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class BrowseConfig:
    """How much is shown of each latent, and which tokens count."""

    top: int = 10
    """Contexts of the largest activations."""
    bands: int = 5
    """Equal parts of the range from 0 to the largest activation, from each of which contexts are drawn."""
    each: int = 3
    """Contexts drawn from each of those parts."""
    tokens_kept: int = 8
    """Tokens that hold most of a latent's activation; these are searched."""
    bins: int = 32
    """Bins of the histogram of activations."""
    promoted: int = 10
    """Output tokens that it promotes most, and as many that it suppresses."""
    near: int = 5
    """Nearest latents by decoder cosine, in this SAE and in the other one."""
    norm_factor: float = 10.0
    """Tokens whose norm is above this many times the median are not read; inf reads all."""
    contexts_at_once: int = 16
    """Contexts in one pass through the model; what is shown is the same whatever it is."""
    tokens_at_once: int = 2048
    """Tokens that an SAE encodes at once."""
    seed: int = 0
    """Seed of the draws of contexts."""

    def __post_init__(self) -> None:
        positive = ("top", "bands", "tokens_kept", "bins", "contexts_at_once", "tokens_at_once")
        others = ("each", "promoted", "near")
        whole_numbers(self, *positive, *others, "seed")
        numbers(self, "norm_factor")
        for name in positive:
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in others:
            require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        require(self.bands <= 100, "bands", self.bands, "must be at most 100")
        require(self.norm_factor >= 1, "norm_factor", self.norm_factor, "must be at least 1 (inf for no high norms)")
        require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "must fit into 64 bits")


Told = Callable[[str, int, int], None]
"""Is told what is being done and of what (`reading: contexts`), how far it is, and out of how many."""


@dataclass(frozen=True)
class Other:
    """A second SAE, to which the first one's latents are held."""

    near: Neighbours
    """Its nearest latents for each latent of the first."""
    tokens: TopTokens | None
    """What its latents fire on in the same text; none where it is not an SAE of the same layer."""
    fired: Tensor | None
    """[n] int64, likewise."""


@dataclass(frozen=True)
class Browsed:
    """What was found out about the m latents of an SAE."""

    contexts: Tensor
    """[n, L] token ids: the text."""
    read: int
    """Tokens at which firing counted."""
    high_norm: int
    """Tokens that were left out for their norm."""
    firings: Firings
    """All of them, which `windows` points into."""
    windows: Windows
    histogram: Tensor
    """[m, bins] int64."""
    tokens: TopTokens
    near: Neighbours
    output: OutputTokens | None
    """None where the model does not say how its last layer becomes logits."""
    other: Other | None
    notes: list[str] = field(default_factory=list)
    """What is missing, one line each."""


@torch.no_grad()
def collect(
    sae: SAE,
    model: LanguageModel,
    layer: int,
    contexts: Tensor,
    settings: BrowseConfig,
    other: SAE | None = None,
    same_layer: bool = True,
    told: Told | None = None,
) -> Browsed:
    """Read contexts [n, L] once. `other` is read along if it is an SAE of the `same_layer` of the same model."""
    _check(sae, model, other)
    contexts, told = contexts.long().cpu(), told or (lambda what, done, total: None)
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
    tick = _steps(told, "reading: contexts", len(contexts))
    found = collect_firings(saes, streams, None, settings.tokens_at_once, tick)
    firings, read = found[0], int(counted.sum()) - streams.high_norm
    if not len(firings.value):
        raise UserError(f"no latent of this SAE fires on the {read:,} tokens read: there is nothing to browse")
    notes: list[str] = []
    output = _output(sae, model, settings, told, notes)
    near = neighbours(sae.W_dec, None, settings.near, _steps(told, "nearest: latents", sae.d_sae))
    return Browsed(
        contexts,
        read,
        streams.high_norm,
        firings,
        pick_windows(firings, settings.top, settings.bands, settings.each, settings.seed),
        histogram(firings, settings.bins),
        top_tokens(firings, contexts, settings.tokens_kept),
        near,
        output,
        None if other is None else _other(sae, other, found[1:], contexts, settings, told),
        notes,
    )


def _check(sae: SAE, model: LanguageModel, other: SAE | None) -> None:
    if sae.d_in != model.width:
        raise UserError(f"the SAE has width {sae.d_in}: must be {model.width}, the width of {model.name}")
    if other is not None and other.d_in != sae.d_in:
        raise UserError(f"other: has width {other.d_in}: must be {sae.d_in}, as the first SAE has")


def _output(
    sae: SAE, model: LanguageModel, settings: BrowseConfig, told: Told, notes: list[str]
) -> OutputTokens | None:
    try:
        return output_tokens(sae.W_dec, model, settings.promoted, _steps(told, "output tokens: latents", sae.d_sae))
    except UserError as reason:
        notes.append(f"Promoted and suppressed tokens are missing: {reason}.")
        return None


def _other(sae: SAE, other: SAE, found: list[Firings], contexts: Tensor, settings: BrowseConfig, told: Told) -> Other:
    near = neighbours(
        sae.W_dec, other.W_dec.to(sae.device), settings.near, _steps(told, "nearest in the other: latents", sae.d_sae)
    )
    if not found:
        return Other(near, None, None)
    return Other(near, top_tokens(found[0], contexts, settings.tokens_kept), found[0].fired)


def _steps(told: Told, what: str, total: int) -> Callable[[int], None]:
    """Adds up steps."""
    done = 0
    told(what, 0, total)

    def tick(more: int) -> None:
        nonlocal done
        done += more
        told(what, done, total)

    return tick
