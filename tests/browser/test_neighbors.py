"""Nearest latents against all cosines at once."""

import torch

from sampled_sae.browser.decoder import neighbors
from sampled_sae.browser.windows import NONE


def test_against_all_cosines(monkeypatch):
    monkeypatch.setattr("sampled_sae.browser.decoder.ROWS_AT_ONCE", 100)
    a, b = torch.randn(2, 30, 6, generator=torch.Generator().manual_seed(0))
    a[4], a[11] = 0, a[12]
    cosine = torch.nn.functional.cosine_similarity(a[:, None], a[None], dim=2)
    cosine[:, 4] = -torch.inf
    cosine.fill_diagonal_(-torch.inf)
    own = neighbors(a, None, 3)
    rows = [row for row in range(30) if row != 4]
    # Twins are as near as each other, so that their order is open.
    torch.testing.assert_close(own.cosine[rows], cosine.topk(3).values[rows])
    torch.testing.assert_close(own.cosine[rows], cosine.gather(1, own.latent.clamp_min(0))[rows])
    assert all(len(set(row)) == 3 for row in own.latent[rows].tolist())
    assert own.latent[4].tolist() == [NONE] * 3 and own.cosine[4].isnan().all()
    assert own.latent[11, 0] == 12 and own.latent[12, 0] == 11, "a twin is another latent, not the same"
    there = neighbors(a, b, 3)
    cosine = torch.nn.functional.cosine_similarity(a[:, None], b[None], dim=2)
    assert torch.equal(there.latent[rows], cosine.topk(3).indices[rows])
    torch.testing.assert_close(there.nearest[rows], cosine.amax(1)[rows])


def test_fewer_than_asked_for():
    found = neighbors(torch.eye(3), None, 5)
    assert (found.latent >= 0).sum(1).tolist() == [2, 2, 2] and (found.latent[:, 2:] == NONE).all()
    assert neighbors(torch.eye(3), None, 0).nearest.isnan().all()
    assert neighbors(torch.eye(3), torch.zeros(2, 3), 2).nearest.isnan().all()
