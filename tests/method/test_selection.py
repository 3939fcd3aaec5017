import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sampled_sae.method import selection as select
from sampled_sae.method.selection import largest, largest_of_rows
from tests import reference

few_values = hnp.arrays(np.float32, st.tuples(st.integers(1, 8), st.integers(1, 9)), elements=st.integers(0, 5))


def stable_largest(flat: torch.Tensor, keep: int) -> list[int]:
    order = flat.sort(descending=True, stable=True).indices[:keep]
    return sorted(i for i in order.tolist() if flat[i] > 0)


@given(few_values, st.data())
def test_largest_is_the_stable_sorts_choice(z, data):
    z = torch.from_numpy(z)
    keep = data.draw(st.integers(1, z.numel()))
    assert largest(z, keep).tolist() == stable_largest(z.reshape(-1), keep)


@given(few_values, st.data())
def test_rows_each_get_their_own_cut(z, data):
    z = torch.from_numpy(z)
    keep = data.draw(st.integers(1, z.shape[1]))
    expected = [i + row * z.shape[1] for row, part in enumerate(z) for i in stable_largest(part, keep)]
    assert largest_of_rows(z, keep).tolist() == expected


@pytest.mark.parametrize("kind", ["normal", "heavy", "sorted", "few positive", "one column", "ties"])
def test_the_guessed_floor_never_changes_the_result(kind, monkeypatch):
    monkeypatch.setattr(select, "SAMPLE", 64)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(64, 96, generator=generator).relu()
    if kind == "heavy":
        z = (4 * torch.randn(64, 96, generator=generator)).exp()
    elif kind == "sorted":
        z = z.view(-1).sort().values.view(64, 96)
    elif kind == "few positive":
        z = torch.where(torch.rand(64, 96, generator=generator) < 0.01, z, 0)
    elif kind == "one column":
        z[:, 1:] = 0
    elif kind == "ties":
        z = z.mul(2).round()
    for keep in (1, 10, 500, 5000):
        assert largest(z, keep).tolist() == stable_largest(z.reshape(-1), keep)


def test_reference_keeps_k_times_group_inside_the_pool():
    z = torch.rand(6, 5)
    pool = torch.tensor([[True, True, False, False, False], [False, False, True, True, True]])
    kept = reference.batch_topk(z, 2, group=3, pool=pool)
    assert (kept[:3, 2:] == 0).all()
    assert (kept[3:, :2] == 0).all()
    assert (kept > 0).view(2, -1).sum(1).tolist() == [6, 6]
