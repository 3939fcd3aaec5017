import pytest

import sampled_sae as ss
from sampled_sae.training.callbacks import JsonLines, open_sinks, read_log
from sampled_sae.utils.errors import UserError


def test_resume_drops_what_will_be_written_again(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0}\n{"step": 10}\n{"step": 20}\n{"step": 3')
    log = JsonLines(path, from_step=20)
    log.write({"step": 20, "loss": float("nan")})
    log.close()
    assert read_log(path) == [{"step": 0}, {"step": 10}, {"step": 20, "loss": None}]


def test_tensorboard_gets_the_same_numbers(activations, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ss.train(
        activations,
        [ss.batchtopk(48, 4), ss.topk(48, 4)],
        steps=20,
        batch_size=200,
        out=tmp_path,
        log_every=5,
        log_to=["tensorboard"],
        progress=False,
        device="cpu",
    )
    lines = [line for line in read_log(tmp_path / "log.jsonl") if line["sae"] == "topk-s0"]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "topk-s0"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(line["step"], pytest.approx(line["loss"])) for line in lines]


def test_wandb_offline(activations, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ss.train(
        activations,
        [ss.batchtopk(48, 4)],
        steps=10,
        batch_size=200,
        out=tmp_path,
        log_to=["wandb"],
        progress=False,
        device="cpu",
    )
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_bad_sinks(tmp_path):
    with pytest.raises(UserError, match="log_to = 'mlflow': must be one of tensorboard, wandb"):
        open_sinks(tmp_path, ["mlflow"], 0)
    with pytest.raises(UserError, match="needs a folder; set out"):
        open_sinks(None, ["wandb"], 0)
