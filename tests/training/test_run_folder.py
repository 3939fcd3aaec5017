"""What a run says about the folder that it finds."""

import shutil

import pytest

import sampled_sae as ss
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
