"""The fast path against the dense specification in float64, and against the plain path over whole runs."""

import pytest
import torch

from sampled_sae.kernels.auxk import list_latents
from sampled_sae.kernels.path import FastPath
from sampled_sae.method import presets
from sampled_sae.method.config import (
    AuxKConfig,
    Fraction,
    InitConfig,
    Multiplier,
    OptimizerConfig,
    PoolConfig,
    SAEConfig,
    Scope,
)
from sampled_sae.method.parameters import Parameters, start_parameters
from sampled_sae.method.selection import Dead
from sampled_sae.training.learner import Learner
from sampled_sae.training.step import PlainPath
from tests import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
M, K, B, SEED = (70, 3, 24, 0) if DEVICE.type == "cuda" else (52, 3, 12, 1)
"""In Triton's interpreter, each latent and each token is a program that takes milliseconds."""

CONFIGS = {
    "batchtopk": presets.batchtopk(M, K),
    "topk": presets.topk(M, K),
    "groups": SAEConfig(M, K, pool=PoolConfig(scope=Scope(tokens=6))),
    "groups with pools": SAEConfig(M, K, pool=PoolConfig(size=Fraction(0.5), scope=Scope(tokens=6))),
    "small pool": presets.sampled(M, K, "l2", 5),
    "small pool, row-wise": SAEConfig(M, K, pool=PoolConfig(size=Multiplier(5)), cut="token"),
    "large pool": presets.released(M, K, "entropy", 0.9),
    "random pool": presets.sampled(M, K, "uniform", 4),
    "matryoshka": presets.matryoshka(M, K, (5, 0.3, 50)),
    "matryoshka, topk": presets.topk(M, K, prefixes=(0.5,)),
    "matryoshka in a small pool": presets.sampled(M, K, "l2", 5, prefixes=(3, 4, 20, 40)),
    "gram": presets.sampled(M, K, "preactivation_l2", 4),
}


def weights_and_batch(d: int, seed: int = SEED, m: int = M, tokens: int = B) -> tuple[Parameters, torch.Tensor]:
    """Weights and a batch that bfloat16 holds exactly, so that rounding is left to what the path does."""
    generator = torch.Generator().manual_seed(seed)
    weights = start_parameters(d, m, generator, torch.float32)
    weights.b_enc.copy_(0.05 * torch.randn(m, generator=generator))
    weights.b_enc[:4] = 0.5  # latents that fire on most tokens
    x = torch.randn(tokens, d, generator=generator) / d**0.5
    x[0] *= 20  # a token that takes most of the budget
    return Parameters(*(w.bfloat16().float().to(DEVICE) for w in weights)), x.bfloat16().float().to(DEVICE)


def by_autograd(x: torch.Tensor, weights: Parameters, codes_of: torch.Tensor, dead: torch.Tensor, config: SAEConfig):
    """Loss and gradients in float64 with the given choice of kept activations [B, m] bool."""
    leaves = Parameters(*(w.double().requires_grad_() for w in weights))
    z = reference.activations(x.double(), leaves.W_enc.T, leaves.b_enc, leaves.b_dec)
    x_hat = reference.reconstruct(z * codes_of, leaves.W_dec, leaves.b_dec)
    prefixes = config.prefixes or (M,)
    loss = reference.prefix_loss(x.double(), z * codes_of, leaves.W_dec, leaves.b_dec, prefixes)
    k_aux = max(1, x.shape[1] // 2)
    loss = loss + config.auxk.alpha * reference.auxk_loss(x.double(), x_hat, z, dead, leaves.W_dec, k_aux)
    return loss.detach(), torch.autograd.grad(loss, leaves)


def kept_by(selection) -> torch.Tensor:
    """[B, m] bool: which activations a selection kept."""
    codes = selection.codes
    mask = torch.zeros(B, M, dtype=torch.bool, device=DEVICE)
    if hasattr(codes, "f"):
        mask[:, codes.columns] = codes.f[:, : len(codes.columns)] > 0
    else:
        there = codes.latent < M
        mask[codes.kept.token[there].long(), codes.latent[there].long()] = True
    return mask


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(
    "name, d", [(name, 37) for name in CONFIGS] + [(name, 16) for name in ("batchtopk", "small pool", "matryoshka")]
)
def test_gradients_are_those_of_the_specification(name, d):
    config = CONFIGS[name]
    weights, x = weights_and_batch(d)
    path = FastPath(weights, config, 10, torch.Generator(DEVICE).manual_seed(0))
    selection = path.select(x, 0, torch.zeros(M, dtype=torch.bool, device=DEVICE))
    mask = kept_by(selection)
    assert selection.kept() == int(mask.sum()) <= K * B
    assert torch.equal(selection.fired, mask.any(0))
    assert not bool((mask & ~selection.pool).any())

    nobody = torch.zeros_like(selection.fired)
    for dead, limit in ((nobody, 0.025), (~selection.fired, 0.05)):  # AuxK's own choice is rounded too
        loss, gradients = by_autograd(x, weights, mask, dead, config)
        numbers = torch.cat([dead.nonzero().squeeze(1), torch.full((3,), M, device=DEVICE)])  # the last are nobody
        outcome = path.gradients(selection, numbers if dead.any() else None)
        assert distance(outcome.loss, loss) < 0.01
        full = outcome.gradients.full()
        for field, got, wanted in zip(Parameters._fields, full, gradients, strict=True):
            assert distance(got, wanted) < limit, field


@pytest.mark.parametrize("name", CONFIGS)
def test_the_selection_is_the_plain_one_for_the_same_values(name):
    """Whole numbers, small enough that every product is exact, give both paths the same Z, full of ties."""
    config = CONFIGS[name]
    generator = torch.Generator().manual_seed(3)
    weights = start_parameters(16, M, generator, torch.float32)
    weights = Parameters(*(torch.randint(-1, 2, w.shape, generator=generator).float().to(DEVICE) for w in weights))
    x = torch.randint(-2, 3, (B, 16), generator=generator).float().to(DEVICE)
    none = torch.zeros(M, dtype=torch.bool, device=DEVICE)
    fast = FastPath(weights, config, 10, torch.Generator(DEVICE).manual_seed(1)).select(x, 0, none)
    plain = PlainPath(weights, config, 10, torch.Generator(DEVICE).manual_seed(1)).select(x, 0, none)
    assert torch.equal(fast.pool, plain.pool)
    assert torch.equal(kept_by(fast), plain.codes.dense() > 0)
    assert torch.equal(fast.fired, plain.fired)
    assert float(fast.smallest()) == float(plain.smallest())
    assert fast.kept() == plain.kept()


def test_pools_with_a_memory_are_those_of_the_plain_path():
    """Over several batches of whole numbers, so that both paths have the same Z."""
    config = presets.sampled(M, K, "l1", 5, memory=0.5)
    generator = torch.Generator().manual_seed(3)
    weights = start_parameters(16, M, generator, torch.float32)
    weights = Parameters(*(torch.randint(-1, 2, w.shape, generator=generator).float().to(DEVICE) for w in weights))
    none = torch.zeros(M, dtype=torch.bool, device=DEVICE)
    fast, plain = (kind(weights, config, 10, torch.Generator(DEVICE)) for kind in (FastPath, PlainPath))
    pools = []
    for step in range(3):
        x = torch.randint(-2, 3, (B, 16), generator=generator).float().to(DEVICE)
        pools.append(fast.select(x, step, none).pool)
        assert torch.equal(pools[-1], plain.select(x, step, none).pool)
        torch.testing.assert_close(fast.pool_state.memory, plain.pool_state.memory)
    assert not torch.equal(pools[0], pools[1])


@pytest.mark.parametrize("auxk", [False, True])
@pytest.mark.parametrize("name", ["batchtopk", "small pool", "matryoshka"])
def test_updates_are_those_of_the_plain_path(name, auxk):
    """The same gradients through the fused pass and through torch's Adam; the state moves from one to the other."""
    config = CONFIGS[name]
    weights, x = weights_and_batch(19)
    others = Parameters(*(w.clone() for w in weights))
    generator = torch.Generator(DEVICE).manual_seed(0)
    fast, plain = FastPath(weights, config, 10, generator), PlainPath(others, config, 10, generator)
    for step in range(2):  # without moments, and with them
        selection = fast.select(x, step, torch.zeros(M, dtype=torch.bool, device=DEVICE))
        silent = ~selection.fired
        dead = Dead(silent, int(silent.sum()) + 2) if auxk else None
        numbers = None if dead is None else list_latents(silent, dead.most)
        gradients = fast.gradients(selection, numbers).gradients.full()
        norm = fast.update(selection, dead, 0.01).norm
        plain_norm = plain.optimizer.update(gradients, 0.01)
        # The fused pass takes the norm from sums that the gradients' kernels made.
        torch.testing.assert_close(norm, plain_norm, rtol=1e-2, atol=0)
        for mine, other in zip(weights, others, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5)
            other.copy_(mine)
    again = FastPath(weights, config, 10, generator)
    again.load_state(plain.state())
    assert again.optimizer.updates == 2
    assert fast.state().keys() == plain.state().keys()


def test_a_gradient_is_clipped_to_its_limit():
    config = presets.batchtopk(M, K, optimizer=OptimizerConfig(gradient="clip", clip=1e-4), auxk=AuxKConfig(alpha=0))
    weights, x = weights_and_batch(16)
    path = FastPath(weights, config, 10, torch.Generator(DEVICE))
    selection = path.select(x, 0, torch.ones(M, dtype=torch.bool, device=DEVICE))
    norm = path.update(selection, None, 0.01).norm
    moved = sum(float((mean / 0.1).square().sum()) for mean, _ in path.optimizer.moments.values()) ** 0.5
    assert float(norm) > 1e-3
    assert moved == pytest.approx(1e-4, rel=0.02)


def test_the_first_step_sees_directions_drawn_from_its_batch():
    """The 16-bit copies of the weights follow the initial values that the first batch decides."""
    config = presets.topk_then_batchtopk(M, K, init=InitConfig(decoder="covariance"))
    _, x = weights_and_batch(16)
    fast, plain = (Learner(config, 16, 10, 0, DEVICE, torch.float32) for _ in range(2))
    fast.path = FastPath(fast.weights, config, 10, fast.generator)
    plain.path = PlainPath(plain.weights, config, 10, plain.generator)
    losses = [float(learner.step(x, 0).loss) for learner in (fast, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert distance(fast.weights.W_dec, plain.weights.W_dec) < 1e-6  # the rate of the first step is 0
    assert distance(fast.path.optimizer.W_dec[:, :16], fast.weights.W_dec) < 0.01
