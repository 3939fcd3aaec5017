import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from sampled_sae.evals.core import fidelity as core_fidelity
from sampled_sae.evals.core import loss as core_loss


@given(st.lists(st.floats(1e-9, 1.0), max_size=50))
def test_histogram_counts_every_latent_once(values):
    counts, edges = core_fidelity.histogram(torch.tensor(values, dtype=torch.float64))
    assert sum(counts) == len(values)
    for value in values:
        inside = max(i for i, edge in enumerate([-math.inf, *edges[1:-1]]) if math.log10(value) + 2.5e-10 >= edge)
        assert counts[inside] > 0


def test_tokens_that_a_model_rules_out():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    logits[..., 4] = -math.inf
    ce, kl = core_loss.token_losses(logits, torch.zeros(2, 3, dtype=torch.long), logits + 1)
    assert torch.isfinite(ce).all()
    torch.testing.assert_close(kl, torch.zeros(2, 3, dtype=torch.float64), atol=1e-7, rtol=0)
