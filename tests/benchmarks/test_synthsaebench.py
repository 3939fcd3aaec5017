"""The measures and samples of the comparison of recipes on SynthSAEBench."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import synthsaebench_full
from benchmarks.synthsaebench import BATCH, CHUNK, K, Samples, config_of, measured


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
    (late, norm), (early, _) = config_of("preset", 10_000), config_of("preset-early", 10_000)
    assert (late.auxk.dead_after, early.auxk.dead_after) == (5000 * BATCH, 1000 * BATCH) and norm == "none"
    assert config_of("defaults-early", 10_000)[0].optimizer.lr is None
    assert config_of("defaults-early, rate x 0.25", 10_000)[0].optimizer.lr == pytest.approx(7e-4, rel=0.05)


def test_kept_samples_are_those_that_were_made():
    made = synthsaebench_full.SynthSAEBench(synthsaebench_full.SynthSAEBenchConfig(d=8, features=64, roots=1, depth=1))
    kept, chunk = synthsaebench_full.Kept(made, 20_000), synthsaebench_full.CHUNK
    twice = [kept.batch(i, 1000).clone() for _ in range(2) for i in (0, 16, 17)]
    assert torch.equal(torch.cat(twice[:3]), torch.cat(twice[3:])) and kept.number == 2 * chunk
    both = torch.cat([made.batch(0, chunk), made.batch(1, chunk)])
    assert torch.equal(twice[1], both[16_000:17_000]), "a batch that begins in one chunk and ends in the next"


def test_full_size_ends_in_time_and_says_what_is_missing(tmp_path):
    script, out = Path(synthsaebench_full.__file__), tmp_path / "found.json"
    command = [sys.executable, script, "--tiny", "--device", "cpu", "--seed", "0", "--out", out]
    subprocess.run([*command, "--seconds", "600", "--steps", "3"], check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert [sae["label"] for sae in found["saes"]][:4] == [*synthsaebench_full.METHODS[:3], "batchtopk, default recipe"]
    assert len(found["saes"]) == 7 and not found["stopped"]
    assert all(0 < sae["mcc"] < 1 and sae["step_ms"] > 0 for sae in found["saes"])
    subprocess.run([*command, "--seconds", "9", "--steps", "20000"], check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert found["saes"] == [] and len(found["stopped"]) == 5
