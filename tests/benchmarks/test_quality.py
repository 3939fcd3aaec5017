"""The parts of benchmarks/quality.py, with runs that are looked up instead of trained."""

import argparse
import importlib
import math
from pathlib import Path

import pytest

RATES = {"saelens": 1.2e-3, "dictionary_learning": 2.4e-3, "dictionary_learning-raw": 4.8e-3, "sparsify": 2.5e-3}


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("quality")


@pytest.fixture
def comparison(quality, tmp_path):
    """Peers whose FVU is lowest at `RATES`; at full length half of that rate is better."""

    class Looked(quality.Comparison):
        def run(self, toolkit, lr, tokens, seed=0, again=False):
            about = quality.key(self.setting, toolkit, lr, tokens, seed)
            best = RATES.get(toolkit, 1.0) / (2 if tokens == self.setting.tokens else 1)
            fvu = 0.1 + len(toolkit) / 1000 + (0.01 * abs(math.log2(lr / best)) if lr else 0)
            return self.results.get(about) or self.results.add(about, {"fvu": {"select": fvu}, "seconds": 1.0})

    a = argparse.Namespace(out=tmp_path, peers=list(RATES), seeds=2, lower=0)
    return Looked("16k", a, quality.Results(tmp_path / "runs.jsonl"), None)


def test_best_runs_of_each_peer_are_evaluated(quality, comparison):
    comparison.select()
    comparison.full()
    of = {(about["toolkit"], about["lr"], about["seed"]) for about in comparison.best_full()}
    ours = {(quality.OURS, None, 0), (quality.OURS, None, 1)}
    # dictionary_learning's other variant was worse in the search
    assert of == ours | {(name, RATES[name], 0) for name in ("saelens", "dictionary_learning", "sparsify")}
    comparison.a.lower = 1
    comparison.full()
    of = {(about["toolkit"], about["lr"], about["seed"]) for about in comparison.best_full()}
    assert of == ours | {(name, RATES[name] / 2, 0) for name in ("saelens", "dictionary_learning", "sparsify")}


def test_search_that_ended_too_early_goes_on(quality, comparison):
    """A rate was selected that a wider search would not choose."""
    about = quality.key(comparison.setting, "saelens", None, comparison.setting.select_tokens)
    comparison.run("saelens", 2.4e-3, comparison.setting.select_tokens)
    comparison.results.add(about, {"lr": 2.4e-3}, "selected")
    comparison.select()
    assert comparison.results.get(about, "selected")["lr"] == pytest.approx(RATES["saelens"])
    lines = len(comparison.results.lines)
    comparison.select()  # nothing is left to do
    assert len(comparison.results.lines) == lines
