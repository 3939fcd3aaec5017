"""Runs that are killed, interrupted or go wrong on the way, and how they go on."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import sampled_sae as ss
from sampled_sae.data import stream
from sampled_sae.data.source import TensorRows
from sampled_sae.data.stream import ActivationStream
from sampled_sae.training import checkpoint, run
from sampled_sae.training import step as plain
from sampled_sae.training.callbacks import Callback, read_log
from sampled_sae.training.units import Inputs
from tests.small_runs import QUIET, same_weights, three_saes

CHILD = "import sys; from pathlib import Path; from tests.small_runs import three_saes; three_saes(Path(sys.argv[1]))"


def child(out, **options):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(out)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        **options,
    )


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """The weights of a training that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    three_saes(out)
    return finished_weights(out)


def finished_weights(out):
    folders = sorted((out / "saes").iterdir())
    assert len(folders) == 3
    return [ss.SAE.load(folder) for folder in folders]


def test_killed_at_any_moment_and_resumed_ends_the_same(tmp_path, wanted):
    fork = multiprocessing.get_context("fork")  # a process that need not import torch again
    for attempt in range(3):
        out = tmp_path / f"killed{attempt}"
        for kill in range(3):  # each at some moment after it has made progress
            process, before = fork.Process(target=three_saes, args=(out, kill > 0)), newest(out)
            process.start()
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.is_alive() and newest(out) == before:
                time.sleep(0.002)
            time.sleep(0.005 * (3 * attempt + kill))
            process.kill()
            process.join()
        assert process.exitcode in (-signal.SIGKILL, 0)
        three_saes(out, resume=True)
        for a, b in zip(wanted, finished_weights(out), strict=True):
            assert same_weights(a, b)
        steps = [(line["sae"], line["step"]) for line in read_log(out / "log.jsonl")]
        assert len(steps) == len(set(steps)) == 3 * 21


def newest(out):
    """The name of the last checkpoint, if there is one."""
    return max((path.name for path in (out / "checkpoints").glob("step-*")), default=None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_resume_ends_the_same(number, tmp_path, wanted):
    out = tmp_path / "stopped"
    # Under nohup the tests, and so their processes, ignore SIGHUP.
    process = child(out, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    while not list((out / "checkpoints").glob("step-*")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    error = process.communicate()[1]
    assert process.returncode != 0
    assert "interrupted at step" in error
    step = int(error.split("interrupted at step ")[1].split(";")[0])
    assert checkpoint.load(out / "checkpoints" / f"step-{step:09d}").step == step
    three_saes(out, resume=True)
    for a, b in zip(wanted, finished_weights(out), strict=True):
        assert same_weights(a, b)


@pytest.mark.parametrize("log_every", [5, 100])
def test_weights_that_are_not_finite_stop_the_run_and_are_never_saved(log_every, activations, tmp_path, monkeypatch):
    real = plain.loss_and_gradients
    calls = []

    def poison(*arguments):
        calls.append(1)
        outcome = real(*arguments)
        if len(calls) == 13:
            outcome.gradients.W_enc[0, 0] = torch.nan
        return outcome

    monkeypatch.setattr(plain, "loss_and_gradients", poison)
    run = {"steps": 40, "out": tmp_path, "log_every": log_every, "checkpoint_every": 5, **QUIET}
    line = "batchtopk-s0: .* by step 15: try a lower lr than 0.001; the last good checkpoint is of step 10"
    with pytest.raises(ss.UserError, match=line):
        ss.train(activations, [ss.batchtopk(48, 4, lr=1e-3)], **run)
    assert sorted(path.name[-2:] for path in (tmp_path / "checkpoints").iterdir()) == ["05", "10"]


def test_defaults_of_the_last_step_are_checked_without_a_folder(activations):
    optimizer = ss.OptimizerConfig(lr=3e38, warmup_steps=0, cautious=False)
    config = ss.batchtopk(48, 4, optimizer=optimizer)
    with pytest.raises(ss.UserError, match="no longer finite by step 1"):
        ss.train(activations, [config], steps=1, **QUIET)


def test_resume_refuses_other_activations_and_odd_folders(activations, tmp_path, monkeypatch):
    out = tmp_path / "run"
    common = {"steps": 20, "out": out, "checkpoint_every": 5, **QUIET}
    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "finish", lambda *_: (_ for _ in ()).throw(RuntimeError("power cut")))
        with pytest.raises(RuntimeError):
            ss.train(activations, [ss.batchtopk(48, 4)], **common)
    with pytest.raises(ss.UserError, match="is on other activations: digest was"):
        ss.train(2 * activations, [ss.batchtopk(48, 4)], resume=True, **common)
    (out / "run.json").rename(tmp_path / "kept.json")
    with pytest.raises(ss.UserError, match="holds checkpoints of another run"):
        ss.train(activations, [ss.batchtopk(48, 4)], **common)
    (out / "run.json").write_text("{}")
    with pytest.raises(ss.UserError, match="not the record of a training run"):
        ss.train(activations, [ss.batchtopk(48, 4)], resume=True, **common)
    (tmp_path / "kept.json").rename(out / "run.json")
    [sae] = ss.train(activations, [ss.batchtopk(48, 4)], resume=True, **common)
    [again] = ss.train(activations, [ss.batchtopk(48, 4)], resume=True, **common)
    assert same_weights(sae, again)
    assert json.loads((out / "run.json").read_text())["finished"] is True
    assert not (out / "checkpoints").exists()


def test_out_of_memory_on_the_way_says_what_to_lower(activations, tmp_path):
    settings = {"steps": 12, "out": tmp_path, "checkpoint_every": 5, **QUIET}

    class Full(Callback):
        def on_batch(self, run, step, x):
            if step == 7:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ss.UserError, match=r"out of memory on cpu at step 7: lower .* step 5 is kept"):
        ss.train(activations, [ss.batchtopk(48, 4)], callbacks=[Full()], **settings)
    with torch.inference_mode():  # makes no difference
        assert len(ss.train(activations, [ss.batchtopk(48, 4)], resume=True, **settings)) == 1


def test_nohup_goes_on_when_the_terminal_is_closed(tmp_path):
    process = child(tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    while not list((tmp_path / "checkpoints").glob("step-*")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGHUP)
    assert "interrupted" not in process.communicate()[1]
    assert process.returncode == 0


class Huge(ActivationStream):
    """A stream with a token of 1e25 in row 17 of batch 13."""

    d_in, batch_size = 16, 200

    def __init__(self, x):
        self.x, self.heldout = x, x[:1000]

    def batch(self, index):
        batch = self.x[1000:][torch.arange(200) + 200 * (index % 15)].clone()
        if index == 13:
            batch[17, 3] = 1e25
        return batch


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("log_every", [1, 10])
def test_an_overflow_is_found_at_its_step_with_its_row(late, log_every, activations, tmp_path, monkeypatch):
    if late:  # as on a GPU, which is asked only when something is logged or saved
        batch = Inputs.batch

        def not_at_once(self, step, kept):
            with monkeypatch.context() as patch:
                patch.setattr(Inputs, "check", lambda self, kept: None)
                return batch(self, step, kept)

        monkeypatch.setattr(Inputs, "batch", not_at_once)
    seen = []

    class Steps(Callback):
        def on_step(self, run, learner, step, stats):
            seen.append(step)

    settings = {"steps": 40, "out": tmp_path, "checkpoint_every": 6, "log_every": log_every, "heldout_tokens": 1000}
    line = r"batch 13: 1e\+25 in row 17 of the batch: its square is beyond .* checkpoint of step 12 is kept"
    with pytest.raises(ss.UserError, match=line):
        ss.train(Huge(activations), ss.batchtopk(48, 4), callbacks=[Steps()], **settings, **QUIET)
    assert seen[-1] == (12 if log_every == 1 or not late else 17)
    assert sorted(path.name[-2:] for path in (tmp_path / "checkpoints").iterdir()) == ["06", "12"]


@pytest.mark.parametrize(
    "value, line", [(1e14, r"1e\+14 in row 726: its"), (torch.nan, r"NaN or .* \(first in row 726\)")]
)
def test_a_late_check_names_the_row_of_the_array(value, line, activations, monkeypatch):
    """As of activations on a GPU, whose values the run checks."""
    rows = TensorRows(1e-5 * activations)
    rows.tensor[726, 3] = value
    monkeypatch.setattr(stream, "check_batch", lambda batch, *_, **__: batch)
    with pytest.raises(ss.UserError, match=r"activations: batch \d+: " + line):
        ss.train(rows, ss.batchtopk(48, 4), steps=40, heldout_tokens=1, **QUIET)


@pytest.mark.parametrize("name", ["ü" * 101, "a\nb", "a\x1b[31m", "a\u2028b", "x" * 201, "", ".x", "a/b"])
def test_names_that_no_folder_can_have_are_found_before_training(name):
    with pytest.raises(ss.UserError, match="name"):
        ss.batchtopk(48, 4, name=name)
