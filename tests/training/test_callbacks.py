import re

import pytest

import sampled_sae as ss
from sampled_sae.training import callbacks
from sampled_sae.training.callbacks import Callback, JsonLines, read_log
from sampled_sae.training.run import Run
from sampled_sae.utils.errors import UserError
from tests.small_runs import QUIET


def test_resume_drops_what_will_be_written_again(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0}\n{"step": 10}\n{"step": 20}\n{"step": 3')
    log = JsonLines(path, from_step=20)
    log.write({"step": 20, "loss": float("nan")})
    assert read_log(path) == [{"step": 0}, {"step": 10}, {"step": 20, "loss": None}]
    new = JsonLines(tmp_path / "new.jsonl", from_step=0)
    new.write({"step": 0})
    new.write({"step": 1})
    assert read_log(tmp_path / "new.jsonl") == [{"format_version": 1, "step": 0}, {"step": 1}]


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


def test_invalid_log_to_is_found_before_training(activations, tmp_path):
    with pytest.raises(UserError, match=r"log_to\[0\] = 'mlflow': must be 'tensorboard' or 'wandb'"):
        ss.train(activations, ss.batchtopk(48, 4), steps=5, out=tmp_path / "run", log_to=["mlflow"], **QUIET)
    with pytest.raises(UserError, match="needs a folder; set out"):
        ss.train(activations, ss.batchtopk(48, 4), steps=5, log_to=["wandb"], **QUIET)
    assert not (tmp_path / "run").exists()


class Recorder(Callback):
    """Writes down what happens."""

    def __init__(self):
        self.events = []

    def needs_stats(self, step):
        return step == 2

    def on_batch(self, run, step, x):
        self.events.append(("batch", step, tuple(x.shape)))

    def on_step(self, run, learner, step, stats):
        self.events.append(("step", step, learner.config.name, stats and round(stats.l0, 3)))

    def on_checkpoint(self, run, step, folder):
        self.events.append(("checkpoint", step, folder.name))

    def on_end(self, run, saes):
        self.events.append(("end", saes and len(saes)))


def test_callbacks_are_called_in_order(activations, tmp_path):
    seen = Recorder()
    configs = [ss.batchtopk(48, 4, name="a", lr=1e-4), ss.topk(48, 4, name="b", lr=1e-4)]
    every = {"log_every": 100, "checkpoint_every": 2, "callbacks": [seen]}
    saes = ss.train(activations, configs, steps=4, out=tmp_path, **every, **QUIET)
    assert len(saes) == 2
    batch = [("batch", step, (200, 16)) for step in range(4)]
    assert seen.events == [
        *(batch[0], ("step", 0, "a", 4.0), ("step", 0, "b", 4.0)),  # the first and the last step are logged
        *(batch[1], ("step", 1, "a", None), ("step", 1, "b", None), ("checkpoint", 2, "step-000000002")),
        *(batch[2], ("step", 2, "a", 4.0), ("step", 2, "b", 4.0)),  # needs_stats
        *(batch[3], ("step", 3, "a", 4.0), ("step", 3, "b", 4.0), ("checkpoint", 4, "step-000000004")),
        ("end", 2),
    ]


@pytest.mark.parametrize(("seconds", "wanted"), [(0.0, [2, 4, 5]), (3600.0, [])])
def test_checkpoints_are_not_written_soon_after_one_another_unless_asked_for(
    seconds, wanted, activations, tmp_path, monkeypatch
):
    monkeypatch.setattr(callbacks, "CHECKPOINT_STEPS", 2)
    monkeypatch.setattr(callbacks, "CHECKPOINT_SECONDS", seconds)
    checked = []
    monkeypatch.setattr(Run, "check_weights", lambda run, step: checked.append(step))
    seen = Recorder()
    ss.train(activations, ss.batchtopk(48, 4), steps=5, out=tmp_path, callbacks=[seen], **QUIET)
    assert [event[1] for event in seen.events if event[0] == "checkpoint"] == wanted
    assert checked == [2, 4, 5]


def test_the_end_is_reported_of_a_run_that_stops_early(activations, tmp_path):
    class Stop(Recorder):
        def on_step(self, run, learner, step, stats):
            if step == 7:
                raise ss.Interrupted("enough")

    stop, after = Stop(), Recorder()
    settings = {"steps": 20, "out": tmp_path, "checkpoint_every": 5, **QUIET}
    with pytest.raises(ss.Interrupted, match="enough"):
        ss.train(activations, ss.batchtopk(48, 4), callbacks=[stop, after], **settings)
    assert stop.events[-1] == after.events[-1] == ("end", None)
    ss.train(activations, ss.batchtopk(48, 4), resume=True, callbacks=[after], **settings)
    assert [e[1] for e in after.events if e[0] == "batch"] == [*range(8), *range(5, 20)]


@pytest.mark.parametrize(("seeds", "shown"), [([0], ""), ([0, 0], ""), ([0, 1], r" to 0\.\d{3}")])
def test_progress_lines_have_the_fvu_of_their_step_once(seeds, shown, activations, capsys):
    configs = [ss.batchtopk(48, 4, seed=seed) for seed in seeds]
    ss.train(activations, configs, steps=20, batch_size=200, device="cpu", log_every=100)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("training: ")]
    found = [re.search(rf" batch FVU (0\.\d{{3}}){shown}$", line) for line in lines]
    assert len(lines) > 9 and all(found)
    assert len({match[1] for match in found if match}) > 5  # new in each line, though the log is rarer


def test_a_full_disk_while_logging_is_one_line(activations, tmp_path, monkeypatch):
    """As with /dev/full: each write to the log fails, also when the file is closed."""
    run = tmp_path / "run"
    settings = {"steps": 10, "out": run, "log_every": 2, "checkpoint_every": 3, **QUIET}

    class Full(Callback):
        def on_step(self, run_, learner, step, stats):
            if step == 5:
                (run / "log.jsonl").unlink()
                (run / "log.jsonl").symlink_to("/dev/full")

    with pytest.raises(UserError, match=r"log\.jsonl: the disk is full"):
        ss.train(activations, ss.batchtopk(48, 4), callbacks=[Full()], **settings)
    (run / "log.jsonl").unlink()
    assert isinstance(ss.train(activations, ss.batchtopk(48, 4), resume=True, **settings), ss.SAE)


def test_wandb_without_a_key_is_one_line(activations, tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.UsageError("api_key not configured (no-tty). call wandb.login(key=[your_api_key])")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match=r"log_to = 'wandb': cannot start .*run wandb login"):
        ss.train(activations, ss.batchtopk(48, 4), steps=5, out=tmp_path, log_to=["wandb"], **QUIET)
