"""Paired differences against scipy, against statsmodels (values computed with its version 0.15), and by hand."""

import math

import pytest
from scipy import stats

from sampled_sae.utils.paired import Difference, holm, leaders, paired, t_quantile

DIFFERENCES = [0.081, 0.079, -0.004, 0.051, 0.045, 0.054, 0.063, -0.031, 0.013, 0.007, 0.094, 0.1, -0.013, 0.068, 0.058]
UNITS = [("a", "1"), ("a", "2"), ("b", "3"), ("c", "4"), ("c", "5")]
BY_DATASET = dict(zip([(seed, *unit) for seed in range(3) for unit in UNITS], DIFFERENCES, strict=True))
FIRST = [[0.30, 0.10, 0.22], [0.41, 0.16, 0.30], [0.25, 0.02, 0.17], [0.36, 0.13, 0.28]]
SECOND = [[0.28, 0.12, 0.15], [0.30, 0.11, 0.20], [0.27, 0.06, 0.15], [0.29, 0.11, 0.20]]


def by_letter(rows):
    return {(seed, letter): value for seed, row in enumerate(rows) for letter, value in zip("abc", row, strict=True)}


def zeros(keys):
    return dict.fromkeys(keys, 0.0)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 30, 111, 400])
def test_t_as_in_scipy(df):
    for share in (0.6, 0.8, 0.95, 0.975, 0.999):
        assert t_quantile(share, df) == pytest.approx(stats.t.ppf(share, df), rel=1e-9)
    found = Difference(0.7, 0.3, (df + 1,), df + 1)
    assert found.p_value == pytest.approx(2 * stats.t.sf(0.7 / 0.3, df), rel=1e-9)


def test_over_seeds_it_is_the_paired_t_test():
    first, second = {(0,): 0.066, (1,): 0.067, (2,): 0.0655, (3,): 9.0}, {(0,): 0.070, (1,): 0.069, (2,): 0.071}
    found = paired(first, second, better="low")
    test = stats.ttest_rel([0.070, 0.069, 0.071], [0.066, 0.067, 0.0655])
    assert found.pairs == 3 and found.df == 2
    assert found.p_value == pytest.approx(test.pvalue, rel=1e-9)
    assert found.interval == pytest.approx(tuple(test.confidence_interval(0.95)), rel=1e-9)


def test_clusters_as_in_statsmodels():
    seeds = paired(BY_DATASET, zeros(BY_DATASET))
    assert seeds.mean == pytest.approx(0.04433333333333333) and seeds.se == pytest.approx(0.011994628427388285)
    sources = paired(
        {key[1:2] + key: value for key, value in BY_DATASET.items()}, zeros(key[1:2] + key for key in BY_DATASET)
    )
    assert sources.se == pytest.approx(0.02241457858924261)


def test_two_kinds_of_clusters():
    found = paired(by_letter(FIRST), by_letter(SECOND), clusters=2, better="low")
    assert found.mean == pytest.approx(-0.03833333333333333)
    assert found.se == pytest.approx(0.024986107250941594)
    assert found.clusters == (4, 3) and found.df == 2
    # Here statsmodels' two-way value, 0.02177, is below that of the sources alone, which holds then.
    assert paired(BY_DATASET, zeros(BY_DATASET), clusters=2).se == pytest.approx(0.02241457858924261)


def test_the_detectable_difference_is_2_8_standard_errors_for_many_clusters():
    assert Difference(0.0, 1.0, (2000,), 2000).detectable == pytest.approx(2.8, abs=0.01)
    assert Difference(0.0, 1.0, (3,), 3).detectable == pytest.approx(stats.t.ppf(0.975, 2) + stats.t.ppf(0.8, 2))


@pytest.mark.parametrize(
    ("mean", "margin", "verdict"),
    # With 3 clusters and a standard error of 1: detectable 5.36, one-sided t 2.92.
    [(5.4, 0, "better"), (5.3, 0, "not worse"), (-5.4, 9, "worse"), (0, 3, "not worse"), (0, 2.9, "undecided")],
)
def test_verdicts(mean, margin, verdict):
    assert Difference(mean, 1.0, (3,), 3).verdict(margin) == verdict
    assert Difference(mean, 1.0, (3, 20), 60).verdict(margin) == verdict


def test_one_seed_decides_nothing():
    alone = paired({(0,): 1.0}, {(0,): 0.0})
    assert alone.se is alone.detectable is alone.interval is alone.p_value is None and alone.df == 0
    assert alone.verdict(10) == "undecided"
    letters = paired({(0, x): 1.0 + i / 10 for i, x in enumerate("abc")}, {(0, x): 0.0 for x in "abc"}, clusters=2)
    assert letters.se == pytest.approx(0.1 / math.sqrt(3)) and letters.clusters == (1, 3)
    assert letters.verdict(10) == "undecided"
    assert paired({(0,): 1.0}, {(1,): 1.0}) is None


def test_equal_differences_have_no_error():
    same = paired({(seed,): 0.5 for seed in range(3)}, {(seed,): 0.5 for seed in range(3)})
    assert (same.mean, same.se, same.p_value, same.verdict(0.01)) == (0, 0, 1, "not worse")
    ahead = paired({(seed,): 0.75 for seed in range(3)}, {(seed,): 0.5 for seed in range(3)})
    assert ahead.verdict(0.01) == "better" and ahead.p_value == 0


@pytest.mark.parametrize("clusters", range(2, 300, 7))
def test_no_p_value_is_negative(clusters):
    found = [Difference(t, 1.0, (clusters,), clusters).p_value for t in (0, 1, 5, 20, 100, 1e4)]
    assert all(p >= 0 for p in found)
    assert found == pytest.approx([2 * stats.t.sf(t, clusters - 1) for t in (0, 1, 5, 20, 100, 1e4)], abs=1e-12)


def test_holm_as_in_statsmodels():
    assert holm([0.01, 0.04, 0.03, 0.005, 0.9]) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.9])
    assert holm([]) == []


def test_leaders_are_the_best_and_what_cannot_be_told_from_it():
    def seeds(*values):
        return {(seed,): value for seed, value in enumerate(values)}

    clear = [seeds(0.70, 0.71, 0.69), seeds(0.60, 0.61, 0.59), seeds(0.50, 0.51, 0.49)]
    assert leaders(clear, "high") == [0] and leaders(clear, "low") == [2] and leaders(clear, None) == []
    noisy = [seeds(0.70, 0.60, 0.65), seeds(0.60, 0.70, 0.64), seeds(0.10, 0.11, 0.12), {}]
    assert leaders(noisy, "high") == [0, 1]
    assert leaders([seeds(0.7), seeds(0.1)], "high") == [0, 1], "one seed each"
    assert leaders([seeds(0.7, 0.7)], "high") == []
