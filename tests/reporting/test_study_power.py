"""The spread of differences is split into its parts, and the number of seeds follows from them."""

import math

import numpy as np
import pytest

from sampled_sae.reporting.study import Results
from sampled_sae.reporting.study_power import MOST, Spread, chance, power_table, seeds_needed, spread, together
from sampled_sae.utils.paired import paired
from tests.reporting.test_study import rows


def values(x):
    """Numbers [seeds, letters] under their keys."""
    return {(seed, letter, letter): float(v) for seed, own in enumerate(x) for letter, v in enumerate(own)}


def test_parts_that_add_up_leave_no_rest():
    seeds, letters = np.array([0.0, 1.0, 5.0]), np.array([0.0, 2.0, -1.0, 7.0])
    zeros = values(np.zeros((3, 4)))
    found = spread(values(seeds[:, None] + letters), zeros)
    assert found.rest == pytest.approx(0, abs=1e-12) and found.size == 4
    assert found.seeds == pytest.approx(seeds.var(ddof=1)) and found.units == pytest.approx(letters.var(ddof=1))
    assert found.se(3) == pytest.approx((seeds.var(ddof=1) / 3 + letters.var(ddof=1) / 4) ** 0.5)


def test_variances_are_found_again_in_the_mean_of_many_comparisons():
    random, true = np.random.default_rng(0), (0.5, 2.0, 1.0)
    made = []
    for _ in range(400):
        parts = [random.normal(0, true[0] ** 0.5, (5, 1)), random.normal(0, true[1] ** 0.5, (1, 6))]
        x = sum(parts) + random.normal(0, true[2] ** 0.5, (5, 6))
        made.append(spread(values(x), values(np.zeros((5, 6)))))
    assert together(made)[:3] == pytest.approx(true, rel=0.15)


def test_only_units_that_each_seed_has_count_and_one_seed_says_nothing():
    first = values(np.arange(12.0).reshape(3, 4) ** 2)
    zeros = dict.fromkeys(first, 0.0)
    incomplete = {key: value for key, value in first.items() if key != (1, 3, 3)}
    without = {key: value for key, value in first.items() if key[2] != 3}
    assert spread(incomplete, zeros) == spread(without, zeros)
    assert spread({key: value for key, value in first.items() if key[0] == 1}, zeros) is None
    assert spread({key: value for key, value in first.items() if key[2] == 1}, zeros) is None, "one dataset"
    assert spread({}, {}) is None
    assert spread({(0,): 1.0, (1,): 3.0}, {(0,): 0.0, (1,): 0.0}) == Spread(2.0, 0.0, 0.0, 1)


def test_units_of_a_source_count_together_as_in_a_verdict():
    random, sizes = np.random.default_rng(0), [20, 8, 3] + [1] * 60
    source = np.repeat(np.arange(len(sizes)), sizes)
    x = 3 * (source == 0) + random.normal(0, 1, (3, 1)) + random.normal(0, 1, (3, len(source)))
    first = {(seed, f"s{source[i]}", i): float(v) for seed, own in enumerate(x) for i, v in enumerate(own)}
    zeros = dict.fromkeys(first, 0.0)
    found, verdict = spread(first, zeros), paired(first, zeros, clusters=2)
    assert found.size == len(sizes) and verdict.clusters == (3, found.size)
    assert found.se(3) == pytest.approx(verdict.se, rel=0.1)
    apart = {(seed, i, i): value for (seed, _, i), value in first.items()}
    independent = spread(apart, dict.fromkeys(apart, 0.0))
    assert independent.se(3) < 0.9 * found.se(3) and independent.se(math.inf) < found.se(math.inf) / 2


def test_predicted_verdicts_are_those_of_simulated_differences():
    random, wanted, runs = np.random.default_rng(0), Spread(0.0, 0.3, 3.0, 12), 400
    for seeds, margin in ((3, 0.8), (8, 0.6)):
        counted = 0
        for _ in range(runs):
            x = random.normal(0, wanted.units**0.5, 12) + random.normal(0, wanted.rest**0.5, (seeds, 12))
            first = values(x)
            found = paired(first, dict.fromkeys(first, 0.0), clusters=2)
            counted += found.verdict(margin) != "undecided"
        assert counted / runs == pytest.approx(chance(wanted, seeds, margin), abs=0.12)


def test_seeds_that_a_margin_takes():
    alone = Spread(1.0, 0.0, 0.0, 1)
    needed = [seeds_needed(alone, margin) for margin in (10.0, 2.0, 1.0, 0.5)]
    assert needed == sorted(needed) and needed[0] == 2
    # The textbook number for two-sided 10% and a power of 80%: 6.18 times the variance over the squared margin.
    assert seeds_needed(alone, 0.5) in (26, 27)
    assert seeds_needed(Spread(0.0, 1.0, 0.0, 6), 0.5) is None, "more seeds do not help"
    assert chance(alone, math.inf, 0.01) == 1 and chance(Spread(0.0, 1.0, 0.0, 6), math.inf, 0.5) < 0.5
    assert seeds_needed(alone, 0.1) is None and seeds_needed(Spread(1e-9, 0.0, 0.0, 1), 0.1) == 2


def test_the_table():
    results = Results(rows(), {"first": "m"})
    table = power_table(results, "first", ["good"], ["batchtopk", "same"])
    by_metric = {row[0]: row for row in table.rows}
    assert list(by_metric) == ["FVU", "CE loss recovered", "probing, k = 1", "probing, k = 5", "absorption"]
    fvu = by_metric["FVU"]
    assert fvu[1] > fvu[2] > fvu[3] == 0
    assert fvu[4] == pytest.approx(0.01 * 0.066, rel=0.01)  # 1% of the baseline
    assert isinstance(fvu[5], int) or fvu[5] == f"over {MOST}"
    assert fvu[6] == 1, "any number of seeds"
    assert power_table(results, "first", ["good"], []).rows == []
