"""The measures and samples of the comparison of recipes on SynthSAEBench."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import synthsaebench, synthsaebench_full
from benchmarks.synthsaebench import BATCH, CHUNK, OURS, K, Samples, anatomy, measured, run_ours


def test_the_true_features_are_found():
    true, codes = torch.eye(16), torch.zeros(2048, 16)
    codes[:, :K] = torch.rand(2048, K, generator=torch.Generator().manual_seed(0)) + 1
    offset = torch.linspace(0, 1, 16)
    found = measured(true, torch.zeros(16), true, offset, codes + offset, true)
    assert found == pytest.approx({"fve": 1, "mcc": 1, "dead": (16 - K) / 16})
    turned = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))[0]
    assert measured(turned, torch.zeros(16), turned, offset, codes + offset, true)["mcc"] < 0.9


def test_batches_are_parts_of_chunks():
    samples = Samples()
    parts = [samples.batch(i, BATCH) for i in range(CHUNK // BATCH)]
    assert torch.equal(torch.cat(parts), samples.made.batch(0, CHUNK))
    assert torch.equal(samples.batch(CHUNK // BATCH, BATCH), samples.made.batch(1, CHUNK)[:BATCH])


def test_recipes_differ_in_what_they_say():
    late, early = OURS["preset"].made(10_000), OURS["preset-early"].made(10_000)
    assert (late.auxk.dead_after, early.auxk.dead_after) == (5000 * BATCH, 1000 * BATCH)
    assert OURS["preset"].norm == "none" and OURS["defaults"].norm == "sqrt_d_in"
    assert OURS["defaults-early"].made(10_000).optimizer.lr is None
    assert OURS["defaults-early, rate x 0.25"].made(10_000).optimizer.lr == pytest.approx(7e-4, rel=0.05)
    for recipe in OURS.values():
        recipe.made(20_000)


def test_what_latents_of_leaves_consist_of():
    made = Samples().made
    leaf = sum(made.config.levels[:3]) + 37
    tree = [leaf, 8 + 32 + 37 // 4, 8 + 37 // 16, 37 // 64]
    assert [int(made.bucket[one]) for one in tree] == [3, 2, 1, 0]
    fires = (made.codes(4096, torch.Generator().manual_seed(0)) > 0)[:, tree]
    assert fires[:, 0].any() and fires[fires[:, 0]].all(), "a leaf fires with its parent, grandparent and root alone"
    parts = torch.tensor([0.8, 0.3, 0.1, -0.2])
    latents = torch.stack([made.dictionary[1000], 2 * parts @ made.dictionary[tree]])
    found = anatomy(latents, made)
    assert set(found["levels"]) == {"depth 3", "outside"} and found["levels"]["outside"] == [1, pytest.approx(1)]
    own = parts / (parts @ made.dictionary[tree]).norm()
    assert found["leaf"] == pytest.approx([*own.tolist(), 0], abs=1e-4)


def test_training_begins_with_the_true_features(monkeypatch):
    monkeypatch.setattr(synthsaebench, "MARKS", (1,))
    first, last = run_ours("true features", seed=0, steps=30)
    assert first["mcc"] == pytest.approx(1) and last["levels"]["roots"][0] == 8
    assert last["mcc"] < first["mcc"] - 0.005 and last["fve"] > first["fve"]
    assert run_ours("true decoder", seed=0, steps=30)[-1]["mcc"] == pytest.approx(1)


def test_kept_samples_are_those_that_were_made():
    made = synthsaebench_full.SynthSAEBench(synthsaebench_full.SynthSAEBenchConfig(d=8, features=64, roots=1, depth=1))
    kept, chunk = synthsaebench_full.Kept(made, 20_000), synthsaebench_full.CHUNK
    twice = [kept.batch(i, 1000).clone() for _ in range(2) for i in (0, 16, 17)]
    assert torch.equal(torch.cat(twice[:3]), torch.cat(twice[3:])) and kept.number == 2 * chunk
    both = torch.cat([made.batch(0, chunk), made.batch(1, chunk)])
    assert torch.equal(twice[1], both[16_000:17_000]), "a batch that begins in one chunk and ends in the next"


def full_size(monkeypatch, out: Path, *options: str) -> dict:
    """What the script writes at a small size."""
    argv = ["script", "--tiny", "--device", "cpu", "--seed", "0", "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(synthsaebench_full, "START", time.monotonic())
    synthsaebench_full.main()
    return json.loads(out.read_text())


def test_full_size_has_all_numbers_of_all_methods(monkeypatch, tmp_path):
    found = full_size(monkeypatch, tmp_path / "found.json", "--seconds", "600", "--steps", "3")
    assert [sae["label"] for sae in found["saes"]][:4] == [*synthsaebench_full.METHODS[:3], "batchtopk, default recipe"]
    assert len(found["saes"]) == 7 and not found["stopped"]
    assert all(0 < sae["mcc"] < 1 and sae["step_ms"] > 0 for sae in found["saes"])


def test_full_size_ends_in_time_and_says_what_is_missing(monkeypatch, tmp_path):
    found = full_size(monkeypatch, tmp_path / "found.json", "--seconds", "8", "--steps", "20000")
    assert found["saes"] == [] and len(found["stopped"]) == 5 and found["elapsed"] < 30
    assert found["stopped"][0]["step"] > 0, "given up on the way"
