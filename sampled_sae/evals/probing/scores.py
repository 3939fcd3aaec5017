"""How good a probe's answers are: accuracy, F1 and the area under the ROC curve, for many probes at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """Of one probe on its test texts, half of which are of its class."""

    accuracy: float
    """Share of right answers."""
    f1: float
    """Of its class: harmonic mean of precision and recall; 0 if it never says yes rightly."""
    auc: float
    """Chance that a text of its class gets a higher value than one of the others; a tie counts half."""


def score(f: Tensor, positive: Tensor, there: Tensor) -> list[Scores]:
    """Values f [T, n] (above 0 means yes), the truth [T, n] bool, and which texts are there [T, n] bool -> [T]."""
    yes, no = positive & there, ~positive & there
    said = (f > 0) & there
    right = (said & yes).sum(1) + (~said & no).sum(1)
    hits = (said & yes).sum(1).double()
    accuracy = right.double() / there.sum(1)
    f1 = 2 * hits / (said.sum(1) + yes.sum(1)).clamp_min(1)
    return [Scores(*values) for values in torch.stack([accuracy, f1, _auc(f, yes, no)], dim=1).tolist()]


def _auc(f: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    # What is not among the negatives is put above all values, where it counts for nobody.
    below = torch.where(no, f, torch.inf).sort(dim=1).values
    wins = torch.searchsorted(below, f.contiguous()) + torch.searchsorted(below, f.contiguous(), right=True)
    return torch.where(yes, wins / 2, 0.0).sum(1) / (yes.sum(1) * no.sum(1))
