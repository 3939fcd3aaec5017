"""One SAE step by step: pools, the threshold, dead latents."""

from dataclasses import replace

import pytest
import torch

import sampled_sae as ss
from sampled_sae.method.config import Annealed, AuxKConfig, Fraction, InitConfig, PoolConfig, SAEConfig
from sampled_sae.training.learner import CLOSED, METRICS, Learner, Stats
from sampled_sae.training.run import Callback
from tests.small_runs import same_weights


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


@pytest.mark.parametrize("cut", ["group of one", "token"])
def test_threshold_of_topk_averages_the_smallest_kept_value_of_each_token(cut, activations):
    """As dictionary_learning does: the batch minimum would let far more than K latents per token pass."""
    config = ss.topk(48, 4) if cut == "group of one" else SAEConfig(48, 4, cut="token")
    learner = Learner(config, 16, 20, 0, torch.device("cpu"), torch.float32)
    values = []
    for step in range(13):
        before = learner.sae()
        learner.step(activations[:200], step)
        if step > 10:
            top = before.pre_activations(activations[:200]).relu().topk(4, dim=1).values
            lowest = torch.where(top > 0, top, torch.inf).min(dim=1).values
            values.append(lowest[lowest.isfinite()].mean())
    torch.testing.assert_close(learner.threshold, (0.999 * values[0] + 0.001 * values[1]).detach())


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


def test_each_number_of_the_log_is_declared():
    assert [metric.name for metric in METRICS] == list(Stats._fields)


RESUMED = {
    "topk then batchtopk": ss.topk_then_batchtopk(48, 4, until=0.5),
    "covariance": ss.topk_then_batchtopk(48, 4, until=0.5, init=InitConfig("covariance")),
    "jumprelu": ss.jumprelu(48, 4),
    "memory": ss.sampled(48, 4, l=3, memory=0.9, pick="sample"),
    "gate": ss.sampled(48, 4, "gate", l=3),
    "inference_size": ss.sampled(48, 4, "uniform", l=3, inference_size=1.5),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_learner_continues_bit_for_bit_from_its_state(activations, name):
    """With the default recipe, before and after the switch from TopK to BatchTopK."""
    config = replace(RESUMED[name], auxk=AuxKConfig(dead_after=1000))

    def new() -> Learner:
        return Learner(config, 16, 20, 3, torch.device("cpu"), torch.float32)

    def run(learner: Learner, first: int, last: int) -> None:
        for step in range(first, last):
            learner.step(activations[step * 200 : (step + 1) * 200], step, measure=False)

    whole = new()
    run(whole, 0, 20)
    for stop in (1, 7, 13, 19):
        begun, resumed = new(), new()
        run(begun, 0, stop)
        resumed.load_state({name: value.clone() for name, value in begun.state().items()})
        run(resumed, stop, 20)
        assert same_weights(resumed.sae(), whole.sae())


def test_a_pool_with_a_memory_follows_the_average_of_the_scores(activations):
    learner = Learner(ss.sampled(48, 4, l=3, memory=0.75), 16, 10, 0, torch.device("cpu"), torch.float32)
    average = torch.zeros(48)
    for step in range(5):
        x = activations[step * 100 : (step + 1) * 100]
        q = relu(x, learner.weights).norm(dim=0) if step else None
        learner.step(x, step)
        if q is None:  # the first step moves b_dec
            q = relu(x, learner.weights).norm(dim=0)
        average = 0.75 * average + 0.25 * q
        assert set(average.topk(12).indices.tolist()) == set(learner.pool.nonzero()[:, 0].tolist())
    torch.testing.assert_close(learner.path.pool_state.memory, average)


@pytest.mark.parametrize(("size", "count"), [(1, 12), (2.5, 30), (4, 48)])
def test_latents_most_often_in_the_last_pools_are_open_at_inference(activations, tmp_path, size, count):
    pools = []

    class Recorder(Callback):
        def on_step(self, run, learner, step, stats):
            pools.append(learner.pool.clone())

    def train(size: float | None) -> ss.SAE:
        config = ss.sampled(48, 4, "uniform", l=3, inference_size=size)
        return ss.train(activations, config, steps=50, batch_size=200, callbacks=[Recorder()], progress=False)

    sae, plain = train(size), train(None)
    assert same_weights(sae, plain) or count < 48  # nothing is closed if all latents are open
    assert torch.equal(sae.W_enc, plain.W_enc) and torch.equal(sae.W_dec, plain.W_dec)
    if count < 48:
        order = torch.stack(pools[45:50]).sum(0).sort(descending=True, stable=True).indices
        is_open = sae.threshold < CLOSED
        assert set(is_open.nonzero()[:, 0].tolist()) == set(order[:count].tolist())
        assert len(sae.threshold.unique()) == 2 and sae.threshold.min() < plain.threshold
        fired = ss.SAE.load(sae.save(tmp_path / "sae")).encode(activations) > 0
        most = float((sae.pre_activations(activations)[:, is_open] > 0).sum() / len(fired))
        assert not fired[:, ~is_open].any()
        assert float(fired.sum() / len(fired)) == pytest.approx(min(4, most), rel=0.1)


def test_a_latent_that_is_worth_more_keeps_its_place_in_a_gated_pool(activations):
    """Useless latents leave the pool for latents that were not tried yet, until the useful ones are in it."""
    config = ss.sampled(
        48, 4, "gate", l=3, optimizer=ss.OptimizerConfig(lr=1e-9), auxk=AuxKConfig(alpha=0),
        init=ss.InitConfig(encoder_scale=0.5),
    )  # fmt: skip
    learner = Learner(config, 16, 10**6, 0, torch.device("cpu"), torch.float32)
    learner.step(activations[:100], 0)
    assert learner.pool.nonzero()[:, 0].tolist() == list(range(12))
    learner.weights.b_enc[:40] = -100.0  # these never fire again
    for step in range(1, 400):
        learner.step(activations[step % 40 * 100 :][:100], step)
    assert learner.pool[40:].all()
    assert learner.path.pool_state.score[40:].min() > learner.path.pool_state.score[:40].max() - 0.2


def test_gates_are_told_apart_however_far_they_drift(activations):
    """By themselves, exponentials of gates below -104 vanish and those of gates above 88 are infinite."""
    config = ss.sampled(48, 4, "gate", l=6, memory=0.0, lr=1e-9)
    learner = Learner(config, 16, 10**6, 0, torch.device("cpu"), torch.float32)
    for start in (0.0, -1000.0):
        gates = start + torch.arange(48.0)
        gates[40:] += 5000
        learner.path.pool_state.score.copy_(gates)
        learner.step(activations[:100], 0)
        assert learner.pool.nonzero()[:, 0].tolist() == list(range(24, 48))
        assert learner.path.pool_state.memory.isfinite().all()


def relu(x, weights):
    return torch.relu((x - weights.b_dec) @ weights.W_enc.T + weights.b_enc)
