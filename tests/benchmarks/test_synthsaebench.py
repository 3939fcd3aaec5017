"""The measures and samples of the comparison of recipes on SynthSAEBench."""

import pytest
import torch

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
