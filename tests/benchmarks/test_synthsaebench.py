"""The measures and samples of the comparison of recipes on SynthSAEBench."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import synthsaebench
from benchmarks.synthsaebench import CHUNK, FULL, OURS, SMALL, Kept, Samples, anatomy, measured, recipe_of, run_ours
from sampled_sae.method.presets import matryoshka


def test_the_true_features_are_found():
    k, true, codes = 6, torch.eye(16), torch.zeros(2048, 16)
    codes[:, :k] = torch.rand(2048, k, generator=torch.Generator().manual_seed(0)) + 1
    offset = torch.linspace(0, 1, 16)
    found = measured((true, torch.zeros(16), true, offset), codes + offset, true, k)
    assert found == pytest.approx({"fve": 1, "mcc": 1, "dead": (16 - k) / 16})
    turned = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))[0]
    assert measured((turned, torch.zeros(16), turned, offset), codes + offset, true, k)["mcc"] < 0.9


def test_batches_are_parts_of_chunks():
    samples, size = Samples(SMALL), SMALL.batch
    parts = [samples.batch(i, size) for i in range(CHUNK // size)]
    assert torch.equal(torch.cat(parts), samples.made.batch(0, CHUNK))
    assert torch.equal(samples.batch(CHUNK // size, size), samples.made.batch(1, CHUNK)[:size])


def test_kept_samples_are_those_that_were_made(tmp_path, monkeypatch):
    monkeypatch.setattr(synthsaebench, "KEPT_CHUNK", 600)
    first = Kept(SMALL, tmp_path / "kept", 1000)
    made = torch.cat([first.made.batch(i, 600) for i in range(2)])
    assert torch.allclose(first.batch(1, 400), made[400:800], atol=2e-3), "a batch of two chunks"
    changed = (tmp_path / "kept").stat().st_mtime_ns
    again = Kept(SMALL, tmp_path / "kept", 1000)
    assert torch.equal(again.batch(1, 400), first.batch(1, 400)) and torch.equal(again.heldout(9), first.heldout(9))
    assert (tmp_path / "kept").stat().st_mtime_ns == changed and [p.name for p in tmp_path.iterdir()] == ["kept"]
    with pytest.raises(SystemExit, match=r"kept: has 1200 samples, 1300 are needed; remove it"):
        Kept(SMALL, tmp_path / "kept", 1300)


def test_recipes_differ_in_what_they_say():
    late, early = OURS["preset"].made(SMALL, 10_000), OURS["preset-early"].made(SMALL, 10_000)
    assert (late.auxk.dead_after, early.auxk.dead_after) == (5000 * SMALL.batch, 1000 * SMALL.batch)
    assert OURS["preset"].norm == "none" and OURS["defaults"].norm == "sqrt_d_in"
    assert OURS["defaults-early"].made(SMALL, 10_000).optimizer.lr is None
    assert recipe_of("defaults-early, rate x 0.25").made(SMALL, 10_000).optimizer.lr == pytest.approx(7e-4, rel=0.05)
    for recipe in OURS.values():
        recipe.made(FULL, 20_000)


def test_methods_of_the_command_line_are_recipes():
    made = recipe_of("released:score=l2,prefixes=8+24+56+120+256").made(SMALL, 10_000)
    assert made.pool.score == "l2" and made.prefixes == matryoshka(256, 6).prefixes
    assert made.auxk.dead_after == 1000 * SMALL.batch and made.optimizer.lr is None
    slower = recipe_of("topk, rate x 0.25").made(SMALL, 10_000)
    assert slower.pool.scope.tokens == 1 and slower.optimizer.lr == pytest.approx(7e-4, rel=0.05)


def test_what_latents_of_leaves_consist_of():
    made = Samples(SMALL).made
    leaf = sum(made.config.levels[:3]) + 37
    tree = [leaf, 8 + 32 + 37 // 4, 8 + 37 // 16, 37 // 64]
    assert [int(made.bucket[one]) for one in tree] == [3, 2, 1, 0]
    fires = (made.codes(4096, torch.Generator().manual_seed(0)).dense() > 0)[:, tree]
    assert fires[:, 0].any() and fires[fires[:, 0]].all(), "a leaf fires with its parent, grandparent and root alone"
    parts = torch.tensor([0.8, 0.3, 0.1, -0.2])
    latents = torch.stack([made.dictionary[1000], 2 * parts @ made.dictionary[tree]])
    found = anatomy(latents, made)
    assert set(found["levels"]) == {"depth 3", "outside"} and found["levels"]["outside"] == [1, pytest.approx(1)]
    own = parts / (parts @ made.dictionary[tree]).norm()
    assert found["leaf"] == pytest.approx([*own.tolist(), 0], abs=1e-4)


def test_training_begins_with_the_true_features(monkeypatch):
    monkeypatch.setattr(synthsaebench, "MARKS", (1,))
    samples = Samples(SMALL)
    first, last = run_ours(SMALL, samples, "true features", seed=0, steps=30)
    assert first["mcc"] == pytest.approx(1) and last["levels"]["roots"][0] == 8
    assert last["mcc"] < first["mcc"] - 0.005 and last["fve"] > first["fve"]
    assert run_ours(SMALL, samples, "true decoder", seed=0, steps=30)[-1]["mcc"] == pytest.approx(1)


def test_the_script_adds_runs_to_its_file(tmp_path, monkeypatch):
    data = replace(FULL.data, d=64, features=512, roots=4)
    monkeypatch.setattr(synthsaebench, "FULL", FULL._replace(data=data, latents=64, k=4, batch=64))
    options = ["--full", "--kept", str(tmp_path / "kept"), "--steps", "3", "--out", str(tmp_path / "out.json")]
    for recipe in ("batchtopk", "preset"):
        monkeypatch.setattr(sys, "argv", ["script", "--recipe", recipe, "--seed", "0", "--seed", "1", *options])
        synthsaebench.main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["data"] == data.to_dict() and found["sizes"] == {"latents": 64, "k": 4, "batch_size": 64}
    assert [(run["recipe"], run["seed"]) for run in found["runs"]] == [
        (recipe, seed) for recipe in ("batchtopk", "preset") for seed in (0, 1)
    ]
    assert all(0 < run["mcc"] < 1 and run["step"] == 3 for run in found["runs"])


@pytest.mark.parametrize("recipe", ["batchtopq", "topk, rate x much"])
def test_a_wrong_recipe_is_reported_before_samples_are_made(recipe, tmp_path, monkeypatch, capsys):
    options = ["--recipe", recipe, "--seed", "0", "--kept", str(tmp_path / "kept"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["script", *options])
    with pytest.raises(SystemExit, match="2"):
        synthsaebench.main()
    assert f"--recipe {recipe!r}: " in capsys.readouterr().err and not list(tmp_path.iterdir())
