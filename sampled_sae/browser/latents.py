"""Numbers of each latent: contexts to show, histograms, top tokens; output tokens and nearest latents by decoder row.

m is d_sae and d is d_in in the shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sampled_sae.evals.reading import Firings
from sampled_sae.evals.similarity.matching import blocks, directions
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.errors import UserError

NONE = -1  # stands for a token or a latent that is not there
TOP = -1  # stands for the band of a context that is shown for its largest activation
AT_ONCE = 2**24  # logits held at one time
ROWS_AT_ONCE = 2**24  # cosines held at one time
Tick = Callable[[int], None]  # called with the number of latents that were added


# ---- firings in the text -------------------------------------------------------------------------------


def starts_of_runs(*keys: Tensor) -> Tensor:
    """Where a run of equal keys [n] begins: [runs] positions, ascending."""
    new = torch.zeros(len(keys[0]), dtype=torch.bool)
    new[:1] = True
    for key in keys:
        new[1:] |= key[1:] != key[:-1]
    return new.nonzero().squeeze(1)


def largest_of_runs(starts: Tensor, key: Tensor) -> Tensor:
    """The position of the largest key [n] in each run, the first of equals: [runs]."""
    n = len(key)
    run = torch.repeat_interleave(torch.diff(starts, append=torch.tensor([n])))
    best = key[starts].scatter_reduce(0, run, key, "amax")
    position = torch.where(key == best[run], torch.arange(n), n)
    return torch.full((len(starts),), n).scatter_reduce(0, run, position, "amin")


def largest_of_groups(group: Tensor, key: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest keys [n] of each group [n]: by group, largest first, equals in their order."""
    order = key.sort(descending=True, stable=True).indices
    order = order[group[order].sort(stable=True).indices]
    return order[ranks_in_runs(group[order]) < count]


def ranks_in_runs(key: Tensor) -> Tensor:
    """How far each position is from the beginning of its run of equal keys [n]: [n]."""
    begin = starts_of_runs(key)
    return torch.arange(len(key)) - torch.repeat_interleave(begin, torch.diff(begin, append=torch.tensor([len(key)])))


def mixed(seed: int, *parts: Tensor) -> Tensor:
    """Numbers [n] that look random, but are the same for the same seed and parts [n]: int64."""
    state = torch.full_like(parts[0], seed, dtype=torch.int64)
    for part in parts:
        # splitmix64; products wrap around, shifts are made unsigned by a mask.
        state = (state ^ part) + -0x61C8864680B583EB
        state = (state ^ (state >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
        state = (state ^ (state >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
        state = state ^ (state >> 31 & 0x1FFFFFFFF)
    return state


class Windows(NamedTuple):
    """Contexts to show: by latent; first the top ones, the largest first, then those of each band, the highest first.

    A context is shown at most once for a latent.
    """

    latent: Tensor  # [w] int64
    band: Tensor  # [w] int64: from 0, the lowest part of the range; TOP for the top ones
    center: Tensor  # [w] int64: which firing it is shown for
    first: Tensor  # [w] int64: the latent's first firing in that context
    last: Tensor  # [w] int64: one after its last firing there


def pick_windows(firings: Firings, top: int, bands: int, each: int, seed: int = 0) -> Windows:
    """The contexts of the `top` largest activations, and `each` others drawn from each of the bands."""
    latent, value = firings.latent.long(), firings.value
    first = starts_of_runs(firings.latent, firings.position // firings.shape[1])
    last = torch.cat((first[1:], torch.tensor([len(latent)])))
    peak = largest_of_runs(first, value)
    best = largest_of_groups(latent[peak], value[peak], top)
    rest = torch.ones(len(first), dtype=torch.bool)
    rest[best] = False
    # One firing of each context, whichever it is, stands for it among the draws.
    lot = mixed(seed, latent, firings.position.long())
    drawn = largest_of_runs(first, lot)
    others = rest.nonzero().squeeze(1)
    band = band_of(value[drawn], firings.maximum[latent[drawn]], bands)
    group = latent[drawn] * bands + (bands - 1 - band)
    others = others[largest_of_groups(group[others], lot[drawn][others], each)]
    run = torch.cat((best, others))
    center = torch.cat((peak[best], drawn[others]))
    kind = torch.cat((torch.full((len(best),), TOP), band[others]))
    order = latent[center].sort(stable=True).indices
    run, center = run[order], center[order]
    return Windows(latent[center], kind[order], center, first[run], last[run])


def band_of(value: Tensor, maximum: Tensor, bands: int) -> Tensor:
    """Activations [n] and the largest of their latents [n] -> in which of the equal parts of the range they are [n]."""
    return (value.double() / maximum.double() * bands).long().clamp_(0, bands - 1)


class TopTokens(NamedTuple):
    """The tokens that hold most of each latent's activation, most first."""

    token: Tensor  # [m, c] int64; NONE where there are fewer
    share: Tensor  # [m, c]: of the sum of the latent's activations


def histogram(firings: Firings, bins: int) -> Tensor:
    """[m, bins] int64: firings of each latent in equal bins from 0 to its largest activation."""
    latent = firings.latent.long()
    number = latent * bins + band_of(firings.value, firings.maximum[latent], bins)
    return torch.bincount(number, minlength=firings.d_sae * bins).view(firings.d_sae, bins)


def top_tokens(firings: Firings, contexts: Tensor, count: int) -> TopTokens:
    """The `count` tokens of each latent at which its activations in the contexts [n, L] add up to most."""
    text = contexts.flatten().long()
    width = int(text.max()) + 1
    both, order = (firings.latent.long() * width + text[firings.position.long()]).sort()
    begin = starts_of_runs(both)
    run = torch.repeat_interleave(torch.diff(begin, append=torch.tensor([len(both)])))
    total = torch.bincount(run, weights=firings.value[order].double(), minlength=len(begin))
    latent, token = both[begin] // width, both[begin] % width
    chosen = largest_of_groups(latent, total, count)
    owner = latent[chosen]
    rank = ranks_in_runs(owner)
    whole = torch.bincount(latent, weights=total, minlength=firings.d_sae)
    tokens = torch.full((firings.d_sae, count), NONE)
    shares = torch.zeros(firings.d_sae, count)
    tokens[owner, rank] = token[chosen]
    shares[owner, rank] = (total[chosen] / whole[owner]).float()
    return TopTokens(tokens, shares)


# ---- decoder rows --------------------------------------------------------------------------------------


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
