"""How well latents detect true features: SynthSAEBench's precision, recall, F1 and uniqueness."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sampled_sae.method.codes import SparseCodes


class Detection:
    """Each latent as a detector of the true feature that its decoder row is nearest to, by absolute cosine."""

    def __init__(self, learned: Tensor, true: Tensor) -> None:
        """Decoder rows [m, d] and true features [k, d] of any length, on one device."""
        unit_learned, unit_true = (normalize(rows.detach().float(), dim=1) for rows in (learned, true))
        self.feature = (unit_learned @ unit_true.T).abs().argmax(1)
        self.both, self.latent, self.true = torch.zeros(3, len(learned), dtype=torch.long, device=learned.device)

    def add(self, codes: SparseCodes, active: Tensor) -> None:
        """Count the firings on some samples: their codes, and active [n, k] bool for the true features."""
        wanted = active[:, self.feature]
        hits = wanted[codes.token, codes.latent]
        self.both += torch.bincount(codes.latent[hits], minlength=len(self.both))
        self.latent += torch.bincount(codes.latent, minlength=len(self.both))
        self.true += wanted.sum(0)

    def result(self) -> dict[str, float]:
        """Means over all latents; what is undefined, as of a latent that does not fire, counts as 0."""
        both = self.both.double()
        # F1 = 2 precision recall / (precision + recall) = 2 both / (latent + true).
        parts = {
            "precision": both / self.latent,
            "recall": both / self.true,
            "f1": 2 * both / (self.latent + self.true),
        }
        found = {name: float(part.nan_to_num(0.0).mean()) for name, part in parts.items()}
        return found | {"uniqueness": len(self.feature.unique()) / len(self.feature)}
