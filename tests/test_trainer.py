import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import sampled_sae as ss
from sampled_sae import checkpoint, plain, run, trainer
from sampled_sae.config import AuxKConfig, SAEConfig
from sampled_sae.evals.reconstruction import by_threshold
from sampled_sae.learner import Learner
from sampled_sae.pool_config import Annealed, Fraction, PoolConfig, Released, Scope, Size
from sampled_sae.runlog import read_log

QUIET = {"progress": False, "batch_size": 200, "device": "cpu"}


def same_weights(a: ss.SAE, b: ss.SAE) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return all(torch.equal(mine[name].nan_to_num(-1), other[name].nan_to_num(-1)) for name in mine)


FAMILY = {
    "batchtopk": ss.batchtopk(48, 4),
    "topk": ss.topk(48, 4),
    "topk then batchtopk": ss.topk_then_batchtopk(48, 4),
    "l2": ss.sampled(48, 4, l=3),
    "entropy": ss.sampled(48, 4, "entropy", l=3),
    "uniform": ss.sampled(48, 4, "uniform", l=3),
    "sampled pick": ss.sampled(48, 4, l=3, pick="sample"),
    "released": ss.released(48, 4, at=0.5),
    "annealed": ss.annealed(48, 4),
    "groups": SAEConfig(48, 4, pool=PoolConfig("uniform", Size(10), scope=Scope(tokens=50, then=20, until=0.5))),
    "kept pool": SAEConfig(48, 4, pool=PoolConfig("uniform", Fraction(0.4), refresh=4, schedule=Released(0.6))),
    "auxk": replace(ss.sampled(48, 4, l=2), auxk=AuxKConfig(dead_after=800)),
}


@pytest.mark.parametrize("name", FAMILY)
def test_the_whole_family_trains(name, activations):
    [sae] = ss.train(activations, [FAMILY[name]], steps=40, **QUIET)
    assert sae.W_enc.shape == (16, 48)
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(48))
    assert all(torch.isfinite(value).all() for value in sae.parameters())


def test_training_explains_the_data(activations):
    config = replace(ss.batchtopk(64, 4), optimizer=ss.OptimizerConfig(lr=3e-3))
    [sae] = ss.train(activations, [config], steps=400, **QUIET)
    result = by_threshold(sae, activations)
    assert result.fve > 0.8
    assert abs(result.l0 - 4) < 0.3


def test_l_of_m_over_k_is_batchtopk_bit_for_bit(activations):
    """Codes, loss and weights after 20 steps."""
    configs = [ss.batchtopk(48, 4), ss.sampled(48, 4, l=48 / 4), ss.sampled(48, 4, "entropy", l=1000)]
    learners = [Learner(config, 16, 20, 0, torch.device("cpu"), torch.float32) for config in configs]
    for step in range(20):
        stats = [learner.step(activations[step * 200 : (step + 1) * 200], step) for learner in learners]
        assert stats[0].loss == stats[1].loss == stats[2].loss
    saes = [learner.sae() for learner in learners]
    assert same_weights(saes[0], saes[1])
    assert same_weights(saes[0], saes[2])
    assert torch.equal(saes[0].encode(activations), saes[1].encode(activations))


def test_alone_equals_together(activations):
    together = ss.train(activations, list(FAMILY.values()), steps=25, **QUIET)
    for config, beside in zip(FAMILY.values(), together, strict=True):
        [alone] = ss.train(activations, [config], steps=25, **QUIET)
        assert same_weights(alone, beside), config.name


def test_seeds_matter_and_repeat(activations):
    config = ss.sampled(48, 4, "uniform", l=3)
    a, b = ss.train(activations, [config, replace(config, seed=1)], steps=10, seed=0, **QUIET)
    [again] = ss.train(activations, [config], steps=10, seed=0, **QUIET)
    assert same_weights(a, again)
    assert not same_weights(a, b)


def test_saved_on_raw_activations_equals_trained_on_scaled_ones(activations, tmp_path):
    raw = 37.0 * activations + 5
    config = ss.batchtopk(48, 4)
    [saved] = ss.train(raw, [config], steps=30, out=tmp_path / "run", **QUIET)
    saved = ss.SAE.load(tmp_path / "run" / "saes" / "batchtopk-s0")
    c = saved.metadata["training"]["scale"]
    learner = Learner(config, 16, 30, 0, torch.device("cpu"), torch.float32)
    stream = trainer.open_stream(raw, 200, 65_536, 0)
    for step in range(30):
        learner.step(stream.batch(step) / c, step)
    scaled = learner.sae()
    scaled.threshold.copy_(saved.threshold / c)
    torch.testing.assert_close(saved(raw), c * scaled(raw / c), rtol=1e-4, atol=1e-3)
    assert abs(c - float(raw.square().sum(1).mean().sqrt())) < 0.05 * c


def test_a_dead_latent_comes_back_through_auxk(activations):
    """A latent too weak ever to be kept learns again from what the others miss; without AuxK it stays dead."""

    def tokens_silent(alpha: float) -> int:
        config = replace(
            ss.batchtopk(24, 4),
            auxk=AuxKConfig(alpha=alpha, dead_after=400),
            optimizer=ss.OptimizerConfig(lr=3e-3, warmup_steps=0),
        )
        learner = Learner(config, 16, 1000, 0, torch.device("cpu"), torch.float32)
        learner.weights.W_enc[7] *= 0.01
        for step in range(500):
            learner.step(activations[torch.arange(200) + 200 * (step % 20)], step, measure=False)
        return int(learner.tokens_since_fired[7])

    assert tokens_silent(alpha=0.0) == 500 * 200
    assert tokens_silent(alpha=1 / 32) < 20 * 200


def test_threshold_average_starts_late_and_follows_the_smallest_kept_value(activations):
    learner = Learner(ss.batchtopk(48, 4), 16, 20, 0, torch.device("cpu"), torch.float32)
    values = []
    for step in range(13):
        before = learner.sae()
        learner.step(activations[:200], step)
        if step > 10:
            z = before.pre_activations(activations[:200])
            values.append(z.flatten().topk(4 * 200).values.min())
        else:
            assert learner.threshold.isnan()
    torch.testing.assert_close(learner.threshold, (0.999 * values[0] + 0.001 * values[1]).detach())


def test_calibrated_l0_is_k_on_held_out_tokens(activations):
    [sae] = ss.train(activations[:3000], [FAMILY["uniform"]], steps=30, heldout=activations[3000:], **QUIET)
    assert (sae.encode(activations[3000:]) > 0).sum() == 4 * 1000


def test_the_log_has_what_was_promised(activations, tmp_path):
    ss.train(activations, [ss.sampled(48, 4, l=3)], steps=30, out=tmp_path, log_every=10, **QUIET)
    lines = read_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines] == [0, 10, 20, 29]
    wanted = {"loss", "fve", "l0", "threshold", "lr", "dead", "churn", "ever_pooled", "tokens_per_second", "sae"}
    assert wanted <= set(lines[-1])
    assert 0 < lines[-1]["churn"] < 1
    assert lines[-1]["ever_pooled"] > 12 / 48
    assert lines[-1]["l0"] == 4
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["config"]["saes"][0]["pool"]["size"] == {"kind": "multiplier", "l": 3}
    assert run["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("kind", ["tensor", "list", "generator", "memmap", "3-D"])
def test_every_kind_of_activations(kind, activations, tmp_path):
    np.save(tmp_path / "x.npy", activations.numpy())
    sources = {
        "tensor": activations,
        "list": list(activations.split(333)),
        "generator": (activations[torch.randperm(4000)[:333]] for _ in range(100)),
        "memmap": np.load(tmp_path / "x.npy", mmap_mode="r"),
        "3-D": activations.view(400, 10, 16),
    }
    [sae] = ss.train(sources[kind], [ss.batchtopk(48, 4)], steps=40, heldout_tokens=500, **QUIET)
    assert sae.d == 16


CHILD = """
import sys, torch, sampled_sae as ss
from dataclasses import replace
torch.set_num_threads(1)
out, resume = sys.argv[1], sys.argv[2] == "resume"
generator = torch.Generator().manual_seed(0)
x = (torch.rand(4000, 32, generator=generator) < .1).float() @ torch.randn(32, 16, generator=generator)
configs = [
    replace(ss.sampled(48, 4, "uniform", l=3), auxk=ss.AuxKConfig(dead_after=2000)),
    ss.SAEConfig(48, 4, pool=ss.PoolConfig("uniform", ss.Fraction(.4), refresh=7)),
    ss.topk_then_batchtopk(48, 4),
]
ss.train(x, configs, steps=400, batch_size=200, out=out, resume=resume, checkpoint_every=20, log_every=10, device="cpu")
"""


def child(out, how, **options):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(out), how],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **options,
    )


def finished_weights(out):
    folders = sorted((out / "saes").iterdir())
    assert len(folders) == 3
    return [ss.SAE.load(folder) for folder in folders]


def test_killed_at_any_moment_and_resumed_ends_the_same(tmp_path):
    assert child(tmp_path / "whole", "fresh").wait() == 0
    wanted = finished_weights(tmp_path / "whole")
    for attempt in range(3):
        out = tmp_path / f"killed{attempt}"
        process = child(out, "fresh")
        for _ in range(3):  # kill it several times, each at some moment after it has begun to make progress
            deadline = time.monotonic() + 60
            seen = sum(1 for _ in (out / "checkpoints").glob("step-*")) if out.exists() else 0
            while time.monotonic() < deadline and process.poll() is None:
                now = len(list((out / "checkpoints").glob("step-*"))) if out.exists() else 0
                if now > seen or now == 2:
                    break
                time.sleep(0.002)
            time.sleep(0.013 * (attempt + 1))
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = child(out, "resume")
        assert process.wait() == 0, process.stderr.read()
        for a, b in zip(wanted, finished_weights(out), strict=True):
            assert same_weights(a, b)
        steps = [(line["sae"], line["step"]) for line in read_log(out / "log.jsonl")]
        assert len(steps) == len(set(steps)) == 3 * 41


def test_ctrl_c_saves_and_resume_ends_the_same(tmp_path):
    assert child(tmp_path / "whole", "fresh").wait() == 0
    out = tmp_path / "stopped"
    process = child(out, "fresh")
    while not list((out / "checkpoints").glob("step-*")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    error = process.communicate()[1]
    assert process.returncode != 0
    assert "interrupted at step" in error
    step = int(error.split("interrupted at step ")[1].split(";")[0])
    assert checkpoint.load(out / "checkpoints" / f"step-{step:09d}").step == step
    assert child(out, "resume").wait() == 0
    for a, b in zip(finished_weights(tmp_path / "whole"), finished_weights(out), strict=True):
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
    line = "batchtopk-s0: .* by step 15: try a lower lr than 0.0003; the last good checkpoint is of step 10"
    with pytest.raises(ss.UserError, match=line):
        ss.train(activations, [ss.batchtopk(48, 4)], **run)
    assert sorted(path.name[-2:] for path in (tmp_path / "checkpoints").iterdir()) == ["05", "10"]


def test_defaults_of_the_last_step_are_checked_without_a_folder(activations):
    config = replace(ss.batchtopk(48, 4), optimizer=ss.OptimizerConfig(lr=3e38, warmup_steps=0, clip=float("inf")))
    with pytest.raises(ss.UserError, match="no longer finite by step 1"):
        ss.train(activations, [config], steps=1, **QUIET)


def test_activations_collected_in_inference_mode(activations):
    def collect():
        with torch.inference_mode():
            for _ in range(30):
                yield activations[:500] * 1.0

    [sae] = ss.train(collect(), ss.batchtopk(48, 4), steps=20, heldout_tokens=500, **QUIET)
    [same] = ss.train(
        (activations[:500] for _ in range(30)), ss.batchtopk(48, 4), steps=20, heldout_tokens=500, **QUIET
    )
    assert same_weights(sae, same)
    with torch.inference_mode():
        ss.train(activations, [ss.batchtopk(48, 4)], steps=3, **QUIET)


def test_a_bad_scope_is_refused_before_anything_is_done(activations, tmp_path):
    config = SAEConfig(48, 4, pool=PoolConfig(scope=Scope(tokens=1, then=30, until=0.7)))
    with pytest.raises(ss.UserError, match="scope of 30 tokens: must divide batch_size = 200"):
        ss.train(activations, [config], steps=10, out=tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


def test_resume_refuses_other_activations_and_odd_folders(activations, tmp_path, monkeypatch):
    out = tmp_path / "run"
    common = {"steps": 20, "out": out, "checkpoint_every": 5, **QUIET}
    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "finish", lambda *_: (_ for _ in ()).throw(RuntimeError("power cut")))
        with pytest.raises(RuntimeError):
            ss.train(activations, [ss.batchtopk(48, 4)], **common)
    with pytest.raises(ss.UserError, match="not those that the run"):
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


@pytest.mark.parametrize("refresh", [1, 10])
def test_a_kept_pool_is_drawn_as_often_as_asked_also_while_it_grows(refresh, activations):
    pool = PoolConfig("uniform", Fraction(0.3), schedule=Annealed(1.0), refresh=refresh)
    learner = Learner(SAEConfig(48, 4, pool=pool), 16, 100, 0, torch.device("cpu"), torch.float32)
    pools = []
    for step in range(60):
        learner.step(activations[:200], step, measure=False)
        pools.append(tuple(learner.pool.tolist()))
    assert len(set(pools)) == 60 // refresh
    assert sum(pools[0]) < sum(pools[-1])


def test_out_of_memory_on_the_way_says_what_to_lower(activations, tmp_path, monkeypatch):
    settings = {"steps": 12, "out": tmp_path, "checkpoint_every": 5, **QUIET}
    step = Learner.step

    def full(self, x, number, measure=True):
        if number == 7:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return step(self, x, number, measure)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", full)
        with pytest.raises(ss.UserError, match=r"out of memory on cpu at step 7: lower .* step 5 is kept"):
            ss.train(activations, [ss.batchtopk(48, 4)], **settings)
    assert len(ss.train(activations, [ss.batchtopk(48, 4)], resume=True, **settings)) == 1


def test_what_activations_take_is_counted(activations):
    class Taking:
        width, heldout, memory = activations.shape[1], activations[:100], 10**15

        def batch(self, index):
            return activations[: QUIET["batch_size"]]

    with pytest.raises(ss.UserError, match=r"for activations needed .* buffer_tokens"):
        ss.train(Taking(), ss.batchtopk(48, 4), steps=5, **QUIET)
