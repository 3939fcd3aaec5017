"""What the model loses when its residual stream is replaced: cross-entropy and KL divergence of each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.bootstrap import Estimate, estimate, ratio
from sampled_sae.hooks import Where
from sampled_sae.models.language_model import LanguageModel

MOST = 2**26  # entries of the logits that are held in float32 at one time: 256 MiB
NOISE = 1e-7  # nats below the rounding of float32: no fraction of so small a loss can be recovered


class Loss(NamedTuple):
    """In nats a token. Cross-entropy counts measured positions but for the last of a context, KL that one too."""

    ce_model: Estimate  # cross-entropy of the model as it is
    ce_sae: Estimate  # cross-entropy with the reconstruction put in
    ce_zero: Estimate  # cross-entropy with zeros put in
    ce_mean: Estimate  # cross-entropy with the mean activation put in
    ce_recovered: Estimate  # (ce_zero - ce_sae) / (ce_zero - ce_model)
    ce_recovered_mean: Estimate  # (ce_mean - ce_sae) / (ce_mean - ce_model)
    kl_sae: Estimate  # KL divergence of the model's predictions to those with the reconstruction put in
    kl_zero: Estimate  # the same for zeros
    kl_mean: Estimate  # the same for the mean activation
    kl_recovered: Estimate  # (kl_zero - kl_sae) / kl_zero
    kl_recovered_mean: Estimate  # (kl_mean - kl_sae) / kl_mean


class Reading(NamedTuple):
    """Some contexts as the model reads them by itself."""

    tokens: Tensor  # [c, L] long
    measured: Tensor  # [c, L] bool, on the model's device
    stream: Tensor  # [c, L, d], the residual stream after the layer
    logits: Tensor | None  # [c, L, vocabulary]; none if no loss is measured


def read(model: LanguageModel, layer: Where, tokens: Tensor, measured: Tensor, loss: bool) -> Reading:
    """Tokens [c, L] -> the activations at `layer` and, for the loss, the logits; one pass gives both."""
    measured = measured.to(model.device)
    if not loss:
        return Reading(tokens, measured, model.activations(tokens, [layer])[layer], None)
    seen: list[Tensor] = []

    def look(stream: Tensor) -> Tensor:
        # Some models add to the stream in place.
        seen.append(stream.clone())
        return stream

    logits = model.logits_with(tokens, layer, look)
    return Reading(tokens, measured, seen[0], logits)


def model_sums(reading: Reading) -> dict[str, Tensor]:
    """Sums over each context [c] of the model's own cross-entropy, and how many predictions they sum."""
    assert reading.logits is not None
    ce, _ = token_losses(reading.logits, reading.tokens, None)
    predicts = _predicts(reading.measured)
    return {
        "ce_model": _sum(ce, predicts),
        "predictions": predicts.sum(1).double(),
        "positions": reading.measured.sum(1).double(),
    }


def replaced_sums(
    model: LanguageModel, layer: Where, reading: Reading, name: str, new: Tensor, where: Tensor
) -> dict[str, Tensor]:
    """Sums over each context [c] of both losses with `new` [c, L, d] (or [d]) in the stream at the positions `where`
    [c, L]; they are called ce_`name` and kl_`name`."""
    new, here = new.to(reading.stream), where.to(model.device)[..., None]
    logits = model.logits_with(reading.tokens, layer, lambda stream: torch.where(here, new, stream))
    ce, kl = token_losses(logits, reading.tokens, reading.logits)
    return {f"ce_{name}": _sum(ce, _predicts(reading.measured)), f"kl_{name}": _sum(kl, reading.measured)}


def token_losses(logits: Tensor, tokens: Tensor, original: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits [c, L, vocabulary] and tokens [c, L] -> cross-entropy of the token that follows and KL divergence of the
    original's predictions to these, both [c, L] float64.

    The last position of a context, which nothing follows, gets a number that means nothing. Without an original the
    divergence is 0.
    """
    following = tokens.to(logits.device).roll(-1, dims=1).reshape(-1, 1)
    rows = max(1, MOST // logits.shape[2])
    parts = logits.flatten(0, 1).split(rows)
    originals = parts if original is None else original.flatten(0, 1).split(rows)
    ce, kl = [], []
    for part, target, before in zip(parts, following.split(rows), originals, strict=True):
        log_q = _log_probabilities(part)
        ce.append(-log_q.gather(1, target).squeeze(1).double())
        if original is not None:
            kl.append(_divergence(_log_probabilities(before), log_q))
    losses = torch.cat(ce).view(tokens.shape)
    return losses, torch.cat(kl).view(tokens.shape) if kl else torch.zeros_like(losses)


def summarize(totals: Mapping[str, Tensor], contexts: int, level: float) -> Loss:
    """Totals [1 + resamples] by name, of `model_sums` and of `replaced_sums` for sae, zero and mean -> the result."""
    v = {f"ce_{name}": ratio(totals[f"ce_{name}"], totals["predictions"]) for name in ("model", "sae", "zero", "mean")}
    v |= {f"kl_{name}": ratio(totals[f"kl_{name}"], totals["positions"]) for name in ("sae", "zero", "mean")}
    for name, end in (("zero", ""), ("mean", "_mean")):
        ce, kl = v[f"ce_{name}"], v[f"kl_{name}"]
        v[f"ce_recovered{end}"] = ratio(ce - v["ce_sae"], ce - v["ce_model"], NOISE)
        v[f"kl_recovered{end}"] = ratio(kl - v["kl_sae"], kl, NOISE)
    return Loss(**{name: estimate(value, contexts, level) for name, value in v.items()})


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Both [r, vocabulary] -> [r] float64, sum of p (log p - log q)."""
    terms = log_p.exp() * (log_p - log_q)
    # Some models rule tokens out: 0 times the difference of two infinities is nothing here, not nan.
    terms.masked_fill_(log_p == -torch.inf, 0.0)
    # It cannot be negative but for rounding.
    return terms.sum(1, dtype=torch.float64).clamp_min(0.0)


def _predicts(measured: Tensor) -> Tensor:
    """[c, L] bool -> the same without the last position."""
    predicts = measured.clone()
    predicts[:, -1] = False
    return predicts


def _sum(values: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, values, 0.0).sum(1)
