"""What the browser keeps of each latent: where it fires, output tokens and nearest latents by decoder row.

m is d_sae and d is d_in in the shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from sampled_sae.browser.latents import (
    NONE,
    Counterparts,
    Tick,
    Together,
    TokenLatents,
    TopTokens,
    Windows,
    coactivating,
    counterparts,
    histogram,
    pick_windows,
    token_latents,
    top_tokens,
)
from sampled_sae.config import Bound, Config, Count, Positive, Seed
from sampled_sae.data.contexts import find_end_of_text
from sampled_sae.evals.core.schema import special_tokens
from sampled_sae.evals.reading import Firings, Steps, Streams, collect_firings, counted_positions
from sampled_sae.evals.similarity.matching import blocks, directions
from sampled_sae.hooks import Where
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError

AT_ONCE = 2**24  # logits held at one time
ROWS_AT_ONCE = 2**24  # cosines held at one time


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
    """Number of top tokens per latent, those with the largest share of its activation; the search covers these."""
    bins: Positive = 32
    """Bins of the histogram of activations."""
    promoted: Count = 10
    """Number of most promoted and of most suppressed output tokens."""
    near: Count = 5
    """Nearest latents by decoder cosine, in this SAE and in the other one."""
    together: Count = 5
    """Latents whose firing is most correlated with a latent's."""
    samples: Count = 24
    """Number of contexts for which the page shows the latents at each token."""
    latents_kept: Positive = 8
    """Number of strongest latents at each token of these contexts."""
    norm_factor: Annotated[float, Bound("must be at least 1 (inf for no high norms)", lambda value: value >= 1)] = 10.0
    """Tokens whose norm is above this many times the median are not read; inf reads all."""
    contexts_at_once: Positive = 16
    """Contexts in one pass through the model; does not change the page."""
    tokens_at_once: Positive = 2048
    """Tokens that an SAE encodes at once."""
    seed: Seed = 0
    """Seed of the random draws of contexts."""


# ---- decoder rows -----------------------------------------------------------------------------------


class OutputTokens(NamedTuple):
    """The output tokens on which latents have the largest direct effect, c of each kind."""

    promoted: Tensor  # [m, c] int64, most first
    promoted_by: Tensor  # [m, c]: effect on the logit, less the mean over the vocabulary
    suppressed: Tensor  # [m, c] int64, most first
    suppressed_by: Tensor  # [m, c], as above


class Unembedding(NamedTuple):
    """The linear part of what comes after the last block."""

    gain: Tensor  # [d]: the final norm's weight
    centered: bool  # whether the norm takes the mean away, as LayerNorm does
    weight: Tensor  # [vocabulary, d]

    def project(self, rows: Tensor) -> Tensor:
        """rows [n, d] -> effects on logits [n, vocabulary], less their mean."""
        rows = rows.to(self.weight)
        if self.centered:
            rows = rows - rows.mean(1, keepdim=True)
        logits = (rows * self.gain) @ self.weight.T
        return logits.sub_(logits.mean(1, keepdim=True))


@torch.no_grad()
def output_tokens(decoder: Tensor, model: LanguageModel, count: int, tick: Tick = lambda added: None) -> OutputTokens:
    """Decoder rows [m, d] -> their direct effect on the output, without what later layers make of them."""
    out = unembedding(model)
    count = min(count, len(out.weight))
    found: list[tuple[Tensor, ...]] = []
    for rows in decoder.split(max(1, AT_ONCE // len(out.weight))):
        logits = out.project(rows)
        up, down = logits.topk(count, dim=1), logits.topk(count, dim=1, largest=False)
        found.append(tuple(part.cpu() for part in (up.indices, up.values, down.indices, down.values)))
        tick(len(rows))
    return OutputTokens(*(torch.cat(parts) for parts in zip(*found, strict=True)))


@torch.no_grad()
def unembedding(model: LanguageModel) -> Unembedding:
    """What a model does after its last block, in float32, for the tokens that its tokenizer knows."""
    head: Any = model.model.get_output_embeddings()  # type: ignore[operator]
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape[1:] != (model.width,):
        raise UserError(f"{model.name} has no unembedding of width {model.width}")
    if weight.is_meta or any(one.is_meta for one in final_norm(model).parameters()):
        raise UserError(f"the last weights of {model.name} are not in memory, but loaded when they are used")
    # Some models have more rows than tokens, for the sake of round numbers.
    known = min(len(weight), len(model.tokenizer))
    gain, centered = measure_norm(final_norm(model), model)
    return Unembedding(gain, centered, weight[:known].float())


def final_norm(model: LanguageModel) -> nn.Module:
    """The module after the last block that has one weight for each entry of the residual stream."""
    before, _, name = model.path.rpartition(".")
    parent = model.model.get_submodule(before)
    names = [child for child, _ in parent.named_children()]
    after = [parent.get_submodule(child) for child in names[names.index(name) + 1 :]]
    norms = [module for module in after if [tuple(w.shape) for w in module.parameters()][:1] == [(model.width,)]]
    if len(norms) != 1:
        raise UserError(f"cannot identify the final norm of {model.name}")
    return norms[0]


def measure_norm(norm: nn.Module, model: LanguageModel) -> tuple[Tensor, bool]:
    """What the norm multiplies each entry by [d], besides the length, and whether it takes the mean away.

    The norm is measured, because families use their weight differently: Gemma adds 1 to it.
    """
    probe = torch.ones(model.width)  # of mean 0, no entry 0
    probe[1::2] = -1
    if model.width % 2:
        probe[-3:] = torch.tensor([1.0, 1.0, -2.0])
    probe = probe.to(model.device)
    length = probe.square().mean().sqrt()
    # A copy in full precision: in bfloat16 the outputs would be right to two digits only.
    exact = copy.deepcopy(norm).float()

    def answer(x: Tensor) -> Tensor:
        return exact(x[None, None])[0, 0].float()

    # A bias is the same for both signs.
    gain = (answer(probe) - answer(-probe)) / 2 * length / probe
    shifted = answer(probe + 1) - answer(-probe + 1)
    plain = answer(probe) - answer(-probe)
    return gain, bool((shifted - plain).norm() < 0.05 * plain.norm())


class Neighbors(NamedTuple):
    """The nearest latents of each latent, nearest first."""

    latent: Tensor  # [m, c] int64; NONE where there are fewer, and for latents without a direction
    cosine: Tensor  # [m, c]; nan where there is none

    @property
    def nearest(self) -> Tensor:
        """[m]: the largest cosine; nan where there is none."""
        return self.cosine[:, 0] if self.cosine.shape[1] else torch.full((len(self.cosine),), torch.nan)


@torch.no_grad()
def neighbors(decoder: Tensor, other: Tensor | None, count: int, tick: Tick = lambda added: None) -> Neighbors:
    """Decoder rows [m, d] -> the `count` nearest rows of another decoder [n, d], or of the same one but itself."""
    own = directions(decoder)
    its = own if other is None else directions(other, "other")
    latent = torch.full((len(decoder), count), NONE)
    cosine = torch.full((len(decoder), count), torch.nan)
    for first, block in blocks(own.rows, its.rows, ROWS_AT_ONCE):
        height = len(block)
        if other is None:
            here = torch.arange(height, device=block.device)
            block[here, here + first] = -torch.inf
        found = block.topk(min(count, block.shape[1]), dim=1)
        rows = own.latent[first : first + height].cpu()
        there = found.values.isfinite().cpu()
        names = torch.where(there, its.latent[found.indices].cpu(), NONE)
        latent[rows, : names.shape[1]] = names
        cosine[rows, : names.shape[1]] = torch.where(there, found.values.cpu().clamp(max=1), torch.nan)
        tick(height)
    return Neighbors(latent, cosine)


# ---- everything -------------------------------------------------------------------------------------

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
    steps = Steps(partial(progress, what), total)
    steps.add(0)
    return steps.add
