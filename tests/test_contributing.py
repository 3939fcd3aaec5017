"""The table "Adding things" of CONTRIBUTING.md: its files exist, and rows that no other test shows hold."""

import re
from dataclasses import fields
from pathlib import Path

from sampled_sae.cli.train import SHARED, Train
from sampled_sae.data import text
from sampled_sae.training.learner import METRICS, Stats
from sampled_sae.training.settings import TrainConfig

ROOT = Path(__file__).parents[1]


def test_named_files_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:-1] for row in page.split("## Adding things")[1].splitlines() if row.startswith("| ")]
    for change, files, shown in rows[1:]:
        for name in re.findall(r"`([^`]*[./][^`]*)`", files):
            path = ROOT / "sampled_sae" / name
            assert (path.parent if "NAME" in name else path).exists(), (change, name)
        for name in re.findall("`(.*?)`", shown):
            assert (ROOT / name).exists(), (change, name)
        assert "`" in files and "`" in shown, change


def test_a_text_source_is_an_entry_in_one_file(monkeypatch):
    monkeypatch.setitem(text.NAMED, "poem", lambda: iter(["one", " ", "two"]))
    assert list(text.TextSource("poem").documents()) == ["one", "two"]


def test_a_training_metric_is_a_field_and_its_declaration():
    assert [metric.name for metric in METRICS][: len(Stats._fields)] == list(Stats._fields)


OTHERWISE = ("steps", "seed", "extends")  # set by --tokens or --steps, --seeds and --extend


def test_a_setting_of_a_run_is_a_field_and_a_flag():
    defaults = {item.name: item.default for item in fields(TrainConfig) if item.name not in OTHERWISE}
    assert set(defaults) == set(SHARED)
    assert {item.name: item.default for item in fields(Train) if item.name in SHARED} == defaults
