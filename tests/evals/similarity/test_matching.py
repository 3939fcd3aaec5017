"""One-to-one matching: against every permutation, and large against exact."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from sampled_sae.evals.similarity.matching import match_rows
from sampled_sae.evals.similarity.members import SimilarityConfig

SPARSE = SimilarityConfig(exact_up_to=0, candidates=4, rounds=20, tolerance=0)


def unit(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return normalize(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)), dim=1)


def check_partners(found, a, b) -> None:
    """Nobody has two partners, the smaller side has one each, and the cosines are those of the pairs."""
    taken = found.column[found.column >= 0]
    assert found.pairs == len(taken) == len(taken.unique()) == min(len(a), len(b))
    own = found.column >= 0
    assert torch.allclose(found.cosine[own], (a[own] * b[taken]).sum(1), atol=1e-5)
    assert bool(found.cosine[~own].isnan().all())
    assert found.total == pytest.approx(float(found.cosine[own].sum()), abs=1e-4)


@given(m=st.integers(1, 5), n=st.integers(1, 5), seed=st.integers(0, 10**6), exact=st.booleans())
@settings(max_examples=60)
def test_the_total_is_the_largest_of_all_permutations(m, n, seed, exact):
    a, b = unit(m, 3, seed), unit(n, 3, seed + 1)
    cosine = a @ b.T if m <= n else b @ a.T
    rows, columns = cosine.shape
    best = max(sum(float(cosine[i, j]) for i, j in enumerate(p)) for p in itertools.permutations(range(columns), rows))
    found = match_rows(a, b, SimilarityConfig() if exact else SPARSE)
    check_partners(found, a, b)
    assert found.total == pytest.approx(best, abs=1e-5)
    assert found.bound >= best - 1e-5


@given(
    m=st.integers(20, 90), n=st.integers(20, 90), seed=st.integers(0, 10**6), noise=st.sampled_from([0.05, 0.5, 5.0])
)
@settings(max_examples=25)
def test_candidates_find_the_exact_matching_and_prove_it(m, n, seed, noise):
    """Rows that are partly noisy copies of each other, partly alone: what two seeds of an SAE look like."""
    a, other = unit(m, 8, seed), unit(n, 8, seed + 1)
    both = min(m, n) // 2
    other[:both] = normalize(a[:both] + noise * other[:both], dim=1)
    exact, sparse = match_rows(a, other), match_rows(a, other, SPARSE)
    check_partners(sparse, a, other)
    assert (exact.method, sparse.method) == ("exact", "candidates")
    assert exact.gap == 0
    assert sparse.total == pytest.approx(exact.total, abs=1e-4)
    assert sparse.gap < 1e-5


def test_too_few_rounds_are_admitted():
    """One candidate each and no second look: worse than the best, and the bound says by how much at most."""
    a, b = unit(200, 4, 1), unit(200, 4, 2)
    exact = match_rows(a, b)
    hasty = match_rows(a, b, SimilarityConfig(exact_up_to=0, candidates=1, rounds=1, tolerance=0))
    check_partners(hasty, a, b)
    assert hasty.total < exact.total - 1
    assert hasty.total + hasty.gap * 200 >= exact.total


def test_the_bound_is_no_more_than_what_rows_and_columns_can_get():
    a, b = unit(60, 4, 1), unit(90, 4, 2)
    cosine = a @ b.T
    found = match_rows(a, b, SPARSE)
    assert found.bound <= float(cosine.amax(1).sum()) + 1e-4
    assert found.bound <= float(cosine.amax(0).topk(60).values.sum()) + 1e-4


@pytest.mark.parametrize("least", [0, 2000])
def test_many_equal_rows_are_matched_all_the_same(least):
    """All candidates of all rows are the same few; the rest must get partners too."""
    a, b = unit(1, 4).repeat(1500, 1), unit(1, 4).repeat(1500, 1)
    b[:3] *= -1
    found = match_rows(a, b, SimilarityConfig(exact_up_to=least, candidates=2))
    check_partners(found, a, b)
    assert found.total == pytest.approx(1494, abs=0.01)


def test_seen_from_the_other_side():
    a, b = unit(30, 6, 1), unit(50, 6, 2)
    there, back = match_rows(a, b), match_rows(b, a)
    assert torch.equal(back.column[there.column], torch.arange(30))
    assert back.total == pytest.approx(there.total, abs=1e-5)


def test_a_side_without_rows():
    found = match_rows(unit(3, 4), unit(0, 4))
    assert found.column.tolist() == [-1] * 3 and found.pairs == 0 and found.gap == 0
