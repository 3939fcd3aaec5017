"""Scores from statistics against the scores of the whole Z."""

import pytest
import torch

from sampled_sae.kernels.encoder import statistics
from sampled_sae.method.scores import SCORES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", [name for name, score in SCORES.items() if score.reads == "sums"])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_scores_are_those_of_the_whole_batch(name, tokens):
    z = torch.randn(tokens, 37, generator=torch.Generator().manual_seed(0)).bfloat16()
    z[:, 3] = -1  # never fires
    score = SCORES[name]
    wanted = score(z.double().relu(), torch.Generator())
    got = score.from_sums(statistics(z.to(DEVICE), score.sums)).cpu()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
