"""What a run says about the folder that it finds."""

import shutil

import pytest
import torch

import sampled_sae as ss
from sampled_sae.config import read_file
from sampled_sae.method import rate
from sampled_sae.training import run
from sampled_sae.training.callbacks import read_log

COMMON = {"steps": 20, "batch_size": 200, "device": "cpu", "checkpoint_every": 5, "log_every": 5}


def test_a_run_without_its_checkpoints_begins_again_and_says_so(activations, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ss.train(activations, ss.batchtopk(48, 4), out=tmp_path, **COMMON)
    with pytest.raises(ss.UserError, match=r"holds a run already; resume \(--resume, in Python resume=True\)"):
        ss.train(activations, ss.batchtopk(48, 4), out=tmp_path, **COMMON)
    shutil.rmtree(tmp_path / "checkpoints")
    capsys.readouterr()
    ss.train(activations, ss.batchtopk(48, 4), out=tmp_path, resume=True, **COMMON)
    told = f"{tmp_path}: no checkpoint of this run is left; it begins again at step 0, with a new log.jsonl"
    assert capsys.readouterr().err.splitlines()[0] == told
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [0, 5, 10, 15, 19]


def test_a_run_keeps_the_rate_that_it_began_with(activations, tmp_path, monkeypatch, capsys):
    rule = ss.default_lr(16, 48, 4, 200, 20)
    whole = ss.train(activations, ss.batchtopk(48, 4), out=tmp_path / "whole", **COMMON)
    assert f"learning rate {rule:g}, from d_in, d_sae, K" in capsys.readouterr().err
    assert whole.cfg.training.optimizer.lr == rule
    assert read_log(tmp_path / "whole" / "log.jsonl")[1]["lr"] == pytest.approx(15 / 16 * rule)
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ss.train(activations, ss.batchtopk(48, 4), out=out, **COMMON)
    monkeypatch.setattr(rate, "default_lr", lambda *_: 0.5)  # a later version with another rule
    assert read_file(out / "run.json", "run")["config"]["saes"][0]["optimizer"]["lr"] == rule
    with pytest.raises(ss.UserError, match=f"optimizer.lr was {rule:g} and is now 0.25"):
        ss.train(activations, ss.batchtopk(48, 4, lr=0.25), out=out, resume=True, **COMMON)
    resumed = ss.train(activations, ss.batchtopk(48, 4), out=out, resume=True, **COMMON)
    assert resumed.cfg.training == whole.cfg.training and torch.equal(resumed.W_dec, whole.W_dec)


def test_resume_needs_a_folder(activations):
    with pytest.raises(ss.UserError, match="resume = True: needs the folder of the run; set out"):
        ss.train(activations, ss.batchtopk(48, 4), resume=True, **COMMON)


def test_the_record_begins_with_the_methods(activations, tmp_path):
    configs = [ss.topk(48, 4), ss.sampled(48, 4, "l2", 5, name="mine")]
    ss.train(activations, configs, out=tmp_path, **COMMON)
    record = read_file(tmp_path / "run.json", "run")
    assert record["methods"] == {"topk-s0": "topk", "mine": "sampled:score=l2,l=5"}
    assert next(key for key in record if key != "format_version") == "methods"
