"""The spread of differences is split into its parts, and the number of seeds follows from them."""

import numpy as np
import pytest

from sampled_sae.reporting.study import Results
from sampled_sae.reporting.study_power import MOST, Spread, power_table, seeds_needed, spread, together
from tests.reporting.test_study import rows


def values(x):
    """Numbers [seeds, letters] under their keys."""
    return {(seed, "", letter): float(v) for seed, own in enumerate(x) for letter, v in enumerate(own)}


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
    incomplete = {key: value for key, value in first.items() if key != (1, "", 3)}
    without = {key: value for key, value in first.items() if key[2] != 3}
    assert spread(incomplete, zeros) == spread(without, zeros)
    assert spread({key: value for key, value in first.items() if key[0] == 1}, zeros) is None
    assert spread({key: value for key, value in first.items() if key[2] == 1}, zeros) is None, "one dataset"
    assert spread({}, {}) is None
    assert spread({(0,): 1.0, (1,): 3.0}, {(0,): 0.0, (1,): 0.0}) == Spread(2.0, 0.0, 0.0, 1)


def test_seeds_that_a_margin_takes():
    alone = Spread(1.0, 0.0, 0.0, 1)
    needed = [seeds_needed(alone, margin) for margin in (10.0, 2.0, 1.0, 0.5)]
    assert needed == sorted(needed) and needed[0] == 2
    # The textbook number for two-sided 10% and a power of 80%: 6.18 times the variance over the squared margin.
    assert seeds_needed(alone, 0.5) in (26, 27)
    assert seeds_needed(Spread(0.0, 1.0, 0.0, 6), 0.5) is None, "more seeds do not help"
    assert seeds_needed(alone, 0.1) is None and seeds_needed(Spread(1e-9, 0.0, 0.0, 1), 0.1) == 2


def test_the_table():
    results = Results(rows(), {"first": "m"})
    table = power_table(results, "first", ["good"], ["batchtopk", "same"])
    by_metric = {row[0]: row for row in table.rows}
    assert list(by_metric) == ["FVU", "CE loss recovered", "probing, k = 1", "probing, k = 5", "absorption"]
    fvu = by_metric["FVU"]
    assert fvu[1] == 2 and fvu[5] == 0 and fvu[2] > fvu[3] > fvu[4] > 0
    assert fvu[6] == pytest.approx(0.01 * 0.066, rel=0.01)  # 1% of the baseline
    assert isinstance(fvu[7], int) or fvu[7] == f"over {MOST}"
    assert power_table(results, "first", ["good"], []).rows == []
