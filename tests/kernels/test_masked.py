import torch

from sampled_sae.kernels.masked import counts, mask_

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_gradients_stay_only_where_values_were_kept():
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(70, 300, generator=generator).relu().bfloat16().to(DEVICE)
    g = torch.randn(70, 300, generator=generator).bfloat16().to(DEVICE)
    wanted = torch.where(f > 0, g, 0)
    sums = mask_(g, f)
    assert torch.equal(g, wanted)
    torch.testing.assert_close(sums.sum(0), wanted.float().sum(0), atol=1e-4, rtol=1e-4)
    assert torch.equal(counts(f), (f > 0).float().sum(0))
