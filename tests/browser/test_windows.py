"""Which contexts are shown, against a plain search."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sampled_sae.browser.latents import TOP, largest_of_groups, largest_of_runs, mixed, pick_windows, starts_of_runs
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


# ---- choices within groups, against plain loops ----

pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=30)


@given(pairs)
def test_runs(found):
    found = sorted(found, key=lambda pair: pair[0])
    group, key = (
        (torch.tensor(side, dtype=torch.int64) for side in zip(*found, strict=True))
        if found
        else [torch.zeros(0, dtype=torch.int64)] * 2
    )
    starts = starts_of_runs(group)
    numbers = sorted(set(group.tolist()))
    assert starts.tolist() == [group.tolist().index(number) for number in numbers]
    best = [max((i for i, pair in enumerate(found) if pair[0] == n), key=lambda i: (found[i][1], -i)) for n in numbers]
    assert largest_of_runs(starts, key).tolist() == best
    assert largest_of_runs(starts, key.float()).tolist() == best


@given(pairs, st.integers(0, 4))
def test_groups(found, count):
    group, key = (torch.tensor([pair[side] for pair in found], dtype=torch.int64) for side in (0, 1))
    expected = []
    for number in sorted({pair[0] for pair in found}):
        own = [i for i, pair in enumerate(found) if pair[0] == number]
        expected += sorted(own, key=lambda i: (-found[i][1], i))[:count]
    assert largest_of_groups(group, key, count).tolist() == expected


def splitmix(state: int) -> int:
    """The published generator's step in Python's whole numbers."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**40))
def test_mixed_is_splitmix(seed, a, b):
    expected = splitmix(splitmix(seed % 2**64 ^ a) ^ b)
    assert int(mixed(seed, torch.tensor([a]), torch.tensor([b]))) % 2**64 == expected


def test_mixed_is_even():
    lot = mixed(0, torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64))
    assert len(lot.unique()) == 100_000
    assert abs(float((lot > 0).double().mean()) - 0.5) < 0.01
