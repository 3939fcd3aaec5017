"""Trainings that continue from their folder alone, and extensions of finished ones."""

import json

import numpy as np
import pytest
import torch

import sampled_sae as ss
from sampled_sae import cli
from sampled_sae.method.config import Multiplier, PoolConfig
from sampled_sae.training.callbacks import read_log
from sampled_sae.training.optimizer import learning_rate
from tests.models.tiny_models import make_model, save
from tests.small_runs import same_weights

CONFIGS = [ss.batchtopk(48, 4), ss.released(48, 4, "l2", fraction=0.5)]
SETTINGS = {"steps": 12, "batch_size": 100, "heldout_tokens": 200, "checkpoint_every": 5, "log_every": 1}
QUIET = {"device": "cpu", "progress": False}


class StopAt(ss.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, run, learner, step, stats):
        if step == self.step:
            raise KeyboardInterrupt


@pytest.fixture
def acts(tmp_path, activations):
    np.save(tmp_path / "acts.npy", activations.numpy())
    return tmp_path / "acts.npy"


def stopped(call, *arguments, at, **options):
    with pytest.raises(KeyboardInterrupt):
        call(*arguments, callbacks=[StopAt(at)], **options, **QUIET)


def test_a_file(acts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = ss.train("acts.npy", CONFIGS, out=tmp_path / "whole", **SETTINGS, **QUIET)
    stopped(ss.train, "acts.npy", CONFIGS, out="part", at=8, **SETTINGS)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "part").rename(tmp_path / "moved")
    parts = ss.resume("../moved", **QUIET)
    assert all(same_weights(a, b) for a, b in zip(whole, parts, strict=True))
    assert [sae.folder.parent.parent.name for sae in parts] == ["moved"] * 2
    assert all(same_weights(a, b) for a, b in zip(whole, ss.resume("../moved", **QUIET), strict=True))  # finished


def test_a_model_and_a_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(make_model("llama"), tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(f"the{n * n % 97}" for n in range(4000)))
    words = [
        "--model",
        "model",
        "--text",
        "text.txt",
        "--layer",
        "0",
        "1",
        "--context",
        "16",
        "--d-sae",
        "32",
        "--k",
        "4",
    ]
    words += [
        "--steps",
        "12",
        "--batch-size",
        "64",
        "--heldout-tokens",
        "64",
        "--checkpoint-every",
        "5",
        "--device",
        "cpu",
    ]
    cli.main(["train", *words, "--out", "whole"])
    folders = capsys.readouterr().out.split()
    source = ss.activations("model", "text.txt", [0, 1], context=16, device="cpu", progress=False)
    settings = SETTINGS | {"batch_size": 64, "heldout_tokens": 64, "log_every": 50}
    stopped(ss.train, source, [ss.topk_then_batchtopk(32, 4)], out="part", at=8, **settings)
    cli.main(["resume", "part"])
    for one, other in zip(folders, capsys.readouterr().out.split(), strict=True):
        assert same_weights(ss.SAE.load(one), ss.SAE.load(other))
    cli.main(["resume", "part", "--extend", "3"])
    assert json.loads((tmp_path / "part/layer-1/run.json").read_text())["config"]["train"]["steps"] == 15


def test_an_extension_is_resumed_exactly(acts, tmp_path):
    for name in ("whole", "part"):
        ss.train(acts, CONFIGS, out=tmp_path / name, **SETTINGS, **QUIET)
    first = [sae.cfg.metadata["training"]["heldout"]["fvu"] for sae in ss.resume(tmp_path / "whole", **QUIET)]
    whole = ss.resume(tmp_path / "whole", extend=60, **QUIET)
    stopped(ss.resume, tmp_path / "part", extend=60, at=12)  # before the first checkpoint
    stopped(ss.resume, tmp_path / "part", at=33)
    with pytest.raises(ss.UserError, match=r"extend = 5: the training in .* is not finished; resume it first"):
        ss.resume(tmp_path / "part", extend=5, **QUIET)
    parts = ss.resume(tmp_path / "part", **QUIET)
    assert all(same_weights(a, b) for a, b in zip(whole, parts, strict=True))
    for sae, before in zip(whole, first, strict=True):
        training = sae.cfg.metadata["training"]
        assert (training["steps"], training["extends"]) == (72, 12)
        assert training["heldout"]["fvu"] < before
    log = [line for line in read_log(tmp_path / "part/log.jsonl") if line["sae"] == whole[0].cfg.training.name]
    assert [line["step"] for line in log] == list(range(72))
    optimizer = whole[0].cfg.training.optimizer
    rates = [learning_rate(optimizer, step, 12) for step in range(12)]
    rates += [learning_rate(optimizer, step, 60) for step in range(60)]
    assert [line["lr"] for line in log] == pytest.approx(rates)
    again = ss.resume(tmp_path / "part", extend=3, **QUIET)
    assert again[0].cfg.metadata["training"]["extends"] == 72


def test_an_extension_begins_with_the_saved_weights(acts, tmp_path):
    [before] = ss.train(acts, CONFIGS[:1], out=tmp_path / "run", **SETTINGS, **QUIET)
    seen = []

    class Look(ss.Callback):
        def on_batch(self, run, step, x):
            seen.append((step, run.learners[0].sae().rescale_(run.scale)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ss.resume(tmp_path / "run", extend=4, callbacks=[Look()], **QUIET)
    [(step, sae)] = seen
    assert step == 12
    for name in ("W_enc", "b_enc", "W_dec", "b_dec"):
        torch.testing.assert_close(getattr(sae, name), getattr(before, name), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("steps", [12, 13, 14])
def test_an_extension_draws_pools_as_often_as_before(acts, tmp_path, steps):
    pools = []

    class Look(ss.Callback):
        def on_step(self, run, learner, step, stats):
            pools.append(learner.pool.clone())

    config = ss.SAEConfig(48, 4, pool=PoolConfig(score="uniform", size=Multiplier(3), refresh=4))
    ss.train(acts, [config], out=tmp_path / "run", **SETTINGS | {"steps": steps}, **QUIET)
    ss.resume(tmp_path / "run", extend=12, callbacks=[Look()], **QUIET)
    changes = [step for step in range(1, 12) if not torch.equal(pools[step - 1], pools[step])]
    assert changes == [step for step in range(1, 12) if (steps + step) % 4 == 0]
    assert all(int(pool.sum()) == 12 for pool in pools)


def test_results_of_the_saes_before_an_extension_are_not_in_the_way_at_its_end(acts, tmp_path):
    [sae] = ss.train(acts, CONFIGS[:1], out=tmp_path / "run", **SETTINGS, **QUIET)
    results = sae.folder / "evals"
    results.mkdir()
    refused = pytest.raises(ss.UserError, match=r"extend: .*batchtopk-s0 holds evals of the SAE before the extension")
    with refused:
        ss.resume(tmp_path / "run", extend=4, **QUIET)
    results.rename(tmp_path / "evals")
    stopped(ss.resume, tmp_path / "run", extend=4, at=14)
    results.mkdir()  # evaluated before the extension goes on
    with refused:
        ss.resume(tmp_path / "run", **QUIET)
    results.rmdir()
    assert ss.resume(tmp_path / "run", **QUIET)[0].cfg.metadata["training"]["steps"] == 16


def test_a_score_whose_state_is_not_saved_cannot_be_extended(acts, tmp_path):
    ss.train(acts, [ss.sampled(48, 4, "gate", l=3)], out=tmp_path / "run", **SETTINGS, **QUIET)
    with pytest.raises(ss.UserError, match="extend: pools of the score 'gate' cannot be extended"):
        ss.resume(tmp_path / "run", extend=4, **QUIET)
    assert ss.resume(tmp_path / "run", **QUIET)[0].cfg.metadata["training"]["steps"] == 12


def test_errors(acts, activations, tmp_path):
    with pytest.raises(ss.UserError, match=r"folder = .*none'.*: holds no train.json"):
        ss.resume(tmp_path / "none", **QUIET)
    ss.train(activations, CONFIGS[:1], out=tmp_path / "memory", **SETTINGS, **QUIET)
    with pytest.raises(ss.UserError, match=r"its activations were given in memory; call ss.train"):
        ss.resume(tmp_path / "memory", **QUIET)
    ss.train(acts, CONFIGS[:1], out=tmp_path / "run", **SETTINGS, **QUIET)
    with pytest.raises(ss.UserError, match="extend = 0: must be at least 1"):
        ss.resume(tmp_path / "run", extend=0, **QUIET)
    record = tmp_path / "run" / "train.json"
    plain = json.loads(record.read_text())
    record.write_text(json.dumps(plain | {"device": "cuda"}))
    with pytest.raises(ss.UserError, match=r"train.json: changed since it was written"):
        ss.resume(tmp_path / "run", **QUIET)
    del plain["checksum"]
    record.write_text(json.dumps(plain | {"dtype": "int8"}))
    with pytest.raises(ss.UserError, match=r"train.json: dtype = 'int8'"):
        ss.resume(tmp_path / "run", **QUIET)
    record.write_text(json.dumps(plain))
    acts.unlink()
    with pytest.raises(ss.UserError, match="no such file"):
        ss.resume(tmp_path / "run", **QUIET)
