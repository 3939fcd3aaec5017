"""Sweeps on a real Slurm: preemption, both signals, failures, retries and cancellation.

Not part of `make test`; `make test-cluster` runs them.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sampled_sae.sweeps import cancel, launch, look, worker
from sampled_sae.sweeps.slurm import read_ids, states
from sampled_sae.sweeps.spec import SweepConfig, completed
from sampled_sae.sweeps.store import Sweep
from sampled_sae.utils.errors import UserError
from tests.small_runs import same_weights
from tests.sweeps.conftest import make_cached_spec
from tests.sweeps.test_worker import weights

SPEC = {
    **{"methods": ["batchtopk", "sampled:l=3"], "d_sae": 32, "k": 4, "optimizer": {"lr": 1e-3}},
    **{"batch_size": 64, "heldout_tokens": 200, "checkpoint_every": 200},
    "slurm": {"partition": "low", "gpus_per_job": 0, "cpus_per_job": 1, "minutes": 30},
}


@pytest.fixture
def make_spec(tmp_path: Path, activations, cluster, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    np.save(tmp_path / "a.npy", activations.numpy())
    np.save(tmp_path / "b.npy", 2 * activations.numpy())

    def make(*names: str, steps: int, **changes) -> SweepConfig:
        files = [str(tmp_path / f"{name}.npy") for name in names]
        return SweepConfig.from_dict(completed({**SPEC, "activations": files, "steps": steps, **changes}))

    return make


def until(sweep: Sweep, condition, seconds: float = 240) -> list:
    """Look at the sweep until a condition on its jobs holds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        seen = look(sweep)
        if condition(seen):
            return seen
        time.sleep(0.3)
    logs = "\n".join(path.read_text()[-3000:] for path in (sweep.folder / "slurm").glob("*.err"))
    raise AssertionError(f"{seen}\n{logs}")


def stand_still(sweep: Sweep, files: dict[str, Path], seconds: float = 240) -> None:
    """Stop the process of each job as soon as its file is there."""
    end, left = time.monotonic() + seconds, dict(files)
    while left:
        assert time.monotonic() < end, left
        time.sleep(0.01)
        for name in [name for name, file in left.items() if file.exists()]:
            del left[name]
            os.kill(int(re.match(r".*:(\d+)", sweep.entry(name).state.worker)[1]), signal.SIGSTOP)


def ended(seen: list) -> bool:
    return all(each.status in ("finished", "failed", "cancelled") for each in seen)


def stopped_at(sweep: Sweep) -> dict[str, list[int]]:
    """Steps at which each job was stopped, by its name, from the errors of its workers."""
    ids = read_ids(sweep)
    logs = {name: (sweep.folder / "slurm" / f"{number}_0_log.err").read_text() for name, number in ids.items()}
    return {name: [int(n) for n in re.findall(r"interrupted at step (\d+)", log)] for name, log in logs.items()}


def test_preempted_and_signalled_jobs_finish_with_the_same_weights(tmp_path, make_spec):
    spec = make_spec("a", "b", steps=4000)
    launch(spec, tmp_path / "s", "slurm")
    sweep = Sweep(tmp_path / "s")
    assert {each.status for each in look(sweep)} <= {"queued", "running"}
    until(sweep, lambda seen: all(each.entry.state.step >= 200 for each in seen))
    # A second launch leaves jobs alone that are in progress.
    before = read_ids(sweep)
    launch(spec, tmp_path / "s", "slurm")
    assert read_ids(sweep) == before

    blocker = ["sbatch", "--partition=high", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 2"]
    subprocess.run(blocker, check=True, capture_output=True)
    until(sweep, lambda seen: all(each.entry.state.attempts == 2 for each in seen))
    first = stopped_at(sweep)
    assert all(len(steps) == 1 for steps in first.values())
    until(sweep, lambda seen: all(each.entry.state.step > first[each.entry.job.name][0] for each in seen))

    # Each of the signals alone.
    for name, number in (("a", "TERM"), ("b", "USR2")):
        subprocess.run(["scancel", f"--signal={number}", before[name]], check=True)
    seen = until(sweep, ended)
    assert [(each.status, each.entry.state.attempts) for each in seen] == [("finished", 3)] * 2
    for name, steps in stopped_at(sweep).items():
        assert len(steps) == 2 and 200 <= steps[0] < steps[1] < 4000, (name, steps)

    whole = Sweep.start(tmp_path / "whole", spec)
    for name in ("a", "b"):
        worker.work(whole.folder, name, device="cpu")
        for one, other in zip(weights(whole, name), weights(sweep, name), strict=True):
            assert same_weights(one, other)


def test_a_job_continues_after_its_time_limit(tmp_path, make_spec):
    slurm = SPEC["slurm"] | {"minutes": 1, "seconds_to_stop": 5}
    launch(make_spec("a", steps=10**7, slurm=slurm), tmp_path / "s", "slurm")
    sweep = Sweep(tmp_path / "s")
    until(sweep, lambda seen: seen[0].entry.state.attempts == 2)
    [step] = stopped_at(sweep)["a"]
    until(sweep, lambda seen: seen[0].entry.state.step > step)
    cancel(tmp_path / "s")
    until(sweep, ended)


def test_failures_retries_and_cancellation(tmp_path, make_spec):
    spec = make_spec("a", "missing", steps=20_000)
    launch(spec, tmp_path / "s", "slurm")
    sweep = Sweep(tmp_path / "s")
    [a, missing] = until(
        sweep,
        lambda seen: seen[0].entry.state.step >= 200 and [each.status for each in seen] == ["running", "failed"],
    )
    assert "missing.npy" in missing.error

    # A worker that is killed cannot note it; Slurm knows.
    os.kill(int(re.match(r".*:(\d+)", a.entry.state.worker)[1]), signal.SIGKILL)
    [a, _] = until(sweep, ended)
    assert a.status == "failed" and a.error.startswith("Slurm: FAILED")

    first = read_ids(sweep)
    assert [each.status for each in launch(spec, tmp_path / "s", "slurm")] == ["failed", "failed"]
    launch(spec, tmp_path / "s", "slurm", retry_failed=True)
    assert read_ids(sweep).keys() == first.keys() and not set(read_ids(sweep).values()) & set(first.values())
    until(sweep, lambda seen: seen[0].entry.state.step >= 400 and seen[0].status == "running")

    command = [sys.executable, "-m", "sampled_sae", "sweep", "status", str(tmp_path / "s")]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^a +running +2 ", table, re.M) and "Slurm job" in table

    cancel(tmp_path / "s")
    [a, _] = until(sweep, lambda seen: seen[0].status == "cancelled" and not sweep.is_held("a"))
    number = read_ids(sweep)["a"]
    time.sleep(2)
    until(sweep, lambda _: not states([number])[number].is_active, 60)
    assert states([number])[number].name == "CANCELLED"  # not requeued
    assert sweep.entry("a").state.status == "cancelled" and 400 <= a.entry.state.step < 20_000


def test_jobs_wait_for_a_cache_whose_writers_are_preempted(tmp_path, cluster, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = {"steps": 800, "cache": {"parts": 2, "shard_tokens": 500}}
    spec = make_cached_spec(tmp_path, slurm=SPEC["slurm"], **settings)
    launch(spec, tmp_path / "s", "slurm")
    sweep = Sweep(tmp_path / "s")
    writers, readers = sweep.names[:2], sweep.names[2:]
    # Both stand still in the middle of their part, until Slurm lets them go on to stop them (it sends SIGCONT first).
    parts = sweep.folder / str(sweep.entry(writers[0]).job.cache) / "parts"
    stand_still(sweep, {name: parts / f"{n}-of-2" / "part.json" for n, name in enumerate(writers, start=1)})
    assert [each.status for each in look(sweep)] == ["running"] * 2 + ["queued"] * 2
    blocker = ["sbatch", "--partition=high", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 2"]
    subprocess.run(blocker, check=True, capture_output=True)
    seen = until(sweep, ended)
    assert [(each.entry.job.name, each.status) for each in seen] == [(name, "finished") for name in sweep.names]
    assert all(sweep.entry(name).state.attempts == 2 for name in writers)
    assert [sweep.entry(name).state.attempts for name in readers] == [1, 1]

    # A writer that fails takes the jobs with it that wait for it; a retry runs them all.
    (tmp_path / "text.txt").rename(tmp_path / "away")
    launch(spec, tmp_path / "t", "slurm")
    failed = Sweep(tmp_path / "t")
    seen = until(failed, ended)
    assert [each.status for each in seen] == ["failed", "failed", "cancelled", "cancelled"]
    assert [each.error for each in seen[2:]] == [f"not started, because {writers[0]} is not finished"] * 2
    (tmp_path / "away").rename(tmp_path / "text.txt")
    launch(spec, tmp_path / "t", "slurm")  # without --retry-failed: nothing can run
    seen = look(failed)
    assert [each.status for each in seen] == ["failed", "failed", "cancelled", "cancelled"]
    assert [each.error for each in seen[2:]] == [f"not submitted, because {writers[0]} is failed"] * 2
    launch(spec, tmp_path / "t", "slurm", retry_failed=True)
    until(failed, lambda seen: all(each.status == "finished" for each in seen))
    for name in readers:
        for one, other in zip(weights(sweep, name), weights(failed, name), strict=True):
            assert same_weights(one, other)


def test_what_sbatch_refuses_is_one_line(tmp_path, make_spec):
    spec = make_spec("a", steps=10, slurm={"partition": "nowhere", "gpus_per_job": 0})
    with pytest.raises(UserError, match=r"sbatch refused the jobs .*invalid partition specified: nowhere") as caught:
        launch(spec, tmp_path / "s", "slurm")
    assert "\n" not in str(caught.value)
    assert [each.status for each in look(tmp_path / "s")] == ["pending"]
