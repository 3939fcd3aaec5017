"""The core evaluation: what an SAE keeps of a language model's activations, and of what the model does with them.

`evaluate_core` reads held-out contexts in a few passes: one to find norms and means, one for the model as it is, one
for each ablation and one for each SAE. Memory does not grow with the text, but for some numbers a context and 2 bytes
a token. `CoreConfig` says what is left out and where the reconstruction is put in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.data.layers import LanguageModel
from sampled_sae.errors import UserError
from sampled_sae.evals.bootstrap import totals
from sampled_sae.evals.core import fidelity, trained
from sampled_sae.evals.core import loss as losses
from sampled_sae.evals.core.config import CoreConfig
from sampled_sae.evals.core.fidelity import Density, Fidelity, Firing
from sampled_sae.evals.core.loss import Loss, Reading
from sampled_sae.evals.core.survey import Survey, chunks, survey
from sampled_sae.evals.core.trained import MixedBatches, Trained, TrainedCut
from sampled_sae.evals.given import check_contexts, checked
from sampled_sae.evals.to_json import plain
from sampled_sae.sae import SAE


class CoreResult(NamedTuple):
    """One SAE on one layer of one model; every `Estimate` has a bootstrap interval over contexts."""

    layer: int
    """The residual stream after this block, counted from 0."""
    contexts: int
    """Contexts that were read."""
    median_norm: float
    """Median norm of the measured tokens."""
    measured: Fidelity
    """Over all measured tokens."""
    normal: Fidelity
    """Over those without a high norm."""
    trained: Trained | None
    """By training's own cut; none for an SAE without a training configuration."""
    density: Density
    """How often its latents fire, on the tokens without a high norm: at one of those half of all latents may fire."""
    density_measured: Density
    """The same over all measured tokens."""
    loss: Loss | None
    """What the model loses; none if it was not to be measured."""
    settings: CoreConfig
    """How it was measured."""
    fired: Tensor | None = None
    """[m]: on how many of the tokens without a high norm each latent fires; not part of `to_dict`."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return {name: plain(item) for name, item in self._asdict().items() if name != "fired"}


def evaluate_core(
    sae: SAE, model: LanguageModel, layer: int, contexts: Tensor, settings: CoreConfig | None = None
) -> CoreResult:
    """Measure an SAE of the residual stream after `layer` on held-out contexts [n, L] long."""
    return evaluate_core_many([sae], model, layer, contexts, settings)[0]


@torch.no_grad()
def evaluate_core_many(
    saes: Sequence[SAE],
    model: LanguageModel,
    layer: int,
    contexts: Tensor,
    settings: CoreConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[CoreResult]:
    """The same for several SAEs of one layer, in their order: the model's own passes and ablations are shared.

    `progress` is told how many contexts are done, and of how many.
    """
    settings = settings or CoreConfig()
    layer = model.check_layer(layer)
    list(checked(saes, model, layer))
    check_contexts(contexts, tokens=2)
    # Token ids of smaller types cannot be gathered by.
    contexts = contexts.long().cpu()
    runs = [_Run(sae, contexts, settings) for sae in saes]
    try:
        return _measure(runs, model, layer, contexts, settings, progress or (lambda done, total: None))
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"contexts_at_once = {settings.contexts_at_once}, tokens_at_once = {settings.tokens_at_once}, "
            f"cut_batch = {settings.cut_batch}: out of GPU memory; lower them"
        ) from None


class _Run:
    """What is summed up for one SAE."""

    def __init__(self, sae: SAE, contexts: Tensor, settings: CoreConfig):
        n, config = len(contexts), sae.config
        self.sae, self.settings = sae, settings
        self.firing, self.firing_measured = Firing(sae, n), Firing(sae, n)
        self.measured, self.normal, self.loss = _Sums(n), _Sums(n), _Sums(n)
        self.cut = None if config is None else TrainedCut(sae, config, n, settings.cut_batch, settings.seed)

    def add(self, rows: Tensor, reading: Reading, found: Survey) -> Tensor:
        """Measure the contexts of these rows [c]; returns their reconstruction [c, L, d]."""
        stream, length = reading.stream, reading.stream.shape[1]
        device = self.sae.device
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

    def result(self, layer: int, found: Survey, shared: _Sums) -> CoreResult:
        s, n = self.settings, len(found.measured)

        def drawn(sums: dict[str, Tensor]) -> dict[str, Tensor]:
            return totals(sums, s.resamples, s.seed)

        return CoreResult(
            layer,
            n,
            found.median_norm,
            fidelity.summarise(drawn(self.measured.by_name), n, s.level),
            fidelity.summarise(drawn(self.normal.by_name), n, s.level),
            trained.summarise(drawn(self.cut.sums), n, s.level) if self.cut else None,
            self.firing.density(s.resamples, s.level, s.seed),
            self.firing_measured.density(s.resamples, s.level, s.seed),
            losses.summarise(drawn(shared.by_name | self.loss.by_name), n, s.level) if s.loss else None,
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
    runs: list[_Run],
    model: LanguageModel,
    layer: int,
    contexts: Tensor,
    settings: CoreConfig,
    progress: Callable[[int, int], None],
) -> list[CoreResult]:
    found = survey(model, layer, contexts, settings)
    reconstructed, ablated = _places(found, settings)
    ablations = {"zero": torch.zeros_like(found.means.overall), "mean": _mean_put_in(found, settings)}
    shared = _Sums(len(contexts))
    mixed = MixedBatches(settings.cut_batch, settings.seed)
    cuts = [run.cut for run in runs if run.cut]
    for rows in chunks(torch.arange(len(contexts)), settings.contexts_at_once):
        reading = losses.read(model, layer, contexts[rows], found.measured[rows], settings.loss)
        if settings.loss:
            shared.put(rows, losses.model_sums(reading))
            for name, new in ablations.items():
                shared.put(rows, losses.replaced_sums(model, layer, reading, name, new, ablated[rows]))
        for run in runs:
            x_hat = run.add(rows, reading, found)
            if settings.loss:
                sums = losses.replaced_sums(model, layer, reading, "sae", x_hat, reconstructed[rows])
                run.loss.put(rows, sums)
        if cuts:
            _cut(cuts, mixed, rows, reading, found, settings)
        progress(int(rows[-1]) + 1, len(contexts))
    for x, context in mixed.finish():
        _cut_batch(cuts, x, context, found, settings)
    return [run.result(layer, found, shared) for run in runs]


def _places(found: Survey, settings: CoreConfig) -> tuple[Tensor, Tensor]:
    """Where the reconstruction and where the ablations replace the residual stream, [n, L] bool each."""
    everywhere = torch.ones_like(found.measured)
    match settings.put_in:
        case "saebench":
            return found.measured, everywhere
        case "measured":
            return found.measured, found.measured
        case "normal":
            return found.normal, found.normal
        case "everywhere":
            return everywhere, everywhere


def _mean_put_in(found: Survey, settings: CoreConfig) -> Tensor:
    """[d]: the mean of the tokens that are measured, or of those of them that are replaced."""
    return (found.normal_means if settings.put_in == "normal" else found.means).overall


def _cut(
    cuts: list[TrainedCut], mixed: MixedBatches, rows: Tensor, reading: Reading, found: Survey, settings: CoreConfig
) -> None:
    chosen = (found.measured if settings.trained_on_high_norm else found.normal)[rows]
    context = rows[:, None].expand_as(chosen)[chosen]
    x = reading.stream[chosen.to(reading.stream.device)]
    for batch, numbers in mixed.add(x, context.to(x.device)):
        _cut_batch(cuts, batch, numbers, found, settings)


def _cut_batch(cuts: list[TrainedCut], x: Tensor, context: Tensor, found: Survey, settings: CoreConfig) -> None:
    means = found.means if settings.trained_on_high_norm else found.normal_means
    for cut in cuts:
        cut.add(x, context, means.overall)
