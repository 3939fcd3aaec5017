"""Latents that fire together, against dense matrices."""

import pytest
import torch

from sampled_sae.browser import latents as together
from sampled_sae.browser.collect import neighbors
from sampled_sae.browser.latents import LEAST, NONE, coactivating, counterparts, inside_contexts, token_latents
from tests.browser.made_up import SILENT, made_up_firings

M, N, L = 40, 30, 16


def dense(firings) -> torch.Tensor:
    """[tokens, m]"""
    return torch.stack([firings.dense(latent).flatten() for latent in range(firings.d_sae)], 1)


@pytest.mark.parametrize("at_once", [1, 2**24])
def test_coactivating_latents_are_the_most_correlated(at_once, monkeypatch):
    monkeypatch.setattr(together, "PAIRS_AT_ONCE", at_once)
    firings = made_up_firings(M, N, L, k=8)
    fires = (dense(firings) > 0).double()
    both = fires.T @ fires
    phi = torch.corrcoef(fires.T).nan_to_num(-1.0)
    phi[both < LEAST] = -1
    phi.fill_diagonal_(-1)
    ticks: list[int] = []
    found = coactivating(firings, N * L, 3, ticks.append)
    assert sum(ticks) == M and (len(ticks) == M if at_once == 1 else len(ticks) == 1)
    right = phi.topk(3, dim=1)
    there = right.values > 0
    assert there.any() and not there.all()
    assert torch.equal(found.latent != NONE, there)
    torch.testing.assert_close(found.correlation[there], right.values[there].float())
    assert torch.equal(found.tokens[there].double(), both.gather(1, found.latent.clamp_min(0))[there])
    assert (found.latent[SILENT] == NONE).all() and found.correlation[SILENT].isnan().all()
    assert coactivating(firings, N * L, 0).latent.shape == (M, 0)


def test_latents_of_each_token():
    firings = made_up_firings(M, N, L, k=3)
    found = token_latents(firings, 4, 2)
    right = dense(firings)[: 4 * L].topk(2, dim=1)
    torch.testing.assert_close(found.value.view(-1, 2), right.values)
    there = right.values > 0
    assert torch.equal(found.latent.view(-1, 2)[there], right.indices[there])
    assert (found.latent.view(-1, 2)[~there] == NONE).all()
    assert token_latents(firings, 1000, 2).latent.shape == (N, L, 2)


def test_two_saes_on_the_same_text():
    own, other = made_up_firings(M, N, L, k=6), made_up_firings(M + 5, N, L, k=6, seed=1)
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(m, 8, generator=generator) for m in (M, M + 5))
    nearest = neighbors(first, second, 1).latent[:, 0]
    nearest[3] = NONE
    found = counterparts(own, other, nearest, 4)
    a, b = dense(own) > 0, dense(other) > 0
    right = [int((a[:, i] & b[:, j]).sum()) if j >= 0 else 0 for i, j in enumerate(nearest.tolist())]
    assert found.both.tolist() == right and sum(right) > 0
    latent, context = torch.tensor([nearest[0], NONE, nearest[5]]), torch.tensor([2, 2, N - 1])
    first, end = inside_contexts(other, latent, context)
    for i in (0, 2):
        place, value = other.position[first[i] : end[i]].long(), other.value[first[i] : end[i]]
        row = other.dense(int(latent[i]))[context[i]]
        assert torch.equal(place % L, row.nonzero().squeeze(1)) and torch.equal(value, row[row > 0])
    assert first[1] == end[1]
