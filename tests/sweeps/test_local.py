"""The launcher for one machine, with real worker processes on the CPU."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from sampled_sae import api
from sampled_sae.data.cache import open_cache
from sampled_sae.sweeps import cancel, launch, local, look
from sampled_sae.sweeps.store import Sweep
from sampled_sae.utils.errors import UserError
from tests.small_runs import same_weights
from tests.sweeps.conftest import make_cached_spec
from tests.sweeps.test_worker import weights


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def when(condition, action) -> threading.Thread:
    """Do something as soon as a condition holds."""

    def wait() -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if condition():
                action()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def pid(sweep: Sweep, name: str) -> int:
    return int(re.match(r".*:(\d+)", sweep.entry(name).state.worker)[1])


def test_two_workers_a_killed_one_a_failed_job_and_a_retry(tmp_path, make_spec):
    spec = make_spec("a", "b", "c", methods="batchtopk", steps=1200, checkpoint_every=100)
    (tmp_path / "b.npy").write_bytes((tmp_path / "a.npy").read_bytes())
    sweep = Sweep.start(tmp_path / "s", spec)
    killer = when(lambda: sweep.entry("a").state.step >= 100, lambda: os.kill(pid(sweep, "a"), signal.SIGKILL))
    seen = launch(spec, tmp_path / "s", workers=2, device="cpu")
    killer.join()
    assert [each.status for each in seen] == ["failed", "finished", "failed"]
    assert "killed by SIGKILL" in seen[0].error and "c.npy" in seen[2].error
    # A report of the sweep as it stands.
    written = api.report([tmp_path / "s"], tmp_path / "report", figures=False)
    assert {sae.name for part in written.sweeps for sae in part.saes} == {"batchtopk-s0"}
    # Failed jobs are run again only when asked for.
    assert [each.status for each in launch(spec, tmp_path / "s", device="cpu")] == ["failed", "finished", "failed"]
    (tmp_path / "c.npy").write_bytes((tmp_path / "a.npy").read_bytes())
    seen = launch(spec, tmp_path / "s", workers=2, device="cpu", retry_failed=True)
    assert [(each.status, each.entry.state.attempts) for each in seen] == [("finished", n) for n in (2, 1, 2)]
    for one, other in zip(weights(sweep, "a"), weights(sweep, "b"), strict=True):
        assert same_weights(one, other)


def test_cancel_stops_workers_and_the_next_launch_continues(tmp_path, make_spec):
    spec = make_spec("a", "b", methods="batchtopk", steps=2000, checkpoint_every=200)
    sweep = Sweep.start(tmp_path / "s", spec)
    stopper = when(lambda: sweep.entry("a").state.step >= 200, lambda: cancel(tmp_path / "s"))
    seen = launch(spec, tmp_path / "s", workers=1, device="cpu")
    stopper.join()
    assert [each.status for each in seen] == ["cancelled", "cancelled"]
    assert 200 <= seen[0].entry.state.step < 2000
    (tmp_path / "a.npy").unlink()
    seen = launch(spec, tmp_path / "s", workers=1, device="cpu")
    assert [each.entry.state.attempts for each in seen] == [2, 1]


def test_ctrl_c_in_the_launcher_and_a_second_launcher(tmp_path, make_spec):
    spec = make_spec(steps=100_000, checkpoint_every=300)
    (tmp_path / "s.json").write_text(json.dumps(spec.to_dict()))
    command = [sys.executable, "-m", "sampled_sae", "sweep", str(tmp_path / "s.json"), "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    reached = when(
        lambda: (tmp_path / "s" / "sweep.json").exists() and Sweep(tmp_path / "s").entry("a").state.step >= 300,
        lambda: None,
    )
    reached.join()
    assert [each.status for each in look(tmp_path / "s")] == ["running"]
    with pytest.raises(UserError, match="another process is at work there"):
        launch(spec, tmp_path / "s", device="cpu")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command continues" in err
    assert [each.status for each in look(tmp_path / "s")] == ["interrupted"]


def test_a_worker_whose_launcher_is_gone_too_is_seen_as_interrupted(tmp_path, make_spec):
    sweep = Sweep.start(tmp_path / "s", make_spec())
    sweep.update("a", status="running", worker="host:1")
    [seen] = look(sweep)
    assert (seen.status, seen.error) == ("interrupted", "its worker is gone")


def test_slots(monkeypatch):
    assert [slot.name for slot in local.slots(2, "cpu")] == ["CPU 0", "CPU 1"]
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [slot.environment for slot in local.slots()] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [slot.name for slot in local.slots(1)] == ["GPU 3"]
    with pytest.raises(UserError, match="workers = 3: must be from 1 to 2; the number of GPUs is 2"):
        local.slots(3)
    assert local.slots(gpus_per_job=2) == [("GPU 3, 5", "cuda", {"CUDA_VISIBLE_DEVICES": "3,5"}, 2)]
    with pytest.raises(UserError, match="gpus_per_job = 3: must be at most 2; the number of GPUs is 2"):
        local.slots(gpus_per_job=3)
    assert len(local.slots(4, "cpu")) == 4
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="device = 'cuda'"):
        local.slots(None, "cuda")


def test_jobs_wait_for_the_cache_that_they_read(tmp_path, capsys):
    spec = make_cached_spec(tmp_path, evaluations={"core": {"contexts": 3}})
    text = tmp_path / "text.txt"
    text.rename(tmp_path / "away")
    seen = launch(spec, tmp_path / "s", workers=2, device="cpu")
    assert [each.status for each in seen] == ["failed", "failed", "pending", "pending"]
    said = capsys.readouterr().err
    assert re.search(r"model-layer-1-part-1: not started, because model-layer-1-cache-[12] is not finished", said)
    (tmp_path / "away").rename(text)
    seen = launch(spec, tmp_path / "s", workers=2, device="cpu", retry_failed=True)
    assert [(each.status, each.entry.state.attempts) for each in seen] == [("finished", n) for n in (2, 2, 1, 1)]
    sweep, folder = Sweep(tmp_path / "s"), tmp_path / "s" / "caches" / "model-layer-1-cache-1"
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock")[0] == "cache.json"
    assert len(open_cache(folder)) == spec.cached_tokens() == 20 * 64 + 60
    # The same as a training on that cache alone.
    [sae] = weights(sweep, "model-layer-1-part-2")
    [job] = [entry.job for entry in map(sweep.entry, sweep.names) if entry.job.name == "model-layer-1-part-2"]
    [alone] = api.train(str(folder), list(job.saes), steps=20, batch_size=64, heldout_tokens=60, device="cpu")
    assert same_weights(sae, alone)
    written = api.report([tmp_path / "s"], tmp_path / "report", figures=False)
    assert {sae.name for part in written.sweeps for sae in part.saes} == {"batchtopk-s0", "topk-s0"}
