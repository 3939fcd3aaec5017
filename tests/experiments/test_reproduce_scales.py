"""The three sizes, what they are estimated to take, and the texts that they make themselves."""

import json
import shlex
from dataclasses import replace

import pytest
import torch

from sampled_sae.cli import load, parse
from sampled_sae.cli.train import PRESETS
from sampled_sae.evals.core.schema import CoreConfig
from sampled_sae.experiments.reproduce import Paper, estimate
from sampled_sae.experiments.scales import PACKAGES, PYTHIA_160M, SCALES, SMOLLM2, Scale, write_labelled
from sampled_sae.experiments.stages import typed
from sampled_sae.utils.cost import SPEEDS, Cost, peak, product_speed
from sampled_sae.utils.errors import UserError

TINY, PAPER = SCALES["tiny"], SCALES["paper"]


def test_the_paper_is_its_preset():
    preset = PRESETS["paper"]
    ours = [replace(config, name=None) for config in PAPER.saes()]
    assert set(ours[:49]) == set(preset.sae_configs()) and len(ours) == 49 + 2 * 5
    assert {config.seed for config in ours[49:]} == {1, 2}
    collect = preset.collect
    assert (PAPER.model, (PAPER.layer,), PAPER.text) == (collect.model, collect.layer, collect.text)
    assert (PAPER.context, PAPER.high_norm_factor) == (collect.source.context, float("inf"))
    assert (PAPER.tokens, PAPER.batch_size) == (preset.tokens, preset.batch_size)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_runs_hold_each_sae_once(scale):
    names = [config.name for run in scale.runs() for config in run]
    assert names == [config.name for config in scale.saes()] and len(set(names)) == len(names)
    assert max(map(len, scale.runs())) <= scale.saes_per_run
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
        ({"saes_per_run": 0}, "saes_per_run = 0"),
    ):
        with pytest.raises(UserError, match=line):
            replace(TINY, **change)


# ---- commands ----------------------------------------------------------------------------------------


def command(line: str):
    """The command's dataclass as the shell's words give it."""
    program, name, *arguments = shlex.split(line)
    return parse(load(name), arguments, f"{program} {name}")


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_commands_say_what_the_stages_do(scale, tmp_path):
    out = tmp_path / "a b"  # a folder with a space in it
    lines = {stage.name: stage.commands for stage in Paper(scale, out).stages()}
    assert len(lines["train"]) == len(scale.runs())
    trained = command(lines["train"][0])
    assert trained.out.parent == trained.configs.parent == out / "train" and trained.resume
    assert (trained.tokens, trained.batch_size, trained.seeds) == (scale.tokens, scale.batch_size, scale.seeds[:1])
    collect, source = trained.collect, trained.collect.source
    assert (collect.model, collect.layer, collect.text) == (scale.model, (scale.layer,), scale.text)
    assert (source.context, source.buffer_tokens, source.high_norm_factor) == (
        *(scale.context, scale.buffer_tokens, scale.high_norm_factor),
    )
    for name, config in scale.evaluations().items():
        asked = command(lines[name][0])
        assert asked.folders == (out / "train",) and asked.evals == (name,) and asked.out == out / "evals"
        given = getattr(asked, name)
        assert given == (replace(config, datasets=given.datasets) if name == "probing" else config)
    compared = command(lines["compare"][0])
    assert compared.similarity == scale.similarity and compared.embedder == scale.autointerp.embedder
    assert command(lines["synthetic"][0]).steps == scale.synthetic.steps
    assert command(lines["report"][0]).out == out / "report"


def test_flags_as_typed():
    scale = replace(TINY.absorption, bos=False)
    line = typed("eval", "x y", evals=("core", "absorption"), absorption=scale, layer=None, redo=True, text=None)
    expected = "sampled-sae eval 'x y' --evals core absorption --absorption.no-bos --absorption.lines 2"
    assert sorted(line.split()) == sorted([*expected.split(), "--absorption.max-words", "4000", "--redo"])


# ---- estimates ---------------------------------------------------------------------------------------


def seconds(scale: Scale, kind: str = "cpu", product: float = 1e11) -> dict[str, float]:
    return {cost.stage: cost.seconds for cost in estimate(scale, kind, product)}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("kind", SPEEDS)
def test_every_stage_has_an_estimate(scale, kind, tmp_path):
    costs = estimate(scale, kind, 1e12)
    assert [cost.stage for cost in costs] == [stage.name for stage in Paper(scale, tmp_path).stages()]
    assert all(cost.seconds > 0 and cost.kept > 0 for cost in costs)


def test_more_work_takes_longer():
    base = seconds(TINY)
    assert seconds(replace(TINY, tokens=160_000))["train"] > 1.7 * base["train"]
    assert seconds(replace(TINY, core=CoreConfig(contexts=80)))["core"] > 4 * base["core"]
    assert all(value <= base[name] for name, value in seconds(TINY, product=2e11).items())
    one = seconds(replace(TINY, d_sae=4096))
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
