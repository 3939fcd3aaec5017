"""Bookkeeping of benchmarks/quality.py: the search for learning rates and the file of finished runs."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "quality_runs.py"
spec = importlib.util.spec_from_file_location("quality_runs", PATH)
assert spec is not None and spec.loader is not None
runs = importlib.util.module_from_spec(spec)
sys.modules["quality_runs"] = runs  # dataclasses look their module up
spec.loader.exec_module(runs)


def search(fvu, start):
    """Rates in the order in which they are tried, for an FVU as a function of the rate."""
    done = {}
    while (rate := runs.next_rate(done, start)) is not None:
        done[rate] = fvu(rate)
    return done


@pytest.mark.parametrize("best", [1e-4, 1e-3, 7.9e-3])
def test_search_ends_with_both_neighbors_of_the_best_rate_worse(best):
    done = search(lambda rate: 5 + abs(math.log(rate / best)), 1e-3)
    rate = runs.best_rate(done)
    assert done[rate] < min(done[rate * 2], done[rate / 2])
    assert max(rate / best, best / rate) <= math.sqrt(2) + 1e-6
    assert len(done) <= 3 + abs(round(math.log2(best / 1e-3)))  # no rate beyond the neighbors is tried


def test_search_leaves_rates_that_diverge():
    done = search(lambda rate: math.nan if rate > 1.5e-3 else rate**-0.5, 1e-3)
    assert runs.best_rate(done) == 1e-3
    assert set(done) == {1e-3, 2e-3, 4e-3, 5e-4}


@pytest.mark.parametrize("start", [1e-3, 4e-3])
def test_search_looks_behind_a_rate_that_diverges(start):
    fvu = {5e-4: 0.15, 1e-3: 0.14, 2e-3: 1.5, 4e-3: 0.13, 8e-3: 0.16}
    done = search(lambda rate: fvu[round(rate, 6)], start)
    assert runs.best_rate(done) == pytest.approx(4e-3)
    assert {round(rate, 6) for rate in done} >= {1e-3, 2e-3, 4e-3, 8e-3}


def test_search_ends_if_every_rate_diverges():
    assert len(search(lambda rate: math.nan, 1.0)) <= 2 * runs.FARTHEST + 1


def test_search_resumes_where_it_was():
    whole = search(lambda rate: abs(math.log(rate / 6e-3)), 1e-3)
    for count in range(len(whole)):
        done = dict(list(whole.items())[:count])
        assert runs.next_rate(done, 1e-3) == list(whole)[count]


def test_search_counts_rates_as_they_are_stored():
    # Rates are rounded to six digits in the file.
    setting = runs.PRESETS["main"]
    stored = runs.key(setting, "saelens", 1e-3 / 3, 100)["lr"]
    assert stored != 1e-3 / 3
    assert runs.next_rate({stored: 1.0}, 1e-3 / 3) == pytest.approx(2e-3 / 3)


def test_finished_runs_are_found_again(tmp_path):
    setting, path = runs.PRESETS["16k"], tmp_path / "out" / "runs.jsonl"
    about = runs.key(setting, "saelens", 3e-4, 5000)
    results = runs.Results(path)
    assert results.get(about) is None
    results.add(about, {"fvu": {"select": 0.1}})
    results.add(about, {"absorption": 0.2}, "evaluation")
    again = runs.Results(path)
    assert again.get(about)["fvu"] == {"select": 0.1}
    assert again.get(about, "evaluation")["absorption"] == 0.2
    again.add(about, {"absorption": 0.3}, "evaluation")
    assert again.get(about, "evaluation")["absorption"] == 0.3  # the latest
    for other in (
        runs.key(setting, "saelens", 6e-4, 5000),
        runs.key(setting, "saelens", 3e-4, 6000),
        runs.key(setting, "sparsify", 3e-4, 5000),
        runs.key(replace(setting, k=20), "saelens", 3e-4, 5000),
        runs.key(setting, "saelens", 3e-4, 5000, seed=1),
    ):
        assert again.get(other) is None


def test_settings_of_other_lengths_share_the_selection():
    main, longer = runs.PRESETS["main"], runs.PRESETS["50M"]
    assert main.tokens != longer.tokens
    arguments = ("saelens", 3e-4, main.select_tokens)
    assert runs.key(main, *arguments) == runs.key(longer, *arguments)


def test_line_of_a_killed_process_is_dropped(tmp_path):
    path = tmp_path / "runs.jsonl"
    first, second = ({"toolkit": name} for name in "ab")
    runs.Results(path).add(first, {"fvu": 1})
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"what": "run", "key": {"toolkit": "b"}, "f')
    results = runs.Results(path)
    assert results.get(first) and results.get(second) is None
    assert path.read_bytes() == whole
    results.add(second, {"fvu": 2})
    assert runs.Results(path).get(second)["fvu"] == 2


def test_files_from_before_the_limit_was_a_setting(tmp_path):
    """Their runs left out tokens above 10 times the median norm."""
    about = runs.key(runs.PRESETS["gemma"], "saelens", 3e-4, 5000)
    old = {name: value for name, value in about.items() if name != "high_norm_factor"}
    runs.Results(tmp_path / "runs.jsonl").add(old, {"fvu": {"select": 0.1}})
    results = runs.Results(tmp_path / "runs.jsonl")
    assert results.get(about) is not None
    assert results.get(runs.key(runs.PRESETS["gemma-no-sinks"], "saelens", 3e-4, 5000)) is None
