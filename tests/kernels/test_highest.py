"""The kernel's pool is the plain one, ties and infinities included."""

import pytest
import torch

from sampled_sae.kernels.encoder import highest
from sampled_sae.method.pools import highest as plain

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("m", [1, 7, 3000, 9000])
@pytest.mark.parametrize("kind", ["plain", "ties", "signs", "constant", "infinite"])
def test_pool_is_the_plain_one(m, kind):
    q = torch.rand(m, generator=torch.Generator().manual_seed(m))
    match kind:
        case "ties":
            q = (q * 5).round()
        case "signs":
            q = q - 0.5
        case "constant":
            q = torch.ones(m)
        case "infinite":
            q[q < 0.5] = -torch.inf
    for size in {1, max(1, m // 3), m}:
        pool, members = highest(q.to(DEVICE), size)
        wanted = plain(q[None], size)[0]
        assert torch.equal(pool.cpu(), wanted)
        assert torch.equal(members.cpu(), wanted.nonzero().squeeze(1))
