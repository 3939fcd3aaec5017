"""JumpReLU: the sparse gradients against autograd through dense straight-through functions, and whole runs."""

import pytest
import torch

import sampled_sae as ss
from sampled_sae.method.config import AuxKConfig, JumpReLUConfig, OptimizerConfig, SAEConfig
from sampled_sae.method.parameters import JumpReLUParameters, start_parameters
from sampled_sae.sae import SAE
from sampled_sae.training.heldout import as_trained, by_threshold
from sampled_sae.training.jumprelu import JumpReLUPath
from sampled_sae.training.learner import Learner
from tests import reference

D, M, K, B, STEPS = 7, 30, 4, 40, 20


class Jump(torch.autograd.Function):
    """z where z > theta; `gain` of the window's gradient is theta for the codes, 1 for their number."""

    @staticmethod
    def forward(ctx, z, theta, width, codes):
        ctx.save_for_backward(z, theta, width)
        ctx.codes = codes
        return (z > theta) * (z if codes else torch.ones_like(z))

    @staticmethod
    def backward(ctx, gradient):
        z, theta, width = ctx.saved_tensors
        inside = ((z - theta) / width).abs() < 0.5
        on_theta = -1.0 * inside / width * (theta if ctx.codes else 1) * gradient
        return gradient * (z > theta) if ctx.codes else None, on_theta.sum(0), None, None


@pytest.mark.parametrize("prefixes", [None, (5, 12, M)])
@pytest.mark.parametrize("variant", ["relative", "dictionary_learning"])
def test_loss_and_gradients_are_those_of_the_definition(variant, prefixes):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, D, generator=generator, dtype=torch.float64)
    weights = start_parameters(D, M, generator, torch.float64)
    weights.b_dec.normal_(std=0.1, generator=generator)
    theta = torch.rand(M, generator=generator, dtype=torch.float64) + 0.3
    relative = variant == "relative"
    weights = JumpReLUParameters(*weights, threshold=theta.log() if relative else theta)
    settings = JumpReLUConfig(bandwidth=0.4, penalty=3.0, warmup_steps=4, variant=variant)
    config = ss.jumprelu(M, K, jumprelu=settings, prefixes=prefixes, auxk=AuxKConfig(alpha=0.3, k=2))
    path = JumpReLUPath(weights, config, STEPS, generator)
    selection = path.select(x, 3, torch.zeros(M, dtype=torch.bool))
    dead = torch.tensor([1, 2, 8])
    outcome = path.gradients(selection, dead)

    leaves = JumpReLUParameters(*(w.clone().requires_grad_() for w in weights))
    theta = leaves.threshold.exp() if relative else leaves.threshold
    z = (x - leaves.b_dec if relative else x) @ leaves.W_enc.T + leaves.b_enc
    width = 0.4 * (theta.detach() if relative else torch.ones(M, dtype=torch.float64))
    codes = Jump.apply(z, theta, width, True)
    loss = reference.prefix_loss(x, codes, leaves.W_dec, leaves.b_dec, prefixes or (M,))
    l0 = Jump.apply(z if relative else codes, theta, width, False).sum(1).mean()
    scale = (x - x.mean(0)).square().sum(1).mean() if relative else 1
    loss = loss + 3.0 * 3 / 4 * scale * (l0 / K - 1) ** 2
    if relative:  # dictionary_learning has no AuxK
        x_hat = reference.reconstruct(codes, leaves.W_dec, leaves.b_dec)
        is_dead = torch.zeros(M, dtype=torch.bool).index_fill(0, dead, True)
        activations = reference.activations(x, leaves.W_enc.T, leaves.b_enc, leaves.b_dec)
        loss = loss + 0.3 * reference.auxk_loss(x, x_hat, activations, is_dead, leaves.W_dec, 2)
    torch.testing.assert_close(selection.codes.dense(), codes.detach())
    assert selection.kept() / B == float(l0.detach())
    torch.testing.assert_close(outcome.loss, loss.detach())
    for name, mine, other in zip(leaves._fields, outcome.gradients, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{name}: {text}")


def test_training_explains_the_data_at_the_wanted_l0(activations, tmp_path):
    config = ss.jumprelu(64, 4, lr=3e-3)
    learner = Learner(config, 16, 400, 0, torch.device("cpu"), torch.float32)
    stats = [learner.step(activations[i % 20 * 200 :][:200], i) for i in range(400)]
    assert float(stats[0].l0) == pytest.approx(4, abs=0.01)  # the thresholds begin there
    assert abs(sum(float(s.l0) for s in stats[-50:]) / 50 - 4) < 0.4
    sae = ss.train(activations, config, steps=400, batch_size=200, progress=False, out=tmp_path)
    assert sae.threshold.shape == (64,) and sae.threshold.std() > 0
    result = by_threshold(sae, activations)
    assert result.fve > 0.8 and abs(result.l0 - 4) < 0.3
    assert as_trained(sae, activations, 200).fvu == pytest.approx(result.fvu, rel=1e-5)
    back = SAE.load(tmp_path / "saes" / "jumprelu-s0")
    assert torch.equal(back.encode(activations), sae.encode(activations))
    assert back.cfg.architecture == "jumprelu" and back.threshold_ema.isnan()


def test_thresholds_and_their_gradients_follow_the_scale_of_the_inputs(activations):
    found = []
    for scale in (1.0, 64.0):
        learner = Learner(ss.jumprelu(64, 4, lr=1e-9), 16, 1, 0, torch.device("cpu"), torch.float64)
        learner.step(scale * activations[:100].double(), 0)
        theta = learner.sae().threshold / scale
        selection = learner.path.select(scale * activations[100:200].double(), 0, learner.pool)
        found.append((theta, learner.path.gradients(selection, None).gradients.threshold / scale**2))
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=1e-3)


def test_training_begins_with_a_batch_in_which_nothing_is_positive(activations):
    """A batch of one token is its own median, so that every activation is 0."""
    sae = ss.train(activations, ss.jumprelu(16, 2), steps=8, batch_size=1, device="cpu", progress=False)
    assert bool(sae.threshold.isfinite().all())
    assert sae.cfg.metadata["training"]["heldout"]["l0"] == pytest.approx(2, abs=0.01)


def test_it_takes_no_pool():
    with pytest.raises(ss.UserError, match=r"^jumprelu = JumpReLUConfig\(.*\): takes neither a pool nor a cut"):
        ss.topk(64, 4, jumprelu=JumpReLUConfig())
    assert ss.SAEConfig.from_dict(ss.jumprelu(64, 4).to_dict()) == ss.jumprelu(64, 4)


def test_thresholds_below_zero_are_calibrated_too(activations, tmp_path):
    """Without a penalty, dictionary_learning's thresholds fall; the SAE must load, and have an L0 of K all the same."""
    config = SAEConfig(
        48,
        2,
        jumprelu=JumpReLUConfig(variant="dictionary_learning", bandwidth=0.001, penalty=0),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    below = []

    class Look(ss.Callback):
        def on_step(self, run, learner, step, stats):
            below.append(int((learner.weights.threshold <= 0).sum()))

    settings = {"steps": 60, "batch_size": 200, "device": "cpu", "progress": False}
    ss.train(1000 * activations, config, out=tmp_path / "run", callbacks=[Look()], **settings)
    sae = ss.SAE.load(tmp_path / "run" / "saes" / "jumprelu-s0")
    assert below[-1] > 5 and bool((sae.threshold > 0).all())
    assert sae.cfg.metadata["training"]["heldout"]["l0"] == pytest.approx(2, abs=0.02)
