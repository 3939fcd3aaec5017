"""A first look at the held-out text: which positions are measured, which have high norms, and what the means are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.data.layers import LanguageModel
from sampled_sae.errors import UserError
from sampled_sae.evals.core.config import CoreConfig


class Means(NamedTuple):
    """The mean activation of some of the tokens, in float64."""

    overall: Tensor
    """[d], over all contexts."""
    batches: Tensor
    """[batches, d], over each batch of `legacy_batch` contexts."""


class Survey(NamedTuple):
    """What has to be known before anything is measured: 2 bytes a token, and the means of each batch."""

    measured: Tensor
    """[n, L] bool: positions that are not left out."""
    normal: Tensor
    """[n, L] bool: measured positions without a high norm."""
    median_norm: float
    """Of the measured positions."""
    means: Means
    """Of the measured positions."""
    normal_means: Means
    """Of the measured positions without a high norm."""


def survey(model: LanguageModel, layer: int, contexts: Tensor, settings: CoreConfig) -> Survey:
    """Contexts [n, L] -> positions and means. The model reads all of them once, those with high norms twice."""
    measured = measured_positions(contexts, settings)
    norms = torch.zeros(contexts.shape)
    batches = -(-len(contexts) // settings.legacy_batch)
    total = torch.zeros(batches, model.width, dtype=torch.float64, device=model.device)
    for rows in chunks(torch.arange(len(contexts)), settings.contexts_at_once):
        stream = model.activations(contexts[rows], [layer])[layer].double()
        norms[rows] = stream.norm(dim=2).float().cpu()
        _add_sums(total, stream, measured[rows], rows // settings.legacy_batch)
    if not bool(norms[measured].isfinite().all()):
        raise UserError(
            f"layer = {layer}: {model.name} gives activations that are nan or infinite in {model.dtype}; "
            "load it in float32"
        )
    median = float(norms[measured].median())
    limit = settings.norm_limit
    if limit is None:  # infinity times a median of 0 would be nan
        limit = math.inf if math.isinf(settings.norm_factor) else settings.norm_factor * median
    normal = measured & (norms <= limit)
    del norms
    ordinary = total.clone()
    # The rest has nothing to subtract.
    for rows in chunks((measured & ~normal).any(1).nonzero().squeeze(1), settings.contexts_at_once):
        stream = model.activations(contexts[rows], [layer])[layer].double()
        _add_sums(ordinary, -stream, (measured & ~normal)[rows], rows // settings.legacy_batch)
    batch = settings.legacy_batch
    return Survey(measured, normal, median, _means(total, measured, batch), _means(ordinary, normal, batch))


def measured_positions(contexts: Tensor, settings: CoreConfig) -> Tensor:
    """Contexts [n, L] -> which positions are not left out [n, L] bool; at least one is."""
    length = contexts.shape[1]
    if settings.skip_first >= length:
        raise UserError(f"skip_first = {settings.skip_first}: must leave some of the {length} positions of a context")
    measured = torch.ones(contexts.shape, dtype=torch.bool)
    measured[:, : settings.skip_first] = False
    if settings.left_out:
        measured &= ~torch.isin(contexts, torch.tensor(settings.left_out))
    if not bool(measured.any()):
        raise UserError(f"left_out = {settings.left_out}: must leave some token of the contexts")
    return measured


def chunks(rows: Tensor, at_once: int) -> Iterator[Tensor]:
    """Row numbers [n] -> the same in parts, none for n = 0."""
    return (part for part in rows.split(at_once) if len(part))


def _add_sums(total: Tensor, stream: Tensor, chosen: Tensor, batch: Tensor) -> None:
    """Add the chosen [c, L] tokens of stream [c, L, d] to the totals [batches, d] of each context's batch [c]."""
    kept = torch.where(chosen.to(stream.device)[..., None], stream, 0.0).sum(1)
    total.index_add_(0, batch.to(total.device), kept)


def _means(total: Tensor, chosen: Tensor, batch: int) -> Means:
    counts = torch.stack([part.sum() for part in chosen.split(batch)]).to(total.device)
    return Means(total.sum(0) / counts.sum().clamp_min(1), total / counts.clamp_min(1)[:, None])
