"""Latents as detectors of the features that they are nearest to; tests/peers has the parity with SAELens."""

import pytest
import torch

from sampled_sae.evals.similarity.detection import Detection
from sampled_sae.method.codes import SparseCodes


def test_counts_by_hand():
    true = torch.eye(3)
    learned = torch.tensor([[2.0, 0.1, 0.0], [-3.0, 0.0, 0.2], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    fires = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]).float()
    active = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    found = Detection(learned, true)
    for part, own in zip(fires.split(3), active.split(3), strict=True):
        found.add(SparseCodes.from_dense(part), own)
    # Latents 0 and 1 are both nearest to feature 0, whatever their sign; 3 does not fire, nor does its feature.
    assert found.feature.tolist() == [0, 0, 1, 2]
    assert found.result() == pytest.approx(
        {
            "precision": (2 / 3 + 1 + 1 + 0) / 4,
            "recall": (2 / 3 + 1 / 3 + 1 / 2 + 0) / 4,
            "f1": (2 / 3 + 1 / 2 + 2 / 3 + 0) / 4,
            "uniqueness": 3 / 4,
        }
    )
