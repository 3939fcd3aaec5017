"""The three sizes, what they are estimated to take, and the texts that they make themselves."""

import json
from dataclasses import replace

import pytest
import torch
import tyro

from sampled_sae.cli.compare import Compare
from sampled_sae.cli.eval import Eval
from sampled_sae.cli.reproduce import stages, typed, words
from sampled_sae.cli.train import SOURCES, Train
from sampled_sae.evals.probing.data import PACKAGES, write_labelled
from sampled_sae.experiments.reproduce import estimate
from sampled_sae.experiments.scales import PYTHIA_160M, SCALES, SMOLLM2, Scale
from sampled_sae.utils.cost import SPEEDS, Cost, peak, product_speed
from sampled_sae.utils.errors import UserError

TINY, PAPER = SCALES["tiny"], SCALES["paper"]


def test_the_paper_is_its_preset(tmp_path):
    preset = Train(tmp_path, preset="paper")
    asked = preset._chosen()
    ours = [replace(config, name=None) for config in PAPER.saes()]
    assert set(ours[:49]) == set(preset._configs(asked)) and len(ours) == 49 + 2 * 5
    assert {config.seed for config in ours[49:]} == {1, 2}
    named = {name: getattr(PAPER, name) for name in SOURCES["paper"]}
    assert named | {"layer": (PAPER.layer,)} == SOURCES["paper"]
    assert (PAPER.tokens, PAPER.batch_size) == (asked.tokens, asked.batch_size)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_runs_hold_each_sae_once(scale):
    names = [config.name for run in scale.runs() for config in run]
    assert names == [config.name for config in scale.saes()] and len(set(names)) == len(names)
    assert max(map(len, scale.runs())) <= scale.saes_a_run
    again = [config for config in scale.saes() if config.seed == scale.seeds[-1]]
    assert len(again) == 1 + len(scale.scores)  # BatchTopK and each score, for MMCS across seeds


def test_shapes_add_up():
    assert PYTHIA_160M.block_weights == 12 * PYTHIA_160M.width**2
    heads, inner = 3 * 64, 1536  # of SmolLM2's keys and values, and of its feed-forward layer
    assert SMOLLM2.block_weights == SMOLLM2.width * (2 * SMOLLM2.width + 2 * heads + 3 * inner)


def test_bad_scales():
    for change, line in (
        ({"seeds": ()}, "seeds"),
        ({"seed_multiplier": 7}, "must be one of the multipliers"),
        ({"saes_a_run": 0}, "saes_a_run = 0"),
    ):
        with pytest.raises(UserError, match=line):
            replace(TINY, **change)


# ---- commands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_commands_as_typed_are_the_commands(scale, tmp_path):
    lines = {stage.name: stage.commands for stage in stages(scale, tmp_path / "a b")}
    assert len(lines["train"]) == len(scale.runs())
    assert all(line.startswith("sampled-sae ") for commands in lines.values() for line in commands)
    assert "'" in lines["core"][0]  # a folder with a space in it


@pytest.mark.parametrize("cls", [Train, Eval, Compare])
def test_words_give_the_same_command_back(cls, tmp_path):
    scale = replace(TINY, absorption=replace(TINY.absorption, bos=False), max_norm=float("inf"))
    made = {
        Train: Train(tmp_path, source=Train(tmp_path).source, tokens=5, seeds=(3, 4), resume=True, normalize=False),
        Eval: Eval((tmp_path, tmp_path / "b"), ("probing", "absorption"), absorption=scale.absorption, loss=False),
        Compare: Compare((tmp_path,), tmp_path / "out", scale.similarity, "minilm"),
    }[cls]
    made = replace(made, source=replace(made.source, layer=(2, 3), max_norm=float("inf"))) if cls is Train else made
    assert tyro.cli(cls, args=words(made)) == made
    assert typed(made).split()[:2] == ["sampled-sae", cls.__name__.lower()]


# ---- estimates ---------------------------------------------------------------------------------------


def seconds(scale: Scale, kind: str = "cpu", product: float = 1e11) -> dict[str, float]:
    return {cost.stage: cost.seconds for cost in estimate(scale, kind, product)}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("kind", SPEEDS)
def test_every_stage_has_an_estimate(scale, kind, tmp_path):
    costs = estimate(scale, kind, 1e12)
    assert [cost.stage for cost in costs] == [stage.name for stage in stages(scale, tmp_path)]
    assert all(cost.seconds > 0 and cost.kept > 0 for cost in costs)


def test_more_work_takes_longer():
    base = seconds(TINY)
    assert seconds(replace(TINY, tokens=160_000))["train"] > 1.7 * base["train"]
    assert seconds(replace(TINY, contexts=80))["core"] > 4 * base["core"]
    assert all(value <= base[name] for name, value in seconds(TINY, product=2e11).items())
    one = seconds(replace(TINY, latents=4096))
    assert one["synthetic"] == base["synthetic"] and one["autointerp"] > base["autointerp"]


def test_disk_by_hand():
    costs = {cost.stage: cost for cost in estimate(PAPER, "cuda", 1e14)}
    weights = 4 * (2 * 65_536 * 768 + 65_536 + 768)
    assert costs["train"].kept == 59 * weights
    assert costs["train"].meanwhile == 8 * 3 * weights * 3  # 6,103 steps: after 3,000, 6,000 and the last
    assert peak([Cost("a", 1, 10, 100), Cost("b", 1, 20, 50), Cost("c", 1, 5, 0)]) == 110
    assert peak([Cost("a", 1, 10, 0), Cost("b", 1, 20, 50), Cost("c", 1, 5, 0)]) == 80


def test_the_speed_of_a_product_is_measured():
    found = product_speed(torch.device("cpu"), seconds=0.05)
    assert 1e8 < found < 1e15


# ---- texts -------------------------------------------------------------------------------------------


def test_the_stand_in_is_split_by_file(tmp_path):
    path = write_labelled(tmp_path / "texts" / "x.jsonl", 50)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for package in PACKAGES:
        train = {row["text"] for row in rows if row["label"] == package and row["split"] == "train"}
        test = {row["text"] for row in rows if row["label"] == package and row["split"] == "test"}
        assert len(train) >= 36 and len(test) == 10 and not train & test
    assert write_labelled(tmp_path / "again.jsonl", 50).read_bytes() == path.read_bytes()
    before = path.stat().st_mtime_ns
    assert write_labelled(path, 50).stat().st_mtime_ns == before
    assert write_labelled(path, 40).stat().st_mtime_ns != before
