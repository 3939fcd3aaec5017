"""JumpReLU in kernels against its plain path in float64, with the same activations above and near the thresholds."""

import pytest
import torch

import sampled_sae as ss
from sampled_sae.kernels import jumprelu
from sampled_sae.kernels.auxk import list_latents
from sampled_sae.kernels.jumprelu import FastJumpReLUPath
from sampled_sae.method.config import AuxKConfig, JumpReLUConfig
from sampled_sae.method.parameters import JumpReLUParameters
from sampled_sae.method.selection import Dead
from sampled_sae.training.jumprelu import JumpReLUPath
from sampled_sae.training.learner import Learner
from tests.kernels.test_path import DEVICE, B, K, M, distance, weights_and_batch

STEPS = 20
CASES = [(variant, prefixes) for variant in ("relative", "dictionary_learning") for prefixes in (None, (5, 20, M))]


def paths(variant, prefixes, d=19):
    """The fast path and the plain one in float64; thresholds lie halfway between two values of 16 bits."""
    weights, x = weights_and_batch(d)
    theta = torch.linspace(0.3, 0.6, M).bfloat16().float().to(DEVICE) * (1 + 2**-9)
    relative = variant == "relative"
    weights = JumpReLUParameters(*weights, threshold=theta.log() if relative else theta)
    settings = JumpReLUConfig(bandwidth=0.7, warmup_steps=4, variant=variant)
    config = ss.jumprelu(M, K, jumprelu=settings, prefixes=prefixes, auxk=AuxKConfig(alpha=0.3))
    generator = torch.Generator(DEVICE).manual_seed(0)
    wide = JumpReLUParameters(*(w.double() for w in weights))
    return x, FastJumpReLUPath(weights, config, STEPS, generator), JumpReLUPath(wide, config, STEPS, generator)


@pytest.mark.parametrize("variant, prefixes", CASES)
def test_gradients_are_those_of_the_plain_path(variant, prefixes, monkeypatch):
    monkeypatch.setattr(jumprelu, "AT_ONCE", 100)  # several parts
    x, fast, plain = paths(variant, prefixes)
    none = torch.zeros(M, dtype=torch.bool, device=DEVICE)
    mine = fast.select(x, 3, none)
    # The plain path with the rounded activations, so that both see the same ones near the thresholds.
    monkeypatch.setattr("sampled_sae.training.jumprelu.pre_activations", lambda *_: fast.z.double())
    other = plain.select(x.double(), 3, none)
    assert mine.kept() == other.kept() > B
    assert torch.equal(mine.fired, other.fired) and bool(mine.pool.all())
    assert float(mine.smallest()) == pytest.approx(float(other.smallest()), rel=1e-5)
    silent = (~mine.fired).nonzero().squeeze(1)
    for dead in (None, silent):
        padded = None if dead is None else torch.cat([dead, torch.full((3,), M, device=DEVICE)])
        found, expected = fast.gradients(mine, padded), plain.gradients(other, dead)
        assert distance(found.loss, expected.loss) < 0.01
        for name, a, b in zip(JumpReLUParameters._fields, found.gradients.full(), expected.gradients, strict=True):
            assert distance(a, b) < 0.05, name  # AuxK's own choice is rounded, too


@pytest.mark.parametrize("auxk", [False, True])
def test_updates_are_those_of_the_plain_path(auxk):
    x, fast, plain = paths("relative", None)
    for step in range(2):  # without moments, and with them
        selection = fast.select(x, step, torch.zeros(M, dtype=torch.bool, device=DEVICE))
        silent = ~selection.fired
        dead = Dead(silent, int(silent.sum()) + 2) if auxk else None
        gradients = fast.gradients(
            selection, None if dead is None else list_latents(silent, dead.most)
        ).gradients.full()
        norm = fast.update(selection, dead, 0.01).norm
        plain_norm = plain.optimizer.update(JumpReLUParameters(*(g.double() for g in gradients)), 0.01)
        torch.testing.assert_close(norm.double(), plain_norm, rtol=1e-2, atol=0)
        for mine, other in zip(fast.weights, plain.weights, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=2e-5)
            other.copy_(mine)
    assert fast.state().keys() == plain.state().keys()


def test_nothing_above_the_thresholds():
    """Gradients of the weights are 0, and the thresholds move down."""
    x, fast, _ = paths("relative", None)
    none = torch.zeros(M, dtype=torch.bool, device=DEVICE)
    fast.select(x, 3, none)
    fast.weights.threshold.fill_(float((1.1 * fast.z.float().max()).log()))
    selection = fast.select(x, 3, none)
    assert selection.kept() == 0 and not bool(selection.fired.any())
    gradients = fast.gradients(selection, None).gradients.full()
    assert not bool(gradients.W_enc.any() or gradients.W_dec.any() or gradients.b_enc.any())
    assert bool((gradients.threshold >= 0).all() and gradients.threshold.any())


def test_a_run_is_that_of_the_plain_path(monkeypatch):
    """Several steps from the same start; the learner takes the fast path where it is usable."""
    config = ss.jumprelu(M, K, lr=1e-3)
    batches = [weights_and_batch(16, seed)[1] for seed in range(6)]
    fast, plain = (Learner(config, 16, len(batches), 0, DEVICE, torch.float32) for _ in range(2))
    assert isinstance(fast.path, FastJumpReLUPath) == (DEVICE.type == "cuda")
    fast.path = FastJumpReLUPath(fast.weights, config, len(batches), fast.generator)

    class SameActivations(JumpReLUPath):
        """With the rounded activations: of so few, one more or less above the thresholds is a few percent."""

        def select(self, *inputs):
            with monkeypatch.context() as patch:
                patch.setattr("sampled_sae.training.jumprelu.pre_activations", lambda *_: fast.path.z.float())
                return super().select(*inputs)

    plain.path = SameActivations(plain.weights, config, len(batches), plain.generator)
    for step, x in enumerate(batches):
        x[0] /= 20
        stats, expected = fast.step(x, step), plain.step(x, step)
        assert float(stats.fve) == pytest.approx(float(expected.fve), abs=0.01)
        assert float(stats.l0) == float(expected.l0)
    for name, mine, other in zip(fast.weights._fields, fast.weights, plain.weights, strict=True):
        # Adam takes full steps of b_enc's smallest gradients, too, whose sign may be that of the rounding.
        assert distance(mine, other) < (0.5 if name == "b_enc" else 0.01), name


@pytest.mark.parametrize("variant", ["relative", "dictionary_learning"])
def test_windows_may_be_narrower_than_the_steps_of_16_bits(variant):
    """In 16 bits z would lie on a grid, and most of these windows be empty."""
    m, tokens, d = 24, 200, 16
    weights, x = weights_and_batch(d, 1, m, tokens)
    theta = torch.linspace(0.5, 2.0, m, device=DEVICE)
    relative = variant == "relative"
    weights = JumpReLUParameters(*weights, threshold=theta.log() if relative else theta)
    settings = JumpReLUConfig(bandwidth=0.02, warmup_steps=4, variant=variant)
    config = ss.jumprelu(m, K, jumprelu=settings, auxk=AuxKConfig(alpha=0))
    generator = torch.Generator(DEVICE).manual_seed(0)
    fast = FastJumpReLUPath(weights, config, STEPS, generator)
    fast.select(4 * x, 3, torch.zeros(m, dtype=torch.bool, device=DEVICE))
    z = 4 * x.double() @ weights.W_enc.double().T + weights.b_enc.double()
    near = (z - theta).abs() < 0.01 * (theta if relative else 1)
    out = torch.zeros(tokens, fast.optimizer.W_dec.shape[1], dtype=torch.bfloat16, device=DEVICE)
    out[:, :d] = torch.randn(tokens, d, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    on_codes = torch.where(near, out[:, :d].double() @ weights.W_dec.double().T, 0).sum(0)
    found = fast._on_threshold(out, torch.zeros((), device=DEVICE))
    assert distance(found, -theta * on_codes / 0.02) < 0.05


def test_a_threshold_that_underflows_keeps_finite_gradients():
    x, fast, _ = paths("relative", None)
    fast.weights.threshold[::5] = -110.0
    selection = fast.select(x, 3, torch.zeros(M, dtype=torch.bool, device=DEVICE))
    assert all(bool(g.isfinite().all()) for g in fast.gradients(selection, None).gradients.full())
