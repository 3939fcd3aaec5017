"""Which contexts are shown, against a plain search."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sampled_sae.browser.windows import TOP, pick_windows
from sampled_sae.evals.reading import Firings
from sampled_sae.method.codes import SparseCodes
from tests.browser.made_up import made_up_firings


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.floats(0.2, 6))
def test_against_a_plain_search(seed, top, bands, each, k):
    firings = made_up_firings(9, 11, 8, k, seed)
    dense = torch.zeros(9, 11, 8)
    flat = torch.stack((firings.latent.long(), firings.position.long() // 8, firings.position.long() % 8))
    dense[tuple(flat)] = firings.value
    windows = pick_windows(firings, top, bands, each, seed)
    assert windows.latent.tolist() == sorted(windows.latent.tolist())
    for latent in range(9):
        own = [
            [int(column[i]) for column in windows] for i in range(len(windows.latent)) if windows.latent[i] == latent
        ]
        shown = [int(firings.position[center]) // 8 for _, _, center, _, _ in own]
        assert len(set(shown)) == len(shown), "a context is shown once"
        for (_, band, center, first, last), context in zip(own, shown, strict=True):
            there = firings.position[first:last].long()
            assert (there // 8 == context).all() and (firings.latent[first:last] == latent).all()
            assert last - first == int((dense[latent, context] > 0).sum()) and first <= center < last
            if band != TOP:
                value, most = float(firings.value[center]), float(dense[latent].max())
                assert band / bands - 1e-6 <= value / most <= (band + 1) / bands + 1e-6
        best = [row for row in own if row[1] == TOP]
        peaks = dense[latent].amax(1)
        expected = peaks[peaks > 0].sort(descending=True).values[:top]
        assert [float(firings.value[row[2]]) for row in best] == expected.tolist()
        drawn = [row[1] for row in own if row[1] != TOP]
        assert own == [*best, *(row for row in own if row[1] != TOP)] and drawn == sorted(drawn, reverse=True)
        assert all(drawn.count(band) <= each for band in range(bands))
        left = int((peaks > 0).sum()) - len(best)
        assert len(drawn) == left if left <= each else len(drawn) >= each


def test_draws_are_fair_and_of_the_seed():
    """Of 40 equal contexts beside a top one, each is drawn about as often."""
    place = torch.arange(41) * 4
    value = torch.ones(41)
    value[0] = 10.0
    firings = Firings.sort(SparseCodes(place, torch.zeros(41), value, 164, 1), (41, 4))
    counts = torch.zeros(41)
    for seed in range(400):
        windows = pick_windows(firings, 1, 5, 4, seed)
        assert windows.band.tolist() == [TOP, 0, 0, 0, 0]
        counts[windows.center] += 1
    assert counts[0] == 400
    assert counts[1:].min() >= 20 and counts[1:].max() <= 62
    again = pick_windows(firings, 1, 5, 4, 399)
    assert all(torch.equal(a, b) for a, b in zip(again, windows, strict=True))


@pytest.mark.parametrize("top", [1, 5])
def test_a_latent_with_one_firing(top):
    firings = Firings.sort(SparseCodes(*(torch.tensor([v]) for v in (5, 2, 1.5)), 8, 4), (2, 4))
    assert [column.tolist() for column in pick_windows(firings, top, 5, 3)] == [[2], [TOP], [0], [0], [1]]
