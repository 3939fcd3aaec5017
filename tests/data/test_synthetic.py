"""Synthetic data: the paper's numbers, the noise level, and draws that depend on nothing but their names."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampled_sae.data.synthetic import BUCKETS, PRESETS, SyntheticConfig, SyntheticData, stream_seed
from sampled_sae.utils.errors import UserError

PAPER_COUNTS = (265, 237, 288, 234)  # features in each bucket, from the paper's table
SMALL = SyntheticConfig(d=16, features=48)


@pytest.fixture(scope="module")
def paper() -> SyntheticData:
    return SyntheticData(PRESETS["l0-61"])


@pytest.fixture(scope="module")
def paper_statistics(paper: SyntheticData) -> dict[str, Any]:
    return paper.statistics()


@pytest.fixture(scope="module")
def small() -> SyntheticData:
    return SyntheticData(SMALL)


def test_expected_l0_of_the_presets() -> None:
    equal = (256, 256, 256, 256)
    assert sum(PAPER_COUNTS) == 1024
    assert PRESETS["l0-61"].expected_l0(PAPER_COUNTS) == pytest.approx(61.5, abs=0.1)
    assert PRESETS["l0-61"].expected_l0(equal) == pytest.approx(65.02, abs=0.01)
    assert PRESETS["p-20"].expected_l0(PAPER_COUNTS) == pytest.approx(105.26, abs=0.01)
    assert PRESETS["p-20"].expected_l0(equal) == pytest.approx(112.64, abs=0.01)


def test_p_high_solves_the_papers_l0() -> None:
    rare, frequent = PAPER_COUNTS[0] + PAPER_COUNTS[2], PAPER_COUNTS[1] + PAPER_COUNTS[3]
    solved = (61.52 - 0.02 * rare) / frequent
    assert round(solved, 3) == PRESETS["l0-61"].p_high


def test_statistics_match_the_papers_table(paper_statistics: dict[str, Any]) -> None:
    assert paper_statistics["coherence"] == pytest.approx(1 / 16, abs=1e-5)
    assert [row["name"] for row in paper_statistics["buckets"]] == list(BUCKETS)
    for row, mean, std in zip(
        paper_statistics["buckets"], [0.80, 0.80, 0.16, 0.16], [0.60, 0.60, 0.12, 0.12], strict=True
    ):
        assert row["features"] == 256
        assert row["mean_activation"] == pytest.approx(mean, rel=0.02)
        assert row["std_activation"] == pytest.approx(std, rel=0.02)
        assert (row["p"] > 0.1) == row["name"].startswith("HF")
        assert (row["sigma"] == 1.0) == row["name"].endswith("HA")


def test_observed_l0_and_noise_are_near_the_expected(paper_statistics: dict[str, Any]) -> None:
    # L0 has standard deviation about 7.6 a sample: .08 for the mean of 10,000.
    assert paper_statistics["expected_l0"] == pytest.approx(65.02, abs=0.01)
    assert paper_statistics["observed_l0"] == pytest.approx(65.02, abs=0.4)
    assert paper_statistics["noise_db"] == pytest.approx(20, abs=0.1)


def test_statistics_are_json_and_count_the_fixed_set(small: SyntheticData) -> None:
    statistics = small.statistics(1500)
    assert json.loads(json.dumps(statistics, allow_nan=False)) == statistics
    chunks = [codes for _, codes in small._fixed_chunks(1500)]
    codes = torch.cat(chunks)
    assert statistics["samples"] == len(codes) == 1500
    assert statistics["observed_l0"] == pytest.approx((codes != 0).sum(dim=1).double().mean().item())
    active = codes[:, small.bucket == 3]
    active = active[active != 0].abs().double()
    assert statistics["buckets"][3]["mean_activation"] == pytest.approx(active.mean().item(), rel=1e-6)
    assert statistics["buckets"][3]["std_activation"] == pytest.approx(active.std(correction=0).item(), rel=1e-5)


def test_statistics_without_noise_or_features_say_none() -> None:
    statistics = SyntheticData(SyntheticConfig(d=4, features=2, noise_db=math.inf)).statistics(100)
    assert statistics["noise_db"] is None
    empty = [row for row in statistics["buckets"] if row["features"] == 0]
    assert len(empty) == 2 and all(row["mean_activation"] is None for row in empty)
    json.dumps(statistics, allow_nan=False)


@pytest.mark.parametrize("coefficients", ["signed", "non_negative"])
@pytest.mark.parametrize("noise_db", [20.0, 5.0])
def test_signal_to_noise_ratio(coefficients: Any, noise_db: float) -> None:
    # p up to .5 makes the mean of non-negative codes, and so the cross terms, large.
    config = replace(SMALL, p_high=0.5, coefficients=coefficients, noise_db=noise_db)
    assert SyntheticData(config).statistics(8000)["noise_db"] == pytest.approx(noise_db, abs=0.2)


def test_codes_have_the_sign_that_was_asked_for(small: SyntheticData) -> None:
    generator = torch.Generator().manual_seed(0)
    signed = small.codes(2000, generator)
    assert 0.45 < (signed > 0).sum() / (signed != 0).sum() < 0.55
    positive = SyntheticData(replace(SMALL, coefficients="non_negative")).codes(2000, generator)
    assert positive.min() == 0 and positive.max() > 1


def test_each_feature_fires_at_its_own_rate_and_size(small: SyntheticData) -> None:
    codes = small.codes(40_000, torch.Generator().manual_seed(0))
    rate = (codes != 0).double().mean(dim=0)
    deviation = (small.p * (1 - small.p) / 40_000).sqrt()
    assert ((rate - small.p).abs() < 5 * deviation).all()
    scale = (codes.square().sum(dim=0) / (codes != 0).sum(dim=0)).sqrt()
    torch.testing.assert_close(scale, small.sigma, rtol=0.15, atol=0)


def test_sample_is_codes_times_dictionary() -> None:
    data = SyntheticData(replace(SMALL, noise_db=math.inf))
    x, codes = data.sample_with_codes(50, torch.Generator().manual_seed(4))
    torch.testing.assert_close(x, codes @ data.dictionary)


def test_equal_buckets_have_equal_shares_in_random_places() -> None:
    data = SyntheticData(replace(SMALL, features=50))
    assert sorted(torch.bincount(data.bucket).tolist()) == [12, 12, 13, 13]
    assert not torch.equal(data.bucket, torch.arange(50) % 4)
    assert not torch.equal(data.bucket, SyntheticData(replace(SMALL, features=50, seed=1)).bucket)


def test_random_buckets_follow_the_binomial() -> None:
    # d >= features skips the dictionary search; only the buckets matter here.
    counts = torch.stack(
        [
            torch.bincount(
                SyntheticData(SyntheticConfig(d=64, features=64, buckets="random", seed=s)).bucket,
                minlength=4,
            )
            for s in range(30)
        ]
    ).double()
    assert (counts.sum(dim=1) == 64).all()
    # Each count is binomial(64, 1/4): mean 16, standard deviation 3.46.
    assert counts.mean(dim=0) == pytest.approx(torch.full((4,), 16.0).numpy(), abs=3)
    assert 2 < counts.std() < 5


@given(index=st.integers(0, 2**30 - 1), size=st.integers(1, 40), other=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_batch_is_pure(index: int, size: int, other: int) -> None:
    data = SyntheticData(SyntheticConfig(d=8, features=8, seed=5))
    first = data.batch(index, size)
    data.batch(other, 3)
    torch.manual_seed(other)
    assert first.shape == (size, 8)
    assert torch.equal(first, SyntheticData(data.config).batch(index, size))


@given(seed=st.integers(0, 2**63 - 1), index=st.integers(0, 10**6), step=st.integers(1, 10**6))
@settings(max_examples=30, deadline=None)
def test_splits_indices_and_seeds_give_other_samples(seed: int, index: int, step: int) -> None:
    data = SyntheticData(SyntheticConfig(d=8, features=8, p_low=0.5, p_high=0.5, seed=seed))
    batch = data.batch(index, 4)
    assert not torch.equal(batch, data.batch(index, 4, split="heldout"))
    assert not torch.equal(batch, data.batch(index + step, 4))
    assert not torch.equal(batch, data.fixed(4))
    assert not torch.equal(batch, SyntheticData(replace(data.config, seed=(seed + step) % 2**63)).batch(index, 4))


@given(seed=st.integers(0, 2**63 - 1))
@settings(max_examples=3, deadline=None)
def test_no_two_pieces_share_the_bits_that_the_cpu_generator_reads(seed: int) -> None:
    # 32 random bits would collide about 4 times here.
    pieces = [stream_seed(seed, stream, i) for stream in ("train", "heldout", "fixed") for i in range(60_000)]
    assert len({piece & 0xFFFFFFFF for piece in pieces}) == len(pieces)
    assert all(0 <= piece < 2**63 for piece in pieces)


@given(small_n=st.integers(1, 1500), large_n=st.integers(1500, 2500))
@settings(max_examples=5, deadline=None)
def test_a_smaller_fixed_set_begins_a_larger_one(small_n: int, large_n: int) -> None:
    data = SyntheticData(SMALL)
    large = data.fixed(large_n)
    assert large.shape == (large_n, 16)
    assert torch.equal(data.fixed(small_n), large[:small_n])
    assert len(large.unique(dim=0)) == large_n


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("d", 1),
        ("features", 0),
        ("p_low", 0.0),
        ("p_high", 1.1),
        ("p_low", math.nan),
        ("sigma_low", 0.0),
        ("sigma_high", math.inf),
        ("buckets", "some"),
        ("coefficients", "positive"),
        ("noise_db", math.nan),
        ("noise_db", -math.inf),
        ("seed", -1),
    ],
)
def test_bad_values_are_named_in_one_line(field: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        SyntheticConfig(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} = {value!r}: must be ") and "\n" not in message


def test_bad_arguments_are_refused(small: SyntheticData) -> None:
    with pytest.raises(UserError, match="split = 'test'"):
        small.batch(0, 4, split="test")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="index = -1"):
        small.batch(-1, 4)
    with pytest.raises(UserError, match="size = 0"):
        small.batch(0, 0)
    with pytest.raises(UserError, match="n = 0"):
        small.fixed(0)
