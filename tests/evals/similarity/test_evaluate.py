"""MMCS against loops, chance against draws, and what is said where something is missing."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from sampled_sae.evals.results import Liveness
from sampled_sae.evals.similarity.evaluate import compare_saes
from sampled_sae.evals.similarity.matching import best_of_rows, directions, nearest, random_best
from sampled_sae.evals.similarity.members import Member, SimilarityConfig
from sampled_sae.evals.similarity.pair import BINS, compare_pair, dictionary, histogram
from sampled_sae.utils.errors import UserError
from tests.evals.similarity.tools import made, member_of, rows, seeded, slow_best


def one(decoder: torch.Tensor, name: str, live: list[bool] | None = None) -> Member:
    return member_of(made(decoder), name, None if live is None else Liveness(torch.tensor(live), "a test"))


def compare(a: Member, b: Member, **given):
    return compare_pair(dictionary(a), dictionary(b), SimilarityConfig(**given))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@given(
    m=st.integers(1, 12),
    n=st.integers(1, 12),
    d=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    at_once=st.integers(1, 60),
)
@settings(max_examples=50)
def test_mmcs_is_the_mean_of_the_largest_cosines_both_ways(m, n, d, seed, at_once):
    a, b = rows(m, d, seed), rows(n, d, seed + 1)
    found = compare(one(a, "a"), one(b, "b"), at_once=at_once).all
    there, back = slow_best(a, b), slow_best(b, a)
    assert found.a_to_b.mmcs == pytest.approx(mean(there), abs=1e-5)
    assert found.b_to_a.mmcs == pytest.approx(mean(back), abs=1e-5)
    assert found.mean == pytest.approx((mean(there) + mean(back)) / 2, abs=1e-5)
    assert found.a_to_b.shared == pytest.approx(mean([float(x >= 0.7) for x in there]))
    assert (sum(found.a_to_b.histogram), sum(found.b_to_a.histogram)) == (m, n)
    assert (found.a_to_b.latents, found.b_to_a.latents) == (m, n)


@given(seed=st.integers(0, 10**6), at_once=st.integers(1, 200), mask=st.lists(st.booleans(), min_size=20, max_size=20))
@settings(max_examples=50)
def test_live_ones_are_compared_with_live_ones_in_the_same_pass(seed, at_once, mask):
    a, b, alive = rows(9, 4, seed), rows(11, 4, seed + 1), torch.tensor(mask)
    found = compare(one(a, "a", mask[:9]), one(b, "b", mask[9:]), at_once=at_once, matching="none")
    assert found.all.a_to_b.mmcs == pytest.approx(mean(slow_best(a, b)), abs=1e-5)
    assert found.all.b_to_a.mmcs == pytest.approx(mean(slow_best(b, a)), abs=1e-5)
    a, b = a[alive[:9]], b[alive[9:]]
    if not len(a) or not len(b):
        which, m = ("b", 11) if len(a) else ("a", 9)
        assert found.live is None and f"{which}: none of its {m} latents is live" in str(found.live_missing)
        return
    assert found.live is not None and found.live_missing is None
    assert found.live.a_to_b.mmcs == pytest.approx(mean(slow_best(a, b)), abs=1e-5)
    assert found.live.b_to_a.mmcs == pytest.approx(mean(slow_best(b, a)), abs=1e-5)
    assert found.live.a_to_b.random == pytest.approx(random_best(4, len(b)))


def test_order_and_length_of_rows_do_not_matter_but_their_sign_does():
    a = rows(40, 8)
    same = compare(one(a, "a"), one(3 * a[torch.randperm(40)], "b"))
    assert same.all.mean == pytest.approx(1, abs=1e-6) and same.all.mean <= 1
    assert same.matching is not None and same.matching.mean == pytest.approx(1, abs=1e-6)
    assert same.matching.shared == 1 and same.all.a_to_b.histogram[-1] == 40
    a = normalize(torch.eye(4), dim=1)
    opposite = compare(one(a, "a"), one(-a, "b"))
    assert opposite.all.mean == 0, "the best partner of a row is orthogonal, not opposite"


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-13, 1e13, 1e30])
def test_rows_may_be_very_short_or_long(scale):
    a, b = rows(10, 8), rows(12, 8, 1)
    expected = compare(one(a, "a"), one(b, "b")).all
    found = compare(one(a, "a"), one(b * scale, "b"))
    assert found.all.a_to_b.mmcs == pytest.approx(expected.a_to_b.mmcs, abs=1e-5)
    assert found.all.b_to_a.mmcs == pytest.approx(expected.b_to_a.mmcs, abs=1e-5)
    assert directions(b * scale).rows.norm(dim=1).tolist() == pytest.approx([1.0] * 12)


def test_mmcs_is_not_symmetric():
    """A part of a dictionary is found in the whole, and the whole not in the part."""
    whole = torch.eye(8)
    found = compare(one(whole[:2], "part"), one(whole, "whole")).all
    assert (found.a_to_b.mmcs, found.b_to_a.mmcs, found.mean) == (1, 0.25, 0.625)


def test_rows_of_zeros_have_no_direction_and_are_counted():
    a, b = rows(10, 4), rows(8, 4, 1)
    a[3] = b[0] = b[7] = 0
    comparison = compare_saes([one(a, "a"), one(b, "b")])
    found = comparison.pairs[0].compared
    # The first of the given is the reference, and so is b of the pair.
    assert comparison.zeros == {"a": 1, "b": 2} and comparison.plan.reference == "a"
    kept_a, kept_b = a[a.norm(dim=1) > 0], b[b.norm(dim=1) > 0]
    assert found.all.a_to_b.latents == 6 and found.all.b_to_a.latents == 9
    assert found.all.b_to_a.mmcs == pytest.approx(mean(slow_best(kept_a, kept_b)), abs=1e-5)
    assert found.matching is not None and found.matching.pairs == 6


def test_an_sae_of_zeros_alone_gives_no_number():
    found = compare(one(torch.zeros(4, 3), "a"), one(rows(5, 3), "b"))
    assert found.all.mean is None and found.all.a_to_b.mmcs is None and found.all.b_to_a.mmcs is None
    assert found.matching is None and found.matching_missing == "no latent of one of the two has a direction"


def test_liveness_that_is_not_known_is_said_and_everything_else_measured():
    a, b = one(rows(6, 4), "a"), one(rows(6, 4, 1), "b", [True] * 6)
    found = compare(a, b, matching="live")
    assert found.live is None and found.live_missing == "a: not known which latents fire"
    assert found.matching is None and found.matching_missing == found.live_missing
    comparison = compare_saes([a, b])
    assert [tuple(s) for s in comparison.skipped if s.what == "live"] == [("live", "a", "not known which latents fire")]
    assert comparison.pairs[0].compared.all.mean is not None


def test_matching_of_live_latents():
    a, b = torch.eye(4), torch.eye(4)[[1, 0, 3, 2]]
    found = compare(one(a, "a", [True, True, False, False]), one(b, "b", [False, True, True, True]), matching="live")
    assert found.matching is not None and found.matching.pairs == 2
    # a's latent 0 has its equal in b's 1; that of a's latent 1 is dead.
    assert found.matching.mean == pytest.approx(0.5)
    assert compare(one(a, "a"), one(b, "b"), matching="none").matching is None


def test_what_is_not_a_number_is_refused():
    bad = rows(4, 3)
    bad[1, 1] = torch.nan
    with pytest.raises(UserError, match="mine has entries that are nan or infinite"):
        dictionary(one(bad, "mine"))
    with pytest.raises(UserError, match=r"decoder has shape \[4\]"):
        directions(torch.ones(4))


@pytest.mark.parametrize(("d", "n"), [(1, 3), (2, 5), (3, 1), (3, 100), (16, 1), (16, 50), (64, 400), (576, 200)])
def test_chance_is_what_draws_give(d, n):
    generator = torch.Generator().manual_seed(0)
    first = torch.zeros(d)
    first[0] = 1
    best = torch.stack([normalize(torch.randn(n, d, generator=generator), dim=1) @ first for _ in range(600)]).amax(1)
    assert random_best(d, n) == pytest.approx(float(best.mean()), abs=4 * float(best.std()) / 600**0.5 + 1e-4)


def test_chance_is_far_above_zero_and_rises_with_the_number_of_rows():
    found = [random_best(576, n) for n in (1, 4096, 65_536)]
    assert found[0] == pytest.approx(0, abs=1e-9) and found == sorted(found)
    assert 0.17 < found[2] < 0.19
    assert random_best(576, 0) is None
    # On a sphere in three dimensions cosines are even on [-1, 1], and the largest of n has mean (n - 1) / (n + 1).
    assert random_best(3, 9) == pytest.approx(0.8, abs=1e-6)


def test_random_dictionaries_have_the_mmcs_of_chance():
    a, b = normalize(rows(3000, 32), dim=1), normalize(rows(3000, 32, 1), dim=1)
    there, back = nearest(a, b, 2**20)
    assert float(there.mean()) == pytest.approx(random_best(32, 3000), abs=0.005)
    assert float(back.mean()) == pytest.approx(random_best(32, 3000), abs=0.005)


@given(seed=st.integers(0, 10**6), at_once=st.integers(1, 300), count=st.integers(1, 20))
@settings(max_examples=20)
def test_best_of_rows_are_the_first_of_a_sorted_row(seed, at_once, count):
    a, b = normalize(rows(17, 5, seed), dim=1), normalize(rows(13, 5, seed + 1), dim=1)
    prices = torch.rand(13)
    expected = (a @ b.T - prices).sort(dim=1, descending=True)
    values, columns = best_of_rows(a, b, count, at_once, prices)
    assert torch.allclose(values, expected.values[:, :count], atol=1e-6)
    assert torch.equal(columns, expected.indices[:, :count])


def test_histogram_bins():
    counts = histogram(torch.tensor([-1.0, -0.98, 0.0, 0.0199, 0.7, 0.999, 1.0]))
    assert len(counts) == BINS and sum(counts) == 7
    assert [i for i, count in enumerate(counts) for _ in range(count)] == [0, 1, 50, 50, 85, 99, 99]


def test_a_comparison_in_numbers():
    """Two configurations in two seeds: each number against the slow one."""
    saes = {f"{score or 'all'}-{seed}": seeded(seed=seed, score=score) for score in (None, "l2") for seed in (0, 1)}
    seen: list[tuple[int, int]] = []
    comparison = compare_saes(
        [member_of(sae, name) for name, sae in saes.items()], progress=lambda *now: seen.append(now)
    )
    decoder = {name: sae.W_dec.detach() for name, sae in saes.items()}

    def slow(a: str, b: str) -> float:
        return mean(slow_best(decoder[a], decoder[b]))

    assert seen == [(i, 4) for i in range(5)]
    assert [seed.group for seed in comparison.seeds] == ["batchtopk", "sampled:score=l2,l=2"]
    for seeds, name in zip(comparison.seeds, ("all", "l2"), strict=True):
        assert seeds.mmcs is not None and seeds.mmcs.pairs == 1 and seeds.mmcs.sd is None
        expected = (slow(f"{name}-0", f"{name}-1") + slow(f"{name}-1", f"{name}-0")) / 2
        assert seeds.mmcs.mean == pytest.approx(expected, abs=1e-5)
        assert seeds.random == pytest.approx(random_best(6, 12))
    table = comparison.scores["all"]
    assert table.groups == ["batchtopk", "sampled:score=l2,l=2"] and table.pairs == [[1, 2], [2, 1]]
    expected = [[(a, b) for b in ("all", "l2")] for a in ("all", "l2")]
    for row, names in zip(table.mmcs, expected, strict=True):
        for value, (a, b) in zip(row, names, strict=True):
            pairs = [(0, 0), (1, 1)] if a != b else [(0, 1), (1, 0)]
            assert value == pytest.approx(mean([slow(f"{a}-{i}", f"{b}-{j}") for i, j in pairs]), abs=1e-5)
    assert comparison.plan.reference == "batchtopk"
    plain = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert len(plain["pairs"]) == 4 and plain["settings"]["threshold"] == 0.7
    assert {pair["b"] for pair in plain["pairs"] if pair["kind"] == "scores"} == {"all-0", "all-1"}


def test_dictionaries_of_different_sizes():
    found = compare(one(rows(5, 4), "a"), one(rows(30, 4, 1), "b"))
    assert found.matching is not None and found.matching.pairs == 5
    assert found.all.a_to_b.random == pytest.approx(random_best(4, 30))
    assert found.all.b_to_a.random == pytest.approx(random_best(4, 5))


def test_weights_in_16_bits():
    sae = made(rows(6, 4)).bfloat16()
    found = compare(member_of(sae, "a"), member_of(sae, "b"))
    assert found.all.mean == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"across": "some"}, "across = 'some': must be 'all', 'reference' or 'none'"),
        ({"seeds": "all"}, "seeds = 'all': must be 'same' or 'different'"),
        ({"matching": "dead"}, "matching = 'dead': must be 'all', 'live' or 'none'"),
        ({"threshold": 1.5}, "threshold = 1.5: must be a cosine between -1 and 1"),
        ({"threshold": "x"}, "threshold = 'x': must be a number"),
        ({"tolerance": -1}, "tolerance = -1.0: must not be negative"),
        ({"exact_up_to": -1}, "exact_up_to = -1: must not be negative"),
        ({"unique": -1}, "unique = -1: must not be negative"),
        ({"candidates": 1.5}, "candidates = 1.5: must be a whole number"),
        *(({name: 0}, f"{name} = 0: must be at least 1") for name in ("candidates", "rounds", "at_once")),
    ],
)
def test_bad_settings(given, line):
    with pytest.raises(UserError, match=line):
        SimilarityConfig(**given)
