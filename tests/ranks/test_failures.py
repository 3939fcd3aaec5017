"""What ends a training on several ranks: all of them end soon, with one line, and the last checkpoint is intact."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from sampled_sae.training import checkpoint
from tests.training import ranks

SOON = 60.0
"""Seconds within which all ranks must have ended."""
SCRIPT = "tests.ranks.disturbed"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    ranks.tensors(folder := tmp_path_factory.mktemp("alone") / "run")
    return ranks.content(folder)


def start(count: int, out: Path, what: str, rank: int, **options) -> subprocess.Popen:
    """A training in which `rank` does `what` at step 25."""
    command = ranks.torchrun(count, SCRIPT, out, what, rank, **options)
    patience = ranks.environment(SAMPLED_SAE_PATIENCE="10")
    return subprocess.Popen(
        command, env=patience, cwd=ranks.ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def ended(process: subprocess.Popen, out: Path) -> tuple[str, float]:
    """Errors that were printed, and the seconds from the disturbance to the end of all ranks."""
    _, printed = process.communicate(timeout=300)
    return printed, time.time() - float((out / "disturbed").read_text())


def lines(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if re.match(r"(error|stopped): ", line)]


def assert_goes_on(out: Path, alone: dict) -> None:
    """The last checkpoint is whole, and the training ends as if nothing had happened."""
    newest = max((out / "checkpoints").glob("step-*"))
    assert checkpoint.load(newest).step >= 20
    ranks.over_ranks(2, ranks.tensors, out)
    (out / "disturbed").unlink(missing_ok=True)
    assert ranks.content(out) == alone


@pytest.mark.parametrize(
    "what, line",
    [
        ("kill", r"error: another rank has ended.*; the checkpoint of step 20 is kept: resume"),
        ("sleep", r"error: rank 1 has made no progress for \d+ s \(in on_batch, disturbed.py:\d+\); the checkpoint of"),
        ("error", r"error: enough: of this rank alone"),
    ],
)
def test_one_rank_that_fails_ends_all(what, line, alone, tmp_path):
    process = start(3, out := tmp_path / "run", what, 1)
    printed, seconds = ended(process, out)
    assert process.returncode != 0 and seconds < SOON, printed
    assert len(lines(printed)) == 1 and re.match(line, lines(printed)[0]), printed
    assert_goes_on(out, alone)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_the_same_step_on_all_ranks(number, alone, tmp_path):
    """Ctrl-C reaches torchrun and all ranks; other signals torchrun passes on."""
    process = start(2, out := tmp_path / "run", "wait", 0)
    while not (out / "disturbed").exists():
        time.sleep(0.05)
        assert process.poll() is None
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    printed, seconds = ended(process, out)
    assert seconds < SOON
    found = lines(printed)
    assert len(found) == 1, printed
    step = int(re.match(r"stopped: interrupted at step (\d+); saved in .*, resume .* to continue", found[0])[1])
    assert step >= 25 and checkpoint.load(out / "checkpoints" / f"step-{step:09d}").step == step
    assert_goes_on(out, alone)


def test_torchruns_restart_resumes_by_itself(alone, tmp_path):
    process = start(2, out := tmp_path / "run", "kill-once", 1, max_restarts=1)
    printed, _ = ended(process, out)
    assert process.returncode == 0, printed
    (out / "disturbed").unlink()
    assert ranks.content(out) == alone


def test_a_restart_does_not_resume_a_training_of_another_job(tmp_path):
    rows, out = tmp_path / "rows.npy", tmp_path / "run"
    np.save(rows, ranks.rows().numpy())
    words = ["sampled_sae", "train", rows, "--out", out, "--steps", 4, "--batch-size", 64, "--d-sae", 32, "--k", 4]
    words += ["--methods", "batchtopk", "topk", "--device", "cpu"]
    common = {"env": ranks.environment(), "cwd": ranks.ROOT, "capture_output": True, "text": True}
    first = subprocess.run(ranks.torchrun(2, *words), **common)
    assert first.returncode == 0, first.stderr
    folders = [str(out / "saes" / name) for name in ("batchtopk-s0", "topk-s0")]
    assert first.stdout.split() == folders  # printed by one rank
    assert len(re.findall("^learning rate", first.stderr, re.M)) == 1
    before = {path: path.stat().st_mtime for path in out.rglob("*") if path.is_file()}
    again = subprocess.run(ranks.torchrun(2, *words, max_restarts=1), **common)
    assert again.returncode != 0
    found = lines(again.stderr)
    assert len(found) == 2 and all("holds a run already" in line for line in found)  # one line for each attempt
    assert {path: path.stat().st_mtime for path in out.rglob("*") if path.is_file()} == before
    wrong = subprocess.run(ranks.torchrun(2, *words, "--divide", "3x1", "--out", tmp_path / "other"), **common)
    assert lines(wrong.stderr) == ["error: divide = '3x1': is for 3 ranks, but there are 2"]
