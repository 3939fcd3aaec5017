"""Matching learned to true features: what must not matter, what must, and the degenerate cases."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sampled_sae.data.frames import low_coherence
from sampled_sae.evals.similarity.matching import Matching, activation_fidelity, bucket_recovery, match

NAMES = ("a", "b", "c")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(k=st.integers(1, 20), extra=st.integers(0, 20), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_order_sign_and_length_of_learned_rows_do_not_matter(k: int, extra: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(k, 8, generator=generator)
    learned = torch.randn(k + extra, 8, generator=generator)
    before = match(learned, true)
    order = torch.randperm(k + extra, generator=generator)
    factor = torch.rand(k + extra, 1, generator=generator) + 0.5
    factor *= torch.randint(2, factor.shape, generator=generator) * 2 - 1
    after = match((learned * factor)[order], true)
    torch.testing.assert_close(after.similarity, before.similarity)
    assert torch.equal(order[after.latent], before.latent)
    bucket = torch.arange(k) % 3
    for threshold in (0.3, 0.7):
        expected = bucket_recovery(before.similarity, bucket, NAMES, threshold)
        assert bucket_recovery(after.similarity, bucket, NAMES, threshold) == expected


@given(k=st.integers(1, 5), m=st.integers(1, 5), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_total_similarity_is_the_largest_possible(k: int, m: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    true, learned = torch.randn(k, 3, generator=generator), torch.randn(m, 3, generator=generator)
    cosine = torch.cosine_similarity(true[:, None], learned[None], dim=2).abs()
    if k > m:
        cosine = cosine.T
    rows, columns = cosine.shape
    best = max(sum(cosine[i, j].item() for i, j in enumerate(p)) for p in itertools.permutations(range(columns), rows))
    found = match(learned, true)
    assert found.similarity.sum().item() == pytest.approx(best, abs=1e-5)
    taken = found.latent[found.latent >= 0]
    assert len(taken) == min(k, m) == len(taken.unique())


def test_perfect_dictionary_recovers_all_and_a_wrong_one_nothing() -> None:
    rows = low_coherence(64, 64)
    true, elsewhere = rows[:30], rows[30:]
    bucket = torch.arange(30) % 3
    noisy = torch.cat([elsewhere, -2 * true + 0.02 * randn(30, 64)])
    assert bucket_recovery(match(noisy, true).similarity, bucket, NAMES) == dict.fromkeys(NAMES, 1.0)
    assert torch.equal(match(noisy, true).latent, torch.arange(34, 64))
    assert bucket_recovery(match(elsewhere, true).similarity, bucket, NAMES) == dict.fromkeys(NAMES, 0.0)


def test_fewer_latents_than_features() -> None:
    true = torch.eye(5)
    found = match(torch.stack([true[3], -true[1]]), true)
    assert found.latent.tolist() == [-1, 1, -1, 0, -1]
    assert found.similarity.tolist() == [0, 1, 0, 1, 0]


def test_one_latent_cannot_stand_for_two_features() -> None:
    both = torch.tensor([[1.0, 1.0, 0.0]])
    found = match(both.expand(1, 3), torch.eye(3))
    assert (found.latent >= 0).sum() == 1
    assert found.similarity.max().item() == pytest.approx(0.5**0.5)


def test_dead_rows_count_as_no_similarity() -> None:
    assert match(torch.zeros(4, 3), torch.eye(3)).similarity.tolist() == [0, 0, 0]


def test_recovery_by_bucket() -> None:
    similarity = torch.tensor([0.9, 0.69, 0.75, 0.1, 0.5])
    shares = bucket_recovery(similarity, torch.tensor([0, 0, 0, 2, 2]), NAMES)
    assert shares == {"a": pytest.approx(2 / 3), "b": None, "c": 0.0}
    assert bucket_recovery(similarity, torch.tensor([0, 0, 0, 2, 2]), NAMES, threshold=0.5)["c"] == 0.5


@given(k=st.integers(3, 20), scale=st.floats(0.1, 0.9), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_fidelity_does_not_see_a_common_factor(k: int, scale: float, seed: int) -> None:
    true = torch.rand(k, generator=torch.Generator().manual_seed(seed))
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    learned = torch.empty(k)
    learned[order] = scale * true
    matching = Matching(order, torch.ones(k))
    assert activation_fidelity(learned, true, matching) == pytest.approx(1.0, abs=1e-4)
    assert activation_fidelity(1 - learned, true, matching) == pytest.approx(-1.0, abs=1e-4)


def test_fidelity_leaves_out_unmatched_features() -> None:
    matching = Matching(torch.tensor([2, 0, 1, -1]), torch.tensor([0.9, 0.8, 0.2, 0.0]))
    learned, true = torch.tensor([0.2, 0.9, 0.1]), torch.tensor([0.1, 0.2, 0.0, 0.5])
    # By hand: (.1, .1), (.2, .2), (.9, .0).
    expected = torch.corrcoef(torch.tensor([[0.1, 0.2, 0.9], [0.1, 0.2, 0.0]]))[0, 1].item()
    assert expected < 0
    assert activation_fidelity(learned, true, matching) == pytest.approx(expected, abs=1e-5)


def test_fidelity_is_none_where_undefined() -> None:
    matching = Matching(torch.arange(3), torch.ones(3))
    varied, constant = torch.tensor([0.1, 0.2, 0.4]), torch.full((3,), 0.1)
    assert activation_fidelity(constant, varied, matching) is None
    assert activation_fidelity(varied, constant, matching) is None
    assert activation_fidelity(varied[:1], varied[:1], Matching(torch.arange(1), torch.ones(1))) is None
