"""Output tokens that a latent promotes and suppresses: its decoder row through the final norm and the unembedding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sampled_sae.browser.windows import NONE
from sampled_sae.evals.similarity.cosines import blocks, directions
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.errors import UserError

AT_ONCE = 2**24  # logits held at one time


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
def output_tokens(
    decoder: Tensor, model: LanguageModel, count: int, tick: Callable[[int], None] | None = None
) -> OutputTokens:
    """Decoder rows [m, d] -> their direct effect on the output, without what later layers make of them."""
    out = unembedding(model)
    count = min(count, len(out.weight))
    found: list[tuple[Tensor, ...]] = []
    for rows in decoder.split(max(1, AT_ONCE // len(out.weight))):
        logits = out.project(rows)
        up, down = logits.topk(count, dim=1), logits.topk(count, dim=1, largest=False)
        found.append(tuple(part.cpu() for part in (up.indices, up.values, down.indices, down.values)))
        if tick is not None:
            tick(len(rows))
    return OutputTokens(*(torch.cat(parts) for parts in zip(*found, strict=True)))


@torch.no_grad()
def unembedding(model: LanguageModel) -> Unembedding:
    """What a model does after its last block, in float32, for the tokens that its tokenizer knows."""
    head: Any = model.model.get_output_embeddings()  # type: ignore[operator]
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape[1:] != (model.width,):
        raise UserError(f"{model.name} has no unembedding of width {model.width}")
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
    probe = _balanced(model.width).to(model.device)
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


def _balanced(d: int) -> Tensor:
    """[d] numbers of mean 0, none of them 0."""
    signs = torch.ones(d)
    signs[1::2] = -1
    if d % 2:
        signs[-3:] = torch.tensor([1.0, 1.0, -2.0])
    return signs


ROWS_AT_ONCE = 2**24  # cosines held at one time


class Neighbors(NamedTuple):
    """The nearest latents of each latent, nearest first."""

    latent: Tensor  # [m, c] int64; NONE where there are fewer, and for latents without a direction
    cosine: Tensor  # [m, c]; nan where there is none

    @property
    def nearest(self) -> Tensor:
        """[m]: the largest cosine; nan where there is none."""
        return self.cosine[:, 0] if self.cosine.shape[1] else torch.full((len(self.cosine),), torch.nan)


@torch.no_grad()
def neighbors(
    decoder: Tensor, other: Tensor | None, count: int, tick: Callable[[int], None] | None = None
) -> Neighbors:
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
        if tick is not None:
            tick(height)
    return Neighbors(latent, cosine)
