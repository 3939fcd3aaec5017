"""Jobs of a sweep on several processes each, as on several GPUs."""

import pytest
import torch

from sampled_sae.sweeps import cancel, launch, worker
from sampled_sae.sweeps.spec import SweepConfig, completed
from sampled_sae.sweeps.store import Sweep
from tests.sweeps.conftest import SHARED, make_cached_spec
from tests.sweeps.test_local import when
from tests.sweeps.test_worker import weights


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_several_processes_train_a_job_together(tmp_path):
    settings = {"cache": {"shard_tokens": 3000}, "methods": "batchtopk", "evaluations": {"core": {"contexts": 3}}}
    spec = make_cached_spec(tmp_path, steps=400, checkpoint_every=50, **settings)
    alone, sweep = (Sweep.start(tmp_path / name, spec) for name in ("alone", "together"))
    stopper = when(lambda: sweep.entry("model-layer-1").state.step >= 50, lambda: cancel(sweep.folder))
    seen = launch(spec, sweep.folder, device="cpu", gpus_per_job=2)
    stopper.join()
    assert [each.status for each in seen] == ["finished", "cancelled"] and 50 <= seen[1].entry.state.step < 400
    seen = launch(spec, sweep.folder, device="cpu", gpus_per_job=2)
    assert [(each.status, each.entry.state.attempts) for each in seen] == [("finished", 1), ("finished", 2)]
    for name in alone.names:
        worker.work(alone.folder, name, device="cpu")
    # Latents may be divided over the processes, which rounds differently.
    [one], [other] = weights(alone, "model-layer-1"), weights(sweep, "model-layer-1")
    torch.testing.assert_close(one.W_enc, other.W_enc, atol=1e-5, rtol=1e-4)
    folders = [each.folder / "caches" / "model-layer-1-cache" for each in (alone, sweep)]
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == second and len(first) > 9


def test_an_error_of_several_processes(tmp_path):
    spec = SweepConfig.from_dict(completed({**SHARED, "activations": str(tmp_path / "missing.npy")}))
    [seen] = launch(spec, tmp_path / "s", device="cpu", gpus_per_job=2)
    assert seen.status == "failed" and "missing.npy" in seen.error
