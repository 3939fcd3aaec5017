"""The fused update against the specification in float64: each setting of the optimizer."""

import pytest
import torch

from sampled_sae.kernels.adam import FusedAdam
from sampled_sae.kernels.sparse import Rows
from sampled_sae.method.parameters import Parameters, start_parameters
from tests import reference
from tests.training.test_optimizer import OPTIMIZERS, M, gradients

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def as_rows(full: Parameters, stride: int) -> Rows:
    """The same gradients as rows of the latents that have one, in another order, with junk for the others; the last
    few in further rows."""
    there = full.W_enc.any(dim=1).nonzero().squeeze(1).flip(0)
    slot = torch.full((M,), -1, dtype=torch.int32, device=DEVICE)
    slot[there] = torch.arange(len(there), dtype=torch.int32, device=DEVICE)
    first, last = there[:-3], there[-3:]
    pad = (0, stride - full.W_enc.shape[1])
    more = tuple(torch.nn.functional.pad(W[last], pad, value=torch.nan) for W in (full.W_enc, full.W_dec))
    rows = Rows(full.W_enc[first].contiguous(), full.W_dec[first].contiguous(), slot, full.b_enc, torch.zeros(()))
    return rows._replace(more=more)


@pytest.mark.parametrize("d", [6, 16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_the_specification(name, d):
    config = OPTIMIZERS[name]
    start = start_parameters(d, M, torch.Generator().manual_seed(0), torch.float32)
    weights = Parameters(*(w.to(DEVICE) for w in start))
    mine, wanted = FusedAdam(weights, config), reference.Adam(weights, config)
    for step in range(6):
        full = Parameters(*(g.float().to(DEVICE) for g in gradients(step, d)))
        rows = as_rows(full, mine.W_enc.shape[1])
        along = (full.W_dec * weights.W_dec).sum(1)
        energy = full.W_enc.square().sum() + full.b_enc.square().sum() + full.W_dec.square().sum()
        mine.set_rate(0.01)
        mine.update(rows._replace(energy=energy - along.square().sum()), full.b_dec)
        wanted.step(full, 0.01)
        for field, one, other in zip(Parameters._fields, weights, wanted.weights, strict=True):
            torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=2e-6, msg=lambda m, f=field: f"{f}: {m}")
        torch.testing.assert_close(mine.W_enc[:, :d].float(), weights.W_enc, rtol=1e-2, atol=1e-6)
