"""Whole runs: all kinds of SAEs, of activations, and what they leave."""

import gc
import json
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

import sampled_sae as ss
from sampled_sae.data.source import open_source
from sampled_sae.data.stream import ActivationStream
from sampled_sae.method.config import AuxKConfig, Fraction, PoolConfig, Released, SAEConfig, Scope, Size
from sampled_sae.training.callbacks import read_log
from sampled_sae.training.heldout import by_threshold
from sampled_sae.training.learner import Learner
from tests.small_runs import QUIET, same_weights

FAMILY = {
    "batchtopk": ss.batchtopk(48, 4),
    "topk": ss.topk(48, 4),
    "topk then batchtopk": ss.topk_then_batchtopk(48, 4),
    "matryoshka": ss.matryoshka(48, 4),
    "matryoshka in pools": ss.released(48, 4, "l2", 0.5, prefixes=(0.25,), auxk=AuxKConfig(dead_after=800)),
    "matryoshka, topk first": ss.topk_then_batchtopk(48, 4, prefixes=(7, 20, 48)),
    "jumprelu": ss.jumprelu(48, 4, prefixes=(8, 24, 48), auxk=AuxKConfig(dead_after=800)),
    "l2": ss.sampled(48, 4, l=3),
    "entropy": ss.sampled(48, 4, "entropy", l=3),
    "uniform": ss.sampled(48, 4, "uniform", l=3),
    "sampled pick": ss.sampled(48, 4, l=3, pick="sample"),
    "released": ss.released(48, 4, at=0.5),
    "annealed": ss.annealed(48, 4),
    "groups": SAEConfig(48, 4, pool=PoolConfig("uniform", Size(10), scope=Scope(tokens=50, then=20, until=0.5))),
    "kept pool": SAEConfig(48, 4, pool=PoolConfig("uniform", Fraction(0.4), refresh=4, schedule=Released(0.6))),
    "auxk": replace(ss.sampled(48, 4, l=2), auxk=AuxKConfig(dead_after=800)),
}


@pytest.mark.parametrize("name", FAMILY)
def test_the_whole_family_trains(name, activations):
    [sae] = ss.train(activations, [FAMILY[name]], steps=40, **QUIET)
    assert sae.W_enc.shape == (16, 48)
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(48))
    assert all(torch.isfinite(value).all() for value in sae.parameters())


def test_training_explains_the_data(activations):
    config = replace(ss.batchtopk(64, 4), optimizer=ss.OptimizerConfig(lr=3e-3))
    [sae] = ss.train(activations, [config], steps=400, **QUIET)
    result = by_threshold(sae, activations)
    assert result.fve > 0.8
    assert abs(result.l0 - 4) < 0.3


def test_alone_equals_together(activations):
    together = ss.train(activations, list(FAMILY.values()), steps=25, **QUIET)
    for config, beside in zip(FAMILY.values(), together, strict=True):
        [alone] = ss.train(activations, [config], steps=25, **QUIET)
        assert same_weights(alone, beside), config.name


def test_seeds_matter_and_repeat(activations):
    config = ss.sampled(48, 4, "uniform", l=3)
    a, b = ss.train(activations, [config, replace(config, seed=1)], steps=10, seed=0, **QUIET)
    [again] = ss.train(activations, [config], steps=10, seed=0, **QUIET)
    assert same_weights(a, again)
    assert not same_weights(a, b)


@pytest.mark.parametrize(("input_norm", "norm"), [("sqrt_d_in", 4.0), ("one", 1.0), ("none", None)])
def test_saved_on_raw_activations_equals_trained_on_scaled_ones(activations, tmp_path, input_norm, norm):
    raw = 37.0 * activations + 5
    config = ss.batchtopk(48, 4)
    ss.train(raw, [config], steps=30, out=tmp_path / "run", input_norm=input_norm, **QUIET)
    saved = ss.SAE.load(tmp_path / "run" / "saes" / "batchtopk-s0")
    c = saved.cfg.metadata["training"]["scale"]
    learner = Learner(config, 16, 30, 0, torch.device("cpu"), torch.float32)
    stream = open_source(raw).open(200, 65_536, 0)["activations"]
    for step in range(30):
        learner.step(stream.batch(step) / c, step)
    scaled = learner.sae()
    scaled.threshold.copy_(saved.threshold / c)
    equal = torch.isclose(saved(raw), c * scaled(raw / c), rtol=1e-4, atol=1e-3).all(1)
    assert equal.float().mean() > 0.999  # rounding decides where a latent is at its threshold
    if norm is None:
        assert c == 1
    else:
        assert float((raw / c).square().sum(1).mean().sqrt()) == pytest.approx(norm, rel=0.05)


def test_calibrated_l0_is_k_on_held_out_tokens(activations):
    [sae] = ss.train(activations[:3000], [FAMILY["uniform"]], steps=30, heldout=activations[3000:], **QUIET)
    assert (sae.encode(activations[3000:]) > 0).sum() == 4 * 1000


def test_the_log_has_what_was_promised(activations, tmp_path):
    ss.train(activations, [ss.sampled(48, 4, l=3, lr=1e-3)], steps=30, out=tmp_path, log_every=10, **QUIET)
    lines = read_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines] == [0, 10, 20, 29]
    wanted = {"loss", "fve", "l0", "threshold", "lr", "dead", "churn", "ever_pooled", "tokens_per_second", "sae"}
    assert wanted <= set(lines[-1])
    assert 0 < lines[-1]["churn"] < 1
    assert lines[-1]["ever_pooled"] > 12 / 48
    assert lines[-1]["l0"] == 4
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["config"]["saes"][0]["pool"]["size"] == {"kind": "multiplier", "l": 3}
    assert run["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("kind", ["tensor", "list", "generator", "memmap", "3-D"])
def test_every_kind_of_activations(kind, activations, tmp_path):
    np.save(tmp_path / "x.npy", activations.numpy())
    sources = {
        "tensor": activations,
        "list": list(activations.split(333)),
        "generator": (activations[torch.randperm(4000)[:333]] for _ in range(100)),
        "memmap": np.load(tmp_path / "x.npy", mmap_mode="r"),
        "3-D": activations.view(400, 10, 16),
    }
    [sae] = ss.train(sources[kind], [ss.batchtopk(48, 4)], steps=40, heldout_tokens=500, **QUIET)
    assert sae.d_in == 16


def test_activations_collected_in_inference_mode(activations):
    modes = []

    def collect():
        with torch.inference_mode():
            for _ in range(30):
                modes.append(torch.is_inference_mode_enabled())
                yield activations[:500] * 1.0

    batches = collect()
    sae = ss.train(batches, ss.batchtopk(48, 4), steps=20, heldout_tokens=500, **QUIET)
    assert all(modes) and not torch.is_inference_mode_enabled()  # the generator has its mode to itself
    same = ss.train((activations[:500] for _ in range(30)), ss.batchtopk(48, 4), steps=20, heldout_tokens=500, **QUIET)
    assert same_weights(sae, same)
    with torch.inference_mode():
        ss.train(activations, [ss.batchtopk(48, 4)], steps=3, **QUIET)


def test_gradients_are_off_where_a_generator_has_them_off(activations):
    def collect():
        weight = torch.ones((), requires_grad=True)
        with torch.no_grad():
            for _ in range(30):
                assert not (activations[:500] * weight).requires_grad
                yield activations[:500]

    ss.train(collect(), ss.batchtopk(48, 4), steps=20, heldout_tokens=500, **QUIET)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("out", [None, "run"])
def test_activations_and_weights_are_given_up_at_the_end(activations, tmp_path, monkeypatch, out):
    """Not at some later garbage collection: a generator that then leaves its `no_grad()` would turn gradients on."""
    monkeypatch.chdir(tmp_path)

    def collect():
        with torch.no_grad():
            for _ in range(30):
                yield activations[:500]

    batches = collect()
    left = weakref.ref(batches)
    gc.collect()
    gc.disable()
    try:
        ss.train(batches, ss.batchtopk(48, 4), steps=20, heldout_tokens=500, out=out, **(QUIET | {"progress": True}))
        del batches
        assert left() is None
    finally:
        gc.enable()


def test_a_bad_scope_is_refused_before_anything_is_done(activations, tmp_path):
    config = SAEConfig(48, 4, pool=PoolConfig(scope=Scope(tokens=1, then=30, until=0.7)))
    with pytest.raises(ss.UserError, match="scope of 30 tokens: must divide batch_size = 200"):
        ss.train(activations, [config], steps=10, out=tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, "float32"])
def test_a_precision_that_cannot_be_trained_in(dtype, activations, tmp_path):
    with pytest.raises(ss.UserError, match=r"dtype = .*: must be torch.float32, torch.bfloat16 or torch.float64"):
        ss.train(activations, ss.batchtopk(48, 4), dtype=dtype, out=tmp_path / "run", **QUIET | {"steps": 2})
    assert not (tmp_path / "run").exists()


def test_what_activations_take_is_counted(activations):
    class Taking(ActivationStream):
        d_in, batch_size, heldout = activations.shape[1], QUIET["batch_size"], activations[:100]

        def memory_estimate(self):
            return 10**15

        def batch(self, index):
            return activations[: QUIET["batch_size"]]

    with pytest.raises(ss.UserError, match=r"for activations needed .* buffer_tokens"):
        ss.train(Taking(), ss.batchtopk(48, 4), steps=5, **QUIET)


def test_the_length_is_given_in_steps_or_in_tokens(activations):
    by_steps = ss.train(activations, ss.batchtopk(48, 4), steps=5, **QUIET)
    by_tokens = ss.train(activations, ss.batchtopk(48, 4), tokens=1100, **QUIET)
    assert same_weights(by_steps, by_tokens)
    for wrong in ({}, {"steps": 5, "tokens": 1000}):
        with pytest.raises(ss.UserError, match="give one of the two"):
            ss.train(activations, ss.batchtopk(48, 4), **wrong, **QUIET)
    with pytest.raises(ss.UserError, match="tokens = 100: must be at least batch_size = 200"):
        ss.train(activations, ss.batchtopk(48, 4), tokens=100, **QUIET)
