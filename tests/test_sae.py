import pytest
import torch

import sampled_sae as ss
from sampled_sae.sae import SAE
from sampled_sae.training.heldout import calibrated_threshold, measure_heldout


@pytest.fixture
def sae() -> SAE:
    generator = torch.Generator().manual_seed(0)
    made = SAE(6, 20, config=ss.batchtopk(20, 3))
    with torch.no_grad():
        for tensor in made.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        made.W_dec /= made.W_dec.norm(dim=1, keepdim=True)
    made.threshold.fill_(0.7)
    return made


def test_a_tokens_codes_do_not_depend_on_its_batch(sae):
    x = torch.randn(50, 6)
    together = sae.encode(x)
    for i in range(0, 50, 7):
        torch.testing.assert_close(sae.encode(x[i : i + 1])[0], together[i])
        torch.testing.assert_close(sae.encode(x[i]), together[i])


def test_encode_is_the_formula_with_a_strict_threshold(sae):
    x = torch.randn(30, 6)
    z = torch.relu((x - sae.b_dec) @ sae.W_enc + sae.b_enc)
    torch.testing.assert_close(sae.encode(x), torch.where(z > 0.7, z, 0))
    sae.threshold.copy_(z.max().detach())
    assert (sae.encode(x) == 0).all()


def test_any_leading_shape(sae):
    x = torch.randn(2, 5, 6)
    assert sae.encode(x).shape == (2, 5, 20)
    torch.testing.assert_close(sae(x).view(-1, 6), sae(x.view(-1, 6)))
    assert sae(x[0, 0]).shape == (6,)
    assert sae.W_enc.shape == (6, 20)
    assert sae(x.bfloat16()).dtype == torch.float32


def test_rescaling_is_a_change_of_units(sae):
    x = torch.randn(30, 6)
    expected_codes, expected = 5 * sae.encode(x), 5 * sae(x)
    sae.rescale_(5)
    torch.testing.assert_close(sae.encode(5 * x), expected_codes)
    torch.testing.assert_close(sae(5 * x), expected)


def test_wrong_width_gets_a_clear_line(sae):
    with pytest.raises(ss.UserError, match="x has width 7: this SAE takes activations of width 6"):
        sae.encode(torch.zeros(3, 7))
    with pytest.raises(ss.UserError, match="codes have 6 latents: this SAE has 20"):
        sae.decode(torch.zeros(3, 6))


@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_calibration_keeps_k_a_token_on_average(sae, chunk):
    # A few tokens are far stronger than the rest, so that one chunk alone holds most of what passes.
    x = torch.randn(500, 6) * torch.where(torch.arange(500) < 20, 30.0, 1.0)[:, None]
    for k in (1, 3, 8):
        sae.threshold.fill_(calibrated_threshold(sae, x, k, chunk=chunk))
        assert (sae.encode(x) > 0).sum() == k * 500
    assert calibrated_threshold(sae, x, 20, chunk=chunk) == 0


def test_what_is_measured_on_heldout_tokens():
    torch.manual_seed(0)
    x = torch.randn(300, 8)
    sae = ss.train(x, ss.batchtopk(32, 3), steps=20, batch_size=32, heldout=x, device="cpu", progress=False)[0]
    found = sae.metadata["training"]["heldout"]
    error = (x - sae(x)).square().sum() / (x - x.mean(0)).square().sum()
    assert found["fvu"] == pytest.approx(float(error.detach()), rel=1e-5)
    assert found["l0"] == pytest.approx(3)
    assert measure_heldout(sae, x[:1].expand(5, -1)).fvu is None
