import torch

from sampled_sae.method.parameters import geometric_median, start_parameters


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
