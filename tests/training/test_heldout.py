from dataclasses import replace

import pytest
import torch

import sampled_sae as ss
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.sae import SAE
from sampled_sae.training.heldout import as_trained, by_threshold, calibrated_threshold
from sampled_sae.utils.errors import UserError


@pytest.fixture
def sae(activations) -> SAE:
    return ss.train(activations, [ss.sampled(48, 4, l=3)], steps=50, batch_size=200, progress=False, device="cpu")[0]


@torch.no_grad()
def test_by_threshold_is_the_formula(sae, activations):
    result = by_threshold(sae, activations, batch_size=300)
    codes, x_hat = sae.encode(activations), sae(activations)
    error = (activations - x_hat).square().sum() / (activations - activations.mean(0)).square().sum()
    assert result.fve == pytest.approx(1 - float(error), abs=1e-5)
    assert result.l0 == pytest.approx(float((codes > 0).sum(1).float().mean()))
    torch.testing.assert_close(result.frequency, (codes > 0).double().mean(0))
    lower = by_threshold(sae, activations, theta=torch.tensor(0.0))
    assert lower.l0 > result.l0


def test_as_trained_uses_pool_and_budget(sae, activations):
    result = as_trained(sae, activations, batch_size=4000)
    assert result.l0 == 4
    assert (result.frequency > 0).sum() <= 12
    assert result.fve != by_threshold(sae, activations).fve
    sae.cfg = replace(sae.cfg, training=None)
    with pytest.raises(UserError, match="no training configuration"):
        as_trained(sae, activations, batch_size=4000)


def test_what_a_gate_learned_is_not_saved_so_all_latents_are_its_pool(sae, activations):
    found = []
    for config in (ss.sampled(48, 4, "gate", l=3), ss.batchtopk(48, 4)):
        sae.cfg = replace(sae.cfg, training=config)
        found.append(as_trained(sae, activations, batch_size=4000))
    assert torch.equal(found[0].frequency, found[1].frequency) and found[0].fvu == found[1].fvu


def test_a_threshold_in_double_precision_lets_no_value_pass_that_must_not():
    x = torch.randn(200, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sae = SAE(InferenceConfig(6, 6), torch.float64)
    with torch.no_grad():
        sae.W_enc.T[:] = sae.W_dec[:] = torch.eye(6)
    for tokens in range(1, 101):
        sae.threshold.fill_(calibrated_threshold(sae, x[:tokens], 1))
        assert len(sae.encode_sparse(x[:tokens]).value) == tokens


def test_a_perfect_and_a_useless_sae():
    sae = SAE(InferenceConfig(4, 8, training=ss.batchtopk(8, 4)))
    x = torch.randn(1000, 4)
    with torch.no_grad():
        sae.W_enc.T[:] = sae.W_dec[:] = torch.cat([torch.eye(4), -torch.eye(4)])
    assert by_threshold(sae, x).fve == pytest.approx(1)
    sae.threshold.fill_(1e9)
    assert by_threshold(sae, x).fve == pytest.approx(0, abs=0.02)
    assert by_threshold(sae, x).l0 == 0
