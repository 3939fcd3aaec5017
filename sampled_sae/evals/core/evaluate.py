"""Core evaluation of many SAEs: a survey of the text for positions and means, then reconstruction and loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals import Progress
from sampled_sae.evals.bootstrap import totals
from sampled_sae.evals.core import fidelity
from sampled_sae.evals.core import loss as losses
from sampled_sae.evals.core.fidelity import Firing, MixedBatches, TrainedCut
from sampled_sae.evals.core.schema import CoreConfig, CoreResult
from sampled_sae.evals.reading import check_contexts, checked, counted_positions, not_finite
from sampled_sae.hooks import Where
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError


class Means(NamedTuple):
    """Mean activation of some tokens, in float64."""

    overall: Tensor  # [d], over all contexts
    batches: Tensor  # [batches, d], over each batch of `legacy_batch` contexts


class Survey(NamedTuple):
    """What has to be known before anything is measured: 2 bytes per token, and the means of each batch."""

    measured: Tensor  # [n, L] bool: positions that are not left out
    normal: Tensor  # [n, L] bool: measured positions without a high norm
    median_norm: float  # of the measured positions
    means: Means  # of the measured positions
    normal_means: Means  # of the measured positions without a high norm


def survey(model: LanguageModel, layer: Where, contexts: Tensor, settings: CoreConfig) -> Survey:
    """Contexts [n, L] -> positions and means. The model reads all of them once, those with high norms twice."""
    measured = counted_positions(contexts, settings.skip_first or 0, settings.left_out or ())
    norms = torch.zeros(contexts.shape)
    batches = -(-len(contexts) // settings.legacy_batch)
    total = torch.zeros(batches, model.width_at(layer), dtype=torch.float64, device=model.device)
    for rows in torch.arange(len(contexts)).split(settings.at_once):
        stream = model.activations(contexts[rows], [layer])[layer].double()
        norms[rows] = stream.norm(dim=2).float().cpu()
        _add_sums(total, stream, measured[rows], rows // settings.legacy_batch)
    if not bool(norms[measured].isfinite().all()):
        raise not_finite(model, layer)
    median = float(norms[measured].median())
    limit = settings.norm_limit
    if limit is None:  # infinity times a median of 0 would be nan
        limit = math.inf if math.isinf(settings.norm_factor) else settings.norm_factor * median
    normal = measured & (norms <= limit)
    del norms
    ordinary = total.clone()
    high = (measured & ~normal).any(1).nonzero().squeeze(1)
    for rows in high.split(settings.at_once) if len(high) else ():  # the rest has nothing to subtract
        stream = model.activations(contexts[rows], [layer])[layer].double()
        _add_sums(ordinary, -stream, (measured & ~normal)[rows], rows // settings.legacy_batch)
    batch = settings.legacy_batch
    return Survey(measured, normal, median, _means(total, measured, batch), _means(ordinary, normal, batch))


def _add_sums(total: Tensor, stream: Tensor, chosen: Tensor, batch: Tensor) -> None:
    """Add the chosen [c, L] tokens of stream [c, L, d] to the totals [batches, d] of each context's batch [c]."""
    kept = torch.where(chosen.to(stream.device)[..., None], stream, 0.0).sum(1)
    total.index_add_(0, batch.to(total.device), kept)


def _means(total: Tensor, chosen: Tensor, batch: int) -> Means:
    counts = torch.stack([part.sum() for part in chosen.split(batch)]).to(total.device)
    return Means(total.sum(0) / counts.sum().clamp_min(1), total / counts.clamp_min(1)[:, None])


@torch.no_grad()
def evaluate_core_many(
    saes: Sequence[SAE],
    model: LanguageModel,
    layer: Where,
    contexts: Tensor,
    settings: CoreConfig | None = None,
    progress: Progress | None = None,
) -> list[CoreResult]:
    """Measure SAEs of the hook point `layer` on held-out contexts [n, L] long; results in their order.

    The model's own passes and ablations are shared. `progress` counts contexts.
    """
    settings = settings or CoreConfig()
    layer = model.where(layer)
    list(checked(saes, model, layer))
    check_contexts(contexts, tokens=2)
    # Token ids of smaller types cannot be gathered by.
    contexts = contexts.long().cpu()
    runs = [_Run(sae, contexts, settings) for sae in saes]
    try:
        return _measure(runs, model, layer, contexts, settings, progress or (lambda done, total: None))
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"contexts_at_once = {settings.at_once}, tokens_at_once = {settings.tokens_at_once}, "
            f"cut_batch = {settings.batch}: out of GPU memory; lower them"
        ) from None


class _Run:
    """What is summed up for one SAE."""

    def __init__(self, sae: SAE, contexts: Tensor, settings: CoreConfig):
        n, config = len(contexts), sae.cfg.training
        self.sae, self.settings = sae, settings
        self.firing, self.firing_measured = Firing(sae, n), Firing(sae, n)
        self.measured, self.normal, self.loss = _Sums(n), _Sums(n), _Sums(n)
        self.cut = None if config is None else TrainedCut(sae, config, n, settings.batch, settings.seed)

    def add(self, rows: Tensor, stream: Tensor, found: Survey) -> Tensor:
        """Measure the contexts of these rows [c] from their residual stream; returns its reconstruction [c, L, d]."""
        device, length = self.sae.device, stream.shape[1]
        kinds = ((found.normal[rows], self.firing), (found.measured[rows], self.firing_measured))
        x_hat, l0 = fidelity.reconstruct(
            self.sae,
            stream.flatten(0, 1),
            rows.repeat_interleave(length).to(device),
            [(chosen.flatten().to(device), firing) for chosen, firing in kinds],
            self.settings.tokens_at_once,
        )
        for chosen, firing in kinds:
            firing.add_tokens(rows, chosen.sum(1))
        x_hat, l0 = x_hat.view(stream.shape).to(stream.device), l0.view(stream.shape[:2]).to(stream.device)
        exact, near = stream.double(), x_hat.double()
        batch = (rows // self.settings.legacy_batch).to(stream.device)
        for sums, tokens, means in (
            (self.measured, found.measured, found.means),
            (self.normal, found.normal, found.normal_means),
        ):
            among = tokens[rows].to(stream.device)
            sums.put(rows, fidelity.fidelity_sums(exact, near, l0, among, means.overall, means.batches[batch]))
        return x_hat

    def result(self, layer: Where, found: Survey, shared: _Sums) -> CoreResult:
        s, n = self.settings, len(found.measured)
        drawn = partial(totals, resamples=s.resamples, seed=s.seed)
        return CoreResult(
            layer,
            n,
            found.median_norm,
            fidelity.summarize(drawn(self.measured.by_name), n, s.level),
            fidelity.summarize(drawn(self.normal.by_name), n, s.level),
            fidelity.summarize_trained(drawn(self.cut.sums), n, s.level) if self.cut else None,
            self.firing.density(s.resamples, s.level, s.seed),
            self.firing_measured.density(s.resamples, s.level, s.seed),
            losses.summarize(drawn(shared.by_name | self.loss.by_name), n, s.level) if s.loss else None,
            s,
            self.firing.fired.sum(0).cpu(),
        )


class _Sums:
    """Sums over each context's tokens, by name: [n] float64."""

    def __init__(self, contexts: int):
        self.contexts = contexts
        self.by_name: dict[str, Tensor] = {}

    def put(self, rows: Tensor, sums: dict[str, Tensor]) -> None:
        """Sums [c] of the contexts of these rows [c]."""
        for name, values in sums.items():
            if name not in self.by_name:
                self.by_name[name] = values.new_zeros(self.contexts)
            self.by_name[name][int(rows[0]) : int(rows[-1]) + 1] = values


def _measure(
    runs: list[_Run], model: LanguageModel, layer: Where, contexts: Tensor, settings: CoreConfig, progress: Progress
) -> list[CoreResult]:
    found = survey(model, layer, contexts, settings)
    everywhere = torch.ones_like(found.measured)
    # Where the reconstruction and where the ablations replace the residual stream, [n, L] bool each.
    reconstructed, ablated = {
        "saebench": (found.measured, everywhere),
        "measured": (found.measured, found.measured),
        "normal": (found.normal, found.normal),
        "everywhere": (everywhere, everywhere),
    }[settings.put_in or "saebench"]
    mean = (found.normal_means if settings.put_in == "normal" else found.means).overall
    ablations = {"zero": torch.zeros_like(mean), "mean": mean}
    shared = _Sums(len(contexts))
    cuts = [run.cut for run in runs if run.cut]
    mixed = MixedBatches(settings.batch, settings.seed)
    trained_on, around = found.normal, found.normal_means.overall
    if settings.trained_on_high_norm:
        trained_on, around = found.measured, found.means.overall
    for rows in torch.arange(len(contexts)).split(settings.at_once):
        reading = losses.read(model, layer, contexts[rows], found.measured[rows], settings.loss)
        if settings.loss:
            shared.put(rows, losses.model_sums(reading))
            for name, new in ablations.items():
                shared.put(rows, losses.replaced_sums(model, layer, reading, name, new, ablated[rows]))
        for run in runs:
            x_hat = run.add(rows, reading.stream, found)
            if settings.loss:
                sums = losses.replaced_sums(model, layer, reading, "sae", x_hat, reconstructed[rows])
                run.loss.put(rows, sums)
        if cuts:
            chosen = trained_on[rows]
            x, context = reading.stream[chosen.to(reading.stream.device)], rows[:, None].expand_as(chosen)[chosen]
            for batch in mixed.add(x, context.to(x.device)):
                for cut in cuts:
                    cut.add(*batch, around)
        progress(int(rows[-1]) + 1, len(contexts))
    for batch in mixed.finish():
        for cut in cuts:
            cut.add(*batch, around)
    return [run.result(layer, found, shared) for run in runs]
