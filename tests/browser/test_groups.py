"""Choices within groups against plain loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sampled_sae.browser.windows import largest_of_groups, largest_of_runs, mixed, starts_of_runs

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
