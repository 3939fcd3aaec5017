"""What only a GPU shows: recorded steps against launched ones, resume, several SAEs at once. Skipped without one."""

from dataclasses import replace

import pytest
import torch

import sampled_sae as ss
from sampled_sae.kernels import auxk
from sampled_sae.kernels.path import FastPath
from sampled_sae.method.config import AuxKConfig, PoolConfig, SAEConfig, Scope
from sampled_sae.training import checkpoint
from sampled_sae.training.learner import Learner
from sampled_sae.training.run import Callback

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

M, K, D, B = 640, 6, 48, 96
CONFIGS = {
    "batchtopk": ss.batchtopk(M, K),
    "auxk": ss.batchtopk(M, K, auxk=AuxKConfig(dead_after=3 * B)),
    "topk then batchtopk": ss.topk_then_batchtopk(M, K, until=0.5),
    "groups": SAEConfig(M, K, pool=PoolConfig(scope=Scope(tokens=24))),
    "matryoshka": ss.matryoshka(M, K, auxk=AuxKConfig(dead_after=3 * B)),
    "matryoshka in a small pool": ss.sampled(M, K, "l2", 5, prefixes=(40, 200)),
    "small pool": ss.sampled(M, K, "l2", 5),
    "small pool, auxk": ss.sampled(M, K, "l2", 5, auxk=AuxKConfig(dead_after=3 * B)),
    "random pool": ss.sampled(M, K, "uniform", 4),
    "sampled pool": ss.sampled(M, K, "l2", 5, pick="sample"),
    "memory": ss.sampled(M, K, "l2", 5, memory=0.9),
    "released": ss.released(M, K, "entropy", 0.5, at=0.5),
    "annealed": ss.annealed(M, K, "uniform", 0.3),
    "jumprelu": ss.jumprelu(M, K, auxk=AuxKConfig(dead_after=3 * B)),
    "jumprelu with prefixes": ss.jumprelu(M, K, prefixes=(40, 200, M)),
}


def batch(step: int) -> torch.Tensor:
    return torch.randn(B, D, generator=torch.Generator().manual_seed(step)).cuda()


def after(config: SAEConfig, steps: int, recorded: bool, others: int = 0) -> list[torch.Tensor]:
    """The weights after so many steps, beside so many other learners."""
    cuda = torch.device("cuda")
    learners = [Learner(replace(config, seed=s), D, steps, s, cuda, torch.float32) for s in range(1 + others)]
    for learner in learners:
        assert isinstance(learner.path, FastPath)
        learner.path.recorder.enabled = recorded
    for step in range(steps):
        for learner in learners:
            learner.step(batch(step), step, measure=step % 3 == 0)
    return [w.clone() for w in learners[0].weights]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_recorded_step_is_the_launched_one(name):
    launched, recorded = after(CONFIGS[name], 16, False), after(CONFIGS[name], 16, True)
    assert all(map(torch.equal, launched, recorded))


@pytest.mark.parametrize("name", ["batchtopk", "auxk", "small pool, auxk", "random pool"])
def test_alone_equals_together(name):
    alone, together = after(CONFIGS[name], 16, True), after(CONFIGS[name], 16, True, others=2)
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_resumed_run_ends_with_the_same_weights(name, tmp_path):
    x = torch.randn(4000, D, generator=torch.Generator().manual_seed(0))
    common = {"steps": 24, "batch_size": B, "device": "cuda", "progress": False, "heldout_tokens": 200}
    whole = ss.train(x, CONFIGS[name], **common)

    out = tmp_path / "run"

    class Stop(Callback):
        def on_step(self, run, learner, step, stats):
            if step == 13:
                raise ss.Interrupted("stop")

    with pytest.raises(ss.Interrupted):
        ss.train(x, CONFIGS[name], out=out, checkpoint_every=10, callbacks=[Stop()], **common)
    resumed = ss.train(x, CONFIGS[name], out=out, resume=True, checkpoint_every=10, **common)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recorded", [False, True])
def test_auxk_beside_the_sparse_pass_is_the_one_after_it(recorded, monkeypatch):
    beside = after(CONFIGS["auxk"], 40, recorded)
    monkeypatch.setattr(auxk, "BESIDE", False)
    assert all(map(torch.equal, beside, after(CONFIGS["auxk"], 40, recorded)))


def test_a_checkpoint_written_beside_the_steps_is_of_its_own_step(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SMALL", 0)
    test_a_resumed_run_ends_with_the_same_weights("auxk", tmp_path)


@pytest.mark.parametrize("log_every", [1, 10])
def test_an_overflow_is_found_with_its_step_and_row(log_every, tmp_path):
    x = torch.randn(4000, D, generator=torch.Generator().manual_seed(0))

    class Spoil(Callback):
        def on_checkpoint(self, run, step, folder):
            batch = run.stream.batch
            run.stream.batch = lambda index: batch(index).index_fill(0, torch.tensor(7), 1e25 if index == 13 else 1.0)

    common = {"steps": 40, "batch_size": B, "device": "cuda", "progress": False, "heldout_tokens": 200}
    settings = {"out": tmp_path, "checkpoint_every": 12, "log_every": log_every, "callbacks": [Spoil()]}
    with pytest.raises(ss.UserError, match=r"batch 13: 1e\+25 in row \d+: its square .* step 12 is kept"):
        ss.train(x, ss.batchtopk(M, K), **settings, **common)


def test_graphs_of_finished_saes_are_not_freed_within_a_recording(monkeypatch):
    config, finished = CONFIGS["batchtopk"], []
    for seed in range(6):
        learner = Learner(config, D, 16, seed, torch.device("cuda"), torch.float32)
        for step in range(4):
            learner.step(batch(step), step)
        learner.itself = learner  # garbage that only the collector finds
        finished.append(learner)
    del learner
    update = FastPath._update

    def beside_garbage(self, *inputs):
        if finished:
            finished.pop()
        assert len([[] for _ in range(100_000)])  # so many objects that the collector begins
        return update(self, *inputs)

    expected = after(config, 16, True)
    monkeypatch.setattr(FastPath, "_update", beside_garbage)
    assert all(map(torch.equal, expected, after(config, 16, True)))
