import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch

import sampled_sae as ss
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.sae import SAE
from sampled_sae.training.heldout import by_threshold, calibrated_threshold


@pytest.fixture
def sae() -> SAE:
    generator = torch.Generator().manual_seed(0)
    made = SAE(InferenceConfig(6, 20, training=ss.batchtopk(20, 3)))
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


def test_a_prefix_encodes_and_decodes_with_its_latents_alone(sae):
    nested, x = SAE(replace(sae.cfg, prefixes=(3, 8, 20))), torch.randn(5, 7, 6)
    nested.load_state_dict(sae.state_dict())
    whole = nested.encode(x)
    for index, width in enumerate((3, 8, 20)):
        codes = nested.encode(x, prefix=index)
        torch.testing.assert_close(codes, whole * (torch.arange(20) < width))
        x_hat = codes @ sae.W_dec + sae.b_dec
        torch.testing.assert_close(nested.decode(whole, prefix=index), x_hat)
        torch.testing.assert_close(nested.decode(nested.encode_sparse(x), prefix=index), x_hat.view(35, 6))
    assert torch.equal(nested.encode(x, prefix=-1), whole)
    with pytest.raises(ss.UserError, match=r"^prefix = 3: indexes one of the prefixes \(3, 8, 20\)$"):
        nested.encode(x, prefix=3)
    with pytest.raises(ss.UserError, match=r"^prefix = 0: this SAE has no Matryoshka prefixes$"):
        sae.decode(whole, prefix=0)
    with pytest.raises(ss.UserError, match=r"^prefixes = \(3, 8\): must be ascending widths that end with d_sae = 20$"):
        replace(sae.cfg, prefixes=(3, 8))


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


def test_a_device_that_is_not_there_is_one_line(sae, tmp_path):
    sae.save(tmp_path / "sae")
    for device in ("cuda:99", "gpu"):
        with pytest.raises(ss.UserError, match=rf"^device = '{device}': cannot be used \(.*\)$"):
            SAE.load(tmp_path / "sae", device)


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
    sae = ss.train(x, ss.batchtopk(32, 3), steps=20, batch_size=32, heldout=x, device="cpu", progress=False)
    found = sae.cfg.metadata["training"]["heldout"]
    error = (x - sae(x)).square().sum() / (x - x.mean(0)).square().sum()
    assert found["fvu"] == pytest.approx(float(error.detach()), rel=1e-5)
    assert found["l0"] == pytest.approx(3)
    same = by_threshold(sae, x[:1].expand(5, -1))
    assert same.fvu is None and math.isnan(same.fve)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [0.5, -1.0, None])
@torch.no_grad()
def test_encode_is_relu_and_threshold_in_every_dtype(sae, dtype, cut):
    sae = sae.to(dtype)
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    # None: each latent has a threshold of its own.
    sae.threshold = torch.rand(20) if cut is None else torch.tensor(cut)
    z = torch.relu((x - sae.b_dec) @ sae.W_enc + sae.b_enc)
    found = sae.encode(x)
    assert found.dtype == dtype
    near = 0.1 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, z * (z > sae.threshold), rtol=near, atol=near)
    assert 0 < (found > 0).double().mean() < 1


def test_pre_activations_are_the_affine_map(sae):
    x, latents = torch.randn(2, 5, 6), torch.tensor([7, 3])
    truth = (x - sae.b_dec) @ sae.W_enc + sae.b_enc
    assert (truth < 0).any()
    torch.testing.assert_close(sae.pre_activations(x), truth)
    torch.testing.assert_close(sae.pre_activations(x, latents), truth[..., latents])
    bare = SAE(replace(sae.cfg, apply_b_dec_to_input=False))
    bare.load_state_dict(sae.state_dict())
    sae.threshold = torch.rand(20)
    bare.load_state_dict(sae.state_dict())
    assert torch.equal(bare.threshold, sae.threshold)
    torch.testing.assert_close(bare.pre_activations(x), x @ sae.W_enc + sae.b_enc)


@pytest.mark.parametrize("per_latent", [False, True])
@pytest.mark.parametrize("max_values", [1, 100, 2**26])
@torch.no_grad()
def test_sparse_codes_are_the_dense_ones(sae, per_latent, max_values):
    x, latents = torch.randn(3, 11, 6), torch.tensor([17, 3, 8])
    if per_latent:
        sae.threshold = torch.rand(20)
    dense, found = sae.encode(x), sae.encode_sparse(x, max_values=max_values)
    torch.testing.assert_close(found.dense().view_as(dense), dense)
    assert (found.tokens, found.d_sae) == (33, 20)
    flat = found.token * 20 + found.latent
    assert torch.equal(flat, flat.unique())
    torch.testing.assert_close(sae.decode(found).view_as(x), sae.decode(dense))
    some = sae.encode_sparse(x, latents, max_values=max_values).dense().view_as(dense)
    torch.testing.assert_close(some[..., latents], dense[..., latents])
    assert some.count_nonzero() == dense[..., latents].count_nonzero()
    assert len(sae.encode_sparse(x[:0]).value) == 0
    with pytest.raises(ss.UserError, match="codes have 19 latents: this SAE has 20"):
        sae.decode(found._replace(d_sae=19))


def test_arrays_and_tensors_with_gradients_are_encoded(sae):
    x = torch.randn(9, 6, requires_grad=True)
    codes = sae.encode(x)
    codes.sum().backward()
    torch.testing.assert_close(x.grad, (codes > 0).float() @ sae.W_enc.T.detach())
    array = x.detach().double().numpy()
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(sae.encode(array), codes)
    assert not sae.encode_sparse(x).value.requires_grad


def test_a_changed_threshold_is_used_at_once(sae):
    x = torch.randn(40, 6)

    def counts(model: SAE) -> int:
        return int(model.encode(x).count_nonzero())

    before = counts(sae)
    other = copy.deepcopy(sae)
    sae.threshold.fill_(1e9)
    assert counts(sae) == 0 and counts(other) == before
    other.threshold.fill_(1e9)
    assert counts(other) == 0
    with torch.inference_mode():
        other.threshold.fill_(0.7)
        moved = SAE(other.cfg).to(torch.float64)
        moved.load_state_dict(other.state_dict())
        assert counts(moved) == before
        moved.threshold.fill_(1e9)
        assert counts(moved) == 0
    assert counts(other) == before
    other.load_state_dict(sae.state_dict())
    assert counts(other) == 0
    other.threshold = torch.tensor(0.7)
    assert counts(other) == before
    other.threshold.mul_(1e9)
    assert counts(other) == 0


def test_the_encoder_is_stored_latent_by_latent(sae, tmp_path):
    fresh = SAE(sae.cfg)
    fresh.load_state_dict(sae.state_dict())
    assert set(sae.state_dict()) == {"W_enc", "b_enc", "W_dec", "b_dec", "threshold", "threshold_ema"}
    for one in (sae, copy.deepcopy(sae), fresh, sae.to(torch.bfloat16).to(torch.float32), SAE.load(sae.save(tmp_path))):
        assert one.W_enc.shape == (6, 20) and one.W_enc.T.is_contiguous()
