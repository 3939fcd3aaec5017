"""The parts of benchmarks/quality.py, with runs that are looked up instead of trained."""

import argparse
import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

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

    a = argparse.Namespace(out=tmp_path, peers=list(RATES), seeds=2, peer_seeds=1, rates={}, neighbors=False)
    return Looked("16k", a, quality.Results(tmp_path / "runs.jsonl"), None)


def test_best_runs_of_each_peer_are_evaluated(quality, comparison):
    comparison.select()
    comparison.full()
    of = {(about["toolkit"], about["lr"], about["seed"]) for about in comparison.best_full()}
    ours = {(toolkit, None, seed) for toolkit in quality.METHODS for seed in (0, 1)}
    # dictionary_learning's other variant was worse in the search
    assert of == ours | {(name, RATES[name], 0) for name in ("saelens", "dictionary_learning", "sparsify")}
    comparison.a.neighbors, comparison.a.peer_seeds = True, 2
    comparison.full()  # the search goes on at full length, lower rates first
    at = comparison.results.rates(comparison.setting, "saelens", comparison.setting.tokens)
    assert list(at) == pytest.approx([RATES["saelens"] / 2**n for n in (0, 1, 2)])
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


def test_given_rates_replace_the_selected_ones(comparison):
    """Of the peers that are named, no other variant runs."""
    comparison.select()
    comparison.a.rates = {"dictionary_learning-raw": [1e-3, 2e-3]}
    chosen = comparison.chosen()
    assert chosen.pop("dictionary_learning-raw") == [1e-3, 2e-3]
    assert chosen == {name: [pytest.approx(RATES[name])] for name in ("saelens", "sparsify")}


def test_rates_that_cannot_be_read_are_refused(quality, monkeypatch, tmp_path, capsys):
    for wrong in ("saelens", "saelens=", "saelens=x", "sealens=1e-3"):
        monkeypatch.setattr(sys, "argv", ["quality.py", "cpu", "--out", str(tmp_path), "--rates", wrong])
        with pytest.raises(SystemExit):
            quality.main()
        assert f"--rates {wrong}: must be PEER=LR" in capsys.readouterr().err


def test_evaluation_that_was_cut_off_goes_on(quality, comparison, monkeypatch):
    """Each evaluation is written as it is done; SAEs that have it are not measured again."""
    comparison.full()
    comparison.a.no_loss, comparison.a.probing = False, ["texts.jsonl"]
    comparison._texts = {"report": np.zeros((1, 4))}
    comparison._data, comparison._model = SimpleNamespace(limit=1.0), object()
    monkeypatch.setattr(quality.Comparison, "folder", lambda self, about: self.a.out)
    monkeypatch.setattr(quality.SAE, "load", lambda *_: "sae")
    measured = []

    def measure(name):
        def measured_by_name(saes, *_):
            measured.append((name, len(saes)))
            if name == "absorption" and measured.count(("absorption", 4)) == 1:
                raise KeyboardInterrupt
            return [{"ce_recovered" if name == "losses" else name: 0.5} for _ in saes]

        return measured_by_name

    for name in ("losses", "probing", "absorption"):
        monkeypatch.setattr(quality, name, measure(name))
    with pytest.raises(KeyboardInterrupt):
        comparison.evaluate()
    comparison.evaluate()
    comparison.evaluate()
    assert measured == [("losses", 4), ("probing", 4), ("absorption", 4), ("absorption", 4)]
    again = quality.Results(comparison.results.path)
    for about in comparison.best_full():
        assert again.evaluation(about) == {"ce_recovered": 0.5, "probing": 0.5, "absorption": 0.5}


def test_the_limit_for_high_norms_is_part_of_a_setting(quality, tmp_path):
    """Tokens between the two limits are left out with the lower one, in the held-out sets and in training."""
    data = importlib.import_module("quality_data")
    small = {"context": 8, "buffer_tokens": 64, "tokens": 32, "batch": 16, "model": "made", "layer": 0}
    setting = replace(quality.PRESETS["cpu"], **small)
    lower = replace(setting, high_norm_factor=3.0)

    class Model:
        device, dtype, width = torch.device("cpu"), torch.float32, 2

        def activations(self, tokens, layers):
            """A norm of 5 for token 1, of 1 for the others."""
            return {0: torch.stack([torch.where(tokens == 1, 5.0, 1.0), torch.zeros(tokens.shape)], dim=2)}

    contexts = np.tile([1, 0, 0, 0, 0, 0, 0, 0], (32, 1))
    texts = {name: contexts for name in ("train", "calibration", "select", "report")}
    for folder in (None, tmp_path):
        both = [data.harvest(Model(), s, texts, folder) for s in (setting, lower)]
        assert [float(x.train.max()) for x in both] == [5.0, 1.0]
        assert [len(x.sets["select"]) for x in both] == [256, 224]
    keys = [quality.key(s, "saelens", 1e-3, 32) for s in (setting, lower)]
    assert keys[0] != keys[1]


def line(quality, toolkit, lr, tokens, fvu, seed=0, **more):
    about = quality.key(quality.PRESETS["16k"], toolkit, lr, tokens, seed)
    sets = {name: fvu for name in ("select", "report", "wide")}
    return about, {"seconds": 2.0, "fvu": sets, "l0": {name: 60.0 for name in sets}, "dead": 0.1, "lr": lr} | more


def test_tables_of_the_page(quality, monkeypatch, tmp_path):
    """The page's blocks follow the data: best rates, means over seeds, margins, and what was not searched."""
    table = importlib.import_module("quality_table")
    results = quality.Results(tmp_path / "runs.jsonl")
    full = quality.PRESETS["16k"].tokens
    for toolkit, lr, fvu, seed in (
        (quality.OURS, None, 0.08, 0), (quality.OURS, None, 0.10, 1),
        ("saelens", 1e-3, 0.14, 0), ("saelens", 5e-4, 0.12, 0), ("saelens", 2.5e-4, 0.13, 0),
        ("saelens", 5e-4, 0.12, 1), ("sparsify-adam", 1e-3, 0.10, 0),
    ):  # fmt: skip
        results.add(*line(quality, toolkit, lr, full, fvu, seed))
    about = line(quality, "saelens", 5e-4, full, 0.12)[0]
    results.add(about, {"ce_recovered": 0.99}, "evaluation")
    results.add(about, {"absorption": 0.2, "main_f1": 0.5}, "evaluation")
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- begin full -->\nold\n<!-- end full -->\n\nText.\n")
    arguments = [
        "quality_table.py",
        str(tmp_path / "runs.jsonl"),
        "--page",
        str(page),
        "--out",
        str(tmp_path / "r.json"),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    table.main()
    text = page.read_text()
    assert "old" not in text and text.index("<!-- end full -->") < text.index("Text.")
    assert "| **sampled-sae, defaults**, mean of 2 seeds | | 0.0900 |" in text.replace("|  |", "| |")
    assert "| SAELens, mean of 2 seeds | 0.0005 | 0.1200 | 0.1200 | 0.1200 | 25% |" in text
    assert "| sparsify, Adam, search unfinished | 0.001 | 0.1000 | 0.1000 | 0.1000 | 10% |" in text
    assert "| SAELens | 0.00025: 0.1300, **0.0005: 0.1200**, 0.001: 0.1400 | yes |" in text
    assert "| `16k` | 10M tokens | 10% | sparsify, Adam | 2, 1 | 1 of 2 |" in text
    assert "| SAELens | 0.9900 | 0.200 | 0.50 |" in text
    assert len(json.loads((tmp_path / "r.json").read_text())["16k"]["full"]) == 5
