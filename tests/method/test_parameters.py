from functools import partial

import pytest
import torch

from sampled_sae.method import parameters
from sampled_sae.method.latents import WHOLE, Shard
from sampled_sae.method.parameters import covariance, fit_to_batch_, geometric_median, quarter_power, start_parameters
from sampled_sae.utils.ranks import Group


def test_start_values_are_unit_rows_and_tied():
    weights = start_parameters(12, 50, torch.Generator().manual_seed(0), torch.float32)
    torch.testing.assert_close(weights.W_dec.norm(dim=1), torch.ones(50))
    assert torch.equal(weights.W_enc, weights.W_dec)
    assert not weights.b_enc.any()
    assert weights.W_enc.data_ptr() != weights.W_dec.data_ptr()


def test_geometric_median_is_where_the_directions_cancel():
    x = torch.randn(500, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 3
    x[:5] += 1e4  # the mean would move far
    g = geometric_median(x, rounds=1000, tolerance=1e-10)
    pull = ((x - g) / (x - g).norm(dim=1, keepdim=True)).sum(0)
    assert pull.norm() < 1e-5
    assert (g - 3).norm() < 0.5


def test_geometric_median_on_top_of_a_point_does_not_divide_by_zero():
    x = torch.cat([torch.zeros(9, 3), torch.ones(9, 3), -torch.ones(9, 3)])
    assert torch.isfinite(geometric_median(x)).all()


def test_random_directions_stay_as_they_are_while_b_dec_follows_the_batch():
    generator = torch.Generator().manual_seed(0)
    weights = start_parameters(6, 20, generator, torch.float32, encoder_scale=0.5)
    torch.testing.assert_close(weights.W_enc, 0.5 * weights.W_dec)
    before, state = weights.W_dec.clone(), generator.get_state()
    x = torch.randn(300, 6) + 2
    fit_to_batch_(weights, x, "random", 0.5, generator)
    assert torch.equal(weights.W_dec, before) and torch.equal(generator.get_state(), state)
    assert torch.equal(weights.b_dec, geometric_median(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_directions_by_covariance_have_the_second_moment_of_its_root(dtype):
    """Rows before they are scaled to norm 1 would have the covariance C^(1/2): checked by its eigenvectors."""
    m, d = 40_000, 4
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(d, d, generator=generator))[0]
    spread = torch.tensor([27.0, 9.0, 3.0, 1.0])
    x = (torch.randn(20_000, d, generator=generator) * spread) @ axes.T + 5
    weights = start_parameters(d, m, generator, dtype, encoder_scale=0.5)
    fit_to_batch_(weights, x.to(dtype), "covariance", 0.5, generator)
    torch.testing.assert_close(weights.W_dec.float().norm(dim=1), torch.ones(m), atol=0.05, rtol=0)
    torch.testing.assert_close(weights.W_enc, weights.W_dec * 0.5)
    root = torch.randn(m, d, generator=generator) * spread.sqrt()
    wanted = (root / root.norm(dim=1, keepdim=True)).square().mean(0)
    found = (weights.W_dec.float() @ axes).square().mean(0)
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0)


def test_a_quarter_power_is_the_fourth_root_with_a_floor():
    x = torch.randn(500, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    C = covariance(x)
    torch.testing.assert_close(C, torch.cov(x.T, correction=0))
    torch.testing.assert_close(torch.linalg.matrix_power(quarter_power(C), 4), C)
    few = quarter_power(covariance(x[:2]))  # one direction alone has a variance
    values = torch.linalg.eigvalsh(few)
    assert float(values[0] / values[-1]) == pytest.approx((1e-6 / 5) ** 0.25, rel=1e-3)
    same = quarter_power(torch.zeros(3, 3))
    torch.testing.assert_close(same / same[0, 0], torch.eye(3))


@pytest.mark.parametrize(("m", "d"), [(8, 6), (24, 7), (40, 16)])
@pytest.mark.parametrize("decoder", ["random", "covariance"])
def test_ranks_begin_with_their_part_of_the_same_values(decoder, m, d, monkeypatch):
    monkeypatch.setattr(parameters, "DRAWN", 32)  # many draws, of which the last is a small one
    x = torch.randn(50, d, generator=torch.Generator().manual_seed(1))
    made = []
    for shard in (WHOLE, *(Shard(Group(rank, 4)) for rank in range(4))):
        generator = torch.Generator().manual_seed(0)
        weights = start_parameters(d, m, generator, torch.float32, 0.5, shard)
        fit_to_batch_(weights, x, decoder, 0.5, generator, shard)
        made.append((weights, torch.rand(1, generator=generator)))
    whole, after = made[0]
    torch.testing.assert_close(torch.cat([own.W_dec for own, _ in made[1:]]), whole.W_dec)
    torch.testing.assert_close(torch.cat([own.W_enc for own, _ in made[1:]]), whole.W_enc)
    assert all(torch.equal(number, after) for _, number in made)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("draw", ["uniform_", "normal_"])
@pytest.mark.parametrize("number", [2, 3, 8])
def test_a_gpu_draws_the_same_values_in_parts(number, draw):
    rows, d, one = 12_000, 768, torch.Generator("cuda").manual_seed(3)
    whole = getattr(torch.empty(rows, d, device="cuda"), draw)(generator=one)
    after = torch.rand(9, device="cuda", generator=one)
    for index in range(number):
        generator, W = torch.Generator("cuda").manual_seed(3), torch.empty(rows // number, d, device="cuda")
        draw_ = partial(getattr(torch.Tensor, draw), generator=generator)
        parameters.draw_rows_(W, draw_, Shard(Group(index, number)))
        assert torch.equal(W, whole[index * len(W) :][: len(W)])
        assert torch.equal(torch.rand(9, device="cuda", generator=generator), after)
