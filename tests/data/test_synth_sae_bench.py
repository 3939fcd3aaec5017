"""Data after SynthSAEBench's specification, at a small size; L0 of the full size was 34.6 (published: about 34)."""

from dataclasses import replace

import pytest
import torch

from sampled_sae.data.synth_sae_bench import SynthSAEBench, SynthSAEBenchConfig, orthogonalized
from sampled_sae.data.synthetic import stream_seed
from sampled_sae.utils.errors import UserError

SMALL = SynthSAEBenchConfig(d=32, features=120, roots=4, branching=3, depth=2, orthogonalization=20, rank=3)


@pytest.fixture(scope="module")
def data():
    return SynthSAEBench(SMALL)


@pytest.fixture(scope="module")
def codes(data):
    return data.codes(20_000, torch.Generator().manual_seed(0)).dense()


def family(index):
    """The children of a feature: levels are 0..3, 4..15 and 16..51."""
    start = 4 + 3 * index if index < 4 else 16 + 3 * (index - 4)
    return list(range(start, start + 3))


def test_children_need_their_parent_and_exclude_each_other(codes):
    for parent in range(16):
        children = codes[:, family(parent)] > 0
        assert not (children.any(1) & (codes[:, parent] == 0)).any()
        assert children.sum(1).max() == 1
        assert children.any(0).all(), "each of them fires at times"


def test_children_are_scaled_by_their_parent(data):
    still = SynthSAEBench(replace(SMALL, std_mean=0.0, std_std=0.0))
    found = still.codes(4000, torch.Generator().manual_seed(1)).dense()
    fired = found > 0
    assert torch.allclose(found[fired], still.mean.expand_as(found)[fired]), "without spread each fires at its mean"
    own = data.codes(4000, torch.Generator().manual_seed(1)).dense()
    both = (own[:, 0] > 0) & (own[:, 4] > 0)
    assert torch.corrcoef(torch.stack([own[both, 0], own[both, 4]]))[0, 1] > 0.3


def test_frequencies_follow_zipf_outside_and_at_the_roots(data, codes):
    p = data.p
    assert p[0] == pytest.approx(0.4) and p[-1] == pytest.approx(5e-4, rel=1e-3) and (p.diff() < 0).all()
    seen = (codes > 0).double().mean(0)
    alone = (data.bucket == 0) | (data.bucket == 3)
    assert (seen - p)[alone].abs().max() < 0.015
    assert (seen <= p + 0.02).all()


def test_samples_are_codes_times_dictionary_plus_a_constant(data):
    x = data.batch(3, 100)
    assert torch.equal(x, data.batch(3, 100)) and not torch.equal(x, data.batch(4, 100))
    assert not torch.equal(x, data.batch(3, 100, split="heldout"))
    codes = data.codes(100, torch.Generator().manual_seed(stream_seed(SMALL.seed, "train", 3))).dense()
    assert torch.allclose(x, codes @ data.dictionary + data.offset) and data.offset.norm() == pytest.approx(0.5)
    assert torch.equal(data.fixed(10), data.fixed(200)[:10])


def test_statistics(data):
    found = data.statistics(5000)
    assert [row["features"] for row in found["buckets"]] == [4, 12, 36, 68]
    assert [row["name"] for row in found["buckets"]] == ["roots", "depth 1", "depth 2", "outside"]
    assert found["observed_l0"] == pytest.approx(sum(row["features"] * row["p"] for row in found["buckets"]))


def test_directions_become_more_orthogonal():
    rows = torch.randn(60, 20, generator=torch.Generator().manual_seed(0))

    def squares(unit):
        return float((unit @ unit.T).square().sum() - len(unit))

    before, after = orthogonalized(rows, 0), orthogonalized(rows, 100, lr=1e-2)
    assert squares(after) < 0.95 * squares(before)
    assert torch.allclose(after.norm(dim=1), torch.ones(60))


def test_directions_stay_normal():
    """Rows that shrink together lose their small entries first, which makes directions sparse (kurtosis of 5.8)."""
    rows = orthogonalized(torch.randn(1024, 256, generator=torch.Generator().manual_seed(0)), 100)
    assert float((rows**4).mean() / (rows**2).mean() ** 2) == pytest.approx(2.9, abs=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": 40}, "features = 40: must be at least 52, the size of the trees"),
        ({"p_min": 0.5}, "p_min = 0.5: must be below"),
    ],
)
def test_settings_are_checked(change, message):
    with pytest.raises(UserError, match=message):
        replace(SMALL, **change)
