"""Dictionaries of low coherence: the bounds they keep and the exact values of the unbiased bases."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sampled_sae.data import frames
from sampled_sae.data.frames import (
    coherence,
    descend,
    kerdock_form,
    low_coherence,
    max_bases,
    unbiased_bases,
)
from sampled_sae.utils.errors import UserError

ROUNDING = 2e-6


def welch_bound(d: int, k: int) -> float:
    """The coherence that no set of k unit rows in d dimensions can go below."""
    return math.sqrt((k - d) / (d * (k - 1))) if k > d else 0.0


def rank_gf2(matrix: Tensor) -> int:
    """Rank over GF(2), by elimination on rows held as integers."""
    rows = [int("".join(str(bit) for bit in row), 2) for row in matrix.tolist()]
    rank = 0
    while rows:
        pivot = rows.pop()
        if pivot:
            rank += 1
            low = pivot & -pivot
            rows = [row ^ pivot if row & low else row for row in rows]
    return rank


@given(d=st.integers(2, 12), k=st.integers(1, 30), seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_rows_are_unit_and_keep_the_welch_bound(d: int, k: int, seed: int) -> None:
    rows = low_coherence(d, k, seed)
    assert rows.shape == (k, d) and rows.dtype == torch.float32
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(k), atol=1e-5, rtol=0)
    assert welch_bound(d, k) - ROUNDING <= coherence(rows) <= 1 + ROUNDING


@given(k=st.integers(1, 40), extra=st.integers(0, 10), seed=st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_few_rows_are_orthonormal(k: int, extra: int, seed: int) -> None:
    rows = low_coherence(max(2, k + extra), k, seed)
    torch.testing.assert_close(rows @ rows.T, torch.eye(k), atol=1e-5, rtol=0)


@pytest.mark.parametrize("d", [4, 16, 64])
def test_all_bases_are_mutually_unbiased(d: int) -> None:
    rows = unbiased_bases(d, max_bases(d))
    bases = rows.reshape(d // 2 + 1, d, d)
    torch.testing.assert_close(bases @ bases.mT, torch.eye(d).expand_as(bases), atol=ROUNDING, rtol=0)
    across = (rows @ rows.T).abs().reshape(d // 2 + 1, d, d // 2 + 1, d)
    for i in range(d // 2 + 1):
        others = [j for j in range(d // 2 + 1) if j != i]
        assert (across[i][:, others] - d**-0.5).abs().max() < ROUNDING


@pytest.mark.parametrize(("d", "k"), [(16, 17), (64, 256), (64, 33 * 64), (256, 1024), (256, 2000), (1024, 3000)])
def test_bases_reach_exactly_one_over_root_d(d: int, k: int) -> None:
    assert coherence(low_coherence(d, k, seed=3)) == pytest.approx(d**-0.5, abs=ROUNDING)


@given(m=st.sampled_from([3, 5, 7, 9, 11, 13]), data=st.data())
@settings(max_examples=40, deadline=None)
def test_sums_of_two_kerdock_forms_have_full_rank(m: int, data: st.DataObject) -> None:
    a = data.draw(st.integers(0, 2**m - 1))
    b = data.draw(st.integers(0, 2**m - 1).filter(lambda other: other != a))
    form = kerdock_form(a, m + 1)
    assert torch.equal(form, form.T) and not form.diagonal().any()
    assert rank_gf2((form + kerdock_form(b, m + 1)) % 2) == m + 1


def test_the_paper_size_is_fast_and_below_its_coherence() -> None:
    start = time.perf_counter()
    rows = low_coherence(256, 1024)
    assert time.perf_counter() - start < 10
    assert coherence(rows) <= 0.0833


def test_bases_are_rotated_off_the_axes() -> None:
    # An identity basis left in place would have entries of 1.
    assert low_coherence(256, 1024).abs().max() < 0.5


@pytest.mark.parametrize(("d", "k"), [(30, 60), (50, 200), (64, 128)])
def test_descent_comes_near_the_welch_bound(d: int, k: int) -> None:
    start = torch.randn(k, d, generator=torch.Generator().manual_seed(0))
    reached = coherence(descend(d, k))
    assert reached < 1.3 * welch_bound(d, k) < coherence(start)


@pytest.mark.parametrize(("d", "k"), [(2, 3), (3, 6), (7, 28)])
def test_descent_finds_known_optimal_sets(d: int, k: int) -> None:
    # Equiangular sets exist for these sizes, and they meet the Welch bound.
    assert coherence(descend(d, k)) == pytest.approx(welch_bound(d, k), abs=2e-3)


@pytest.mark.parametrize(("d", "k"), [(8, 5), (16, 40), (12, 30)])
def test_seed_decides_the_rows(d: int, k: int) -> None:
    assert torch.equal(low_coherence(d, k, 1), low_coherence(d, k, 1))
    assert not torch.allclose(low_coherence(d, k, 1), low_coherence(d, k, 2), atol=1e-3)


@pytest.mark.parametrize("block_entries", [1, 70, 10**6])
def test_blocks_do_not_change_the_result(block_entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(33, 9, generator=torch.Generator().manual_seed(0)) * 5
    unit = rows / rows.norm(dim=1, keepdim=True)
    cosine = (unit @ unit.T).abs() - torch.eye(33)
    before = descend(5, 12)
    monkeypatch.setattr(frames, "_BLOCK_ENTRIES", block_entries)
    assert coherence(rows) == pytest.approx(cosine.max().item(), abs=ROUNDING)
    push, largest = frames._push(unit, power=4, scale=1.0)
    gram = cosine * (unit @ unit.T).sign()
    expected = gram**3 @ unit
    expected -= (expected * unit).sum(dim=1, keepdim=True) * unit
    torch.testing.assert_close(push, expected, atol=1e-5, rtol=1e-4)
    assert largest == pytest.approx(cosine.max().item(), abs=ROUNDING)
    assert coherence(descend(5, 12)) == pytest.approx(coherence(before), abs=0.05)


def test_coherence_of_one_row_and_of_opposite_rows() -> None:
    assert coherence(torch.ones(1, 4)) == 0.0
    assert coherence(torch.tensor([[1.0, 2.0], [-2.0, -4.0]])) == pytest.approx(1.0, abs=ROUNDING)


def test_welch_bound_of_the_paper() -> None:
    assert welch_bound(256, 1024) == pytest.approx(0.0541, abs=1e-4)
    assert welch_bound(256, 256) == 0.0
    assert welch_bound(2, 3) == pytest.approx(math.cos(math.pi / 3))


@pytest.mark.parametrize(("d", "bases"), [(2, 0), (4, 3), (8, 0), (16, 9), (100, 0), (256, 129), (1024, 513)])
def test_max_bases(d: int, bases: int) -> None:
    assert max_bases(d) == bases


def test_bad_sizes_name_field_and_value() -> None:
    with pytest.raises(UserError, match=r"d=1: .*at least 2"):
        low_coherence(1, 5)
    with pytest.raises(UserError, match=r"k=0: .*at least 1"):
        low_coherence(8, 0)
    with pytest.raises(UserError, match=r"count=10: R\^16 has 9"):
        unbiased_bases(16, 10)
