"""Which true features of synthetic data an SAE found: matching, recovery for each bucket, firing fidelity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sampled_sae.errors import UserError


class Matching(NamedTuple):
    """The latent that stands for each true feature; no latent stands for two."""

    latent: Tensor
    """[k] long: index of the latent, -1 for a feature that got none."""
    similarity: Tensor
    """[k] float: absolute cosine of the two rows, 0 for a feature that got none."""


def match(learned: Tensor, true: Tensor) -> Matching:
    """One-to-one matching of learned [m, d] to true [k, d] rows with the largest total absolute cosine.

    Signs and lengths of the rows do not matter; a row of zeros has cosine 0 with everything. With fewer
    latents than features (m < k) some features stay unmatched. The result is on the CPU.
    """
    _check_rows(learned, true)
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise UserError("matching needs scipy; pip install 'sampled-sae[experiments]'") from error
    unit_true = normalize(true.detach().float(), dim=1)
    unit_learned = normalize(learned.detach().float(), dim=1)
    cosine = (unit_true @ unit_learned.T).abs().cpu()
    features, latents = map(torch.from_numpy, linear_sum_assignment(cosine.numpy(), maximize=True))
    latent = torch.full((len(true),), -1)
    similarity = torch.zeros(len(true))
    latent[features] = latents
    similarity[features] = cosine[features, latents]
    return Matching(latent, similarity)


def bucket_recovery(
    similarity: Tensor, bucket: Tensor, names: Sequence[str], threshold: float = 0.7
) -> dict[str, float | None]:
    """Share of the features of each bucket with similarity >= threshold.

    similarity [k] and bucket [k] (index into `names`) in; one entry for each name out. A bucket without
    features has no share: its entry is None, which JSON can hold, unlike nan.
    """
    _check_lengths("bucket", bucket, similarity)
    recovered = similarity.cpu() >= threshold
    bucket = bucket.cpu()
    shares: dict[str, float | None] = {}
    for index, name in enumerate(names):
        inside = recovered[bucket == index]
        shares[name] = inside.double().mean().item() if len(inside) else None
    return shares


def activation_fidelity(
    learned_frequency: Tensor,
    true_frequency: Tensor,
    matching: Matching,
    threshold: float | None = None,
) -> float | None:
    """Pearson correlation of learned [m] and true [k] firing frequency over the matched features.

    With a `threshold`, only over features matched at that similarity or better. None where a correlation
    does not exist: fewer than two features, or a frequency that is the same for all of them.

    A true feature whose coefficients have both signs needs two latents, and each fires about half as often
    as the feature. A correlation does not see such a common factor.
    """
    _check_lengths("true_frequency", true_frequency, matching.latent)
    chosen = matching.latent >= 0
    if threshold is not None:
        chosen &= matching.similarity >= threshold
    latent = matching.latent[chosen]
    if len(latent) and int(latent.max()) >= len(learned_frequency):
        raise UserError(
            f"learned_frequency has {len(learned_frequency)} entries: must have one for each latent, "
            f"and latent {int(latent.max())} is matched"
        )
    return _pearson(learned_frequency.cpu()[latent].double(), true_frequency.cpu()[chosen].double())


def _pearson(a: Tensor, b: Tensor) -> float | None:
    """Correlation of two vectors [n]; None for n < 2 or a constant one."""
    # Equality, not zero variance: rounding leaves a constant vector with a tiny variance.
    if len(a) < 2 or bool((a == a[0]).all()) or bool((b == b[0]).all()):
        return None
    a, b = a - a.mean(), b - b.mean()
    return max(-1.0, min(1.0, (a @ b / (a.norm() * b.norm())).item()))


def _check_rows(learned: Tensor, true: Tensor) -> None:
    for name, rows in (("learned", learned), ("true", true)):
        if rows.ndim != 2:
            raise UserError(f"{name} has shape {list(rows.shape)}: must be a matrix [rows, d]")
        if not bool(torch.isfinite(rows).all()):
            raise UserError(f"{name} has entries that are nan or infinite: must be finite numbers")
    if learned.shape[1] != true.shape[1]:
        raise UserError(f"learned has width {learned.shape[1]}: must be {true.shape[1]}, the width of true")


def _check_lengths(name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.shape != other.shape:
        raise UserError(f"{name} has shape {list(tensor.shape)}: must be {list(other.shape)}, one per feature")
