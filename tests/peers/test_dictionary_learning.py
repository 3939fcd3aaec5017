"""Our training step against dictionary_learning's: same start, same batches. Runs in that peer's environment."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from dictionary_learning.trainers.batch_top_k import BatchTopKTrainer
from dictionary_learning.trainers.jumprelu import JumpReluTrainer
from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKSAE, MatryoshkaBatchTopKTrainer
from dictionary_learning.trainers.trainer import SAETrainer

from sampled_sae import batchtopk, jumprelu, matryoshka
from sampled_sae.method.config import AuxKConfig, JumpReLUConfig, ThresholdConfig
from sampled_sae.method.parameters import JumpReLUParameters, Parameters
from sampled_sae.method.presets import PAPER_INIT, PAPER_OPTIMIZER
from sampled_sae.training.learner import Learner
from sampled_sae.training.optimizer import learning_rate

D, M, K, B, STEPS = 32, 256, 3, 128, 25
DEAD_AFTER = 2 * B  # so that AuxK takes part


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(96, D, generator=generator)
    fires = torch.rand(STEPS, B, 96, generator=generator) < 0.08
    return list((fires * torch.rand(fires.shape, generator=generator)) @ directions)


TRAINING = dict(steps=STEPS, activation_dim=D, dict_size=M, k=K, layer=0, lm_name="none", lr=1e-3)
TRAINING |= dict(decay_start=20, threshold_start_step=5, seed=0, device="cpu")
GROUPS = [1 / 8, 1 / 4, 5 / 8]
SETTINGS = dict(
    init=PAPER_INIT,
    auxk=AuxKConfig(dead_after=DEAD_AFTER),
    threshold=ThresholdConfig(start_step=5),
)


def both(kind: str, warmup: int, dtype: torch.dtype) -> tuple[SAETrainer, Learner]:
    training = TRAINING | {"warmup_steps": warmup}
    settings = SETTINGS | {"optimizer": replace(PAPER_OPTIMIZER, lr=1e-3, warmup_steps=warmup)}
    if kind == "batchtopk":
        peer, config = BatchTopKTrainer(**training), batchtopk(M, K, **settings)
    else:
        # Group weights of 1 make its loss the mean over the prefixes.
        peer = MatryoshkaBatchTopKTrainer(**training, group_fractions=GROUPS, group_weights=[1.0] * len(GROUPS))
        config = matryoshka(M, K, (GROUPS[0], GROUPS[0] + GROUPS[1], 1), **settings)
        assert config.prefixes == tuple(itertools.accumulate(peer.group_sizes))
    peer.dead_feature_threshold = DEAD_AFTER
    peer.ae.to(dtype)
    ours = Learner(config, D, STEPS, 0, torch.device("cpu"), dtype)
    for mine, theirs in zip(ours.weights, peer_weights(peer), strict=True):
        mine.copy_(theirs)
    return peer, ours


def peer_weights(peer: SAETrainer) -> Parameters:
    ae = peer.ae
    if isinstance(ae, MatryoshkaBatchTopKSAE):
        return Parameters(ae.W_enc.data.T, ae.b_enc.data, ae.W_dec.data, ae.b_dec.data)
    return Parameters(ae.encoder.weight.data, ae.encoder.bias.data, ae.decoder.weight.data.T, ae.b_dec.data)


def peer_gradients(peer: SAETrainer, x: torch.Tensor, step: int) -> Parameters:
    peer.pre_norm_auxk_loss = -1  # a tensor with a graph, which cannot be copied
    other = copy.deepcopy(peer)  # its loss changes counters and threshold
    other.loss(x, step=step).backward()
    ae = other.ae
    if isinstance(ae, MatryoshkaBatchTopKSAE):
        return Parameters(ae.W_enc.grad.T, ae.b_enc.grad, ae.W_dec.grad, ae.b_dec.grad)
    return Parameters(ae.encoder.weight.grad, ae.encoder.bias.grad, ae.decoder.weight.grad.T, ae.b_dec.grad)


def our_gradients(ours: Learner, x: torch.Tensor, step: int) -> Parameters:
    other = copy.copy(ours)
    other.tokens_since_fired = ours.tokens_since_fired.clone()
    selection = ours.path.select(x, step, ours.pool)
    dead = other._count(selection, len(x), step)
    return ours.path.gradients(selection, None if dead is None else dead.mask.nonzero().squeeze(1)).gradients


@pytest.mark.parametrize(("kind", "warmup"), [("batchtopk", 5), ("matryoshka", 5), ("matryoshka", 0)])
def test_loss_gradients_threshold_and_weights_agree(kind, warmup):
    # Without warm-up Adam's first step has the gradient's sign alone, which rounding decides where it is next to 0.
    dtype = torch.float64 if warmup == 0 else torch.float32
    peer, ours = both(kind, warmup, dtype)
    revived = 0
    for step, x in enumerate(x.to(dtype) for x in data()):
        if step in (1, 12, 20):
            for name, mine, theirs in zip(
                Parameters._fields, our_gradients(ours, x, step), peer_gradients(peer, x, step), strict=True
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert learning_rate(ours.config.optimizer, step, STEPS) == peer.optimizer.param_groups[0]["lr"]
        theirs = peer.update(step, x)
        stats = ours.step(x, step)
        assert abs(float(stats.loss) - theirs) <= 1e-5 * max(1, abs(theirs))
        assert torch.equal(ours.tokens_since_fired, peer.num_tokens_since_fired)
        revived += peer.dead_features
        if step == 19:
            for name, mine, other in zip(Parameters._fields, ours.weights, peer_weights(peer), strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(ours.threshold, peer.ae.threshold, rtol=0, atol=1e-5)
    assert revived > 0, "AuxK never took part, so this test shows too little"


def test_jumprelu_agrees():
    """With the variant that has this peer's definitions: loss, gradients and weights over 25 steps."""
    steps = dict(steps=STEPS, warmup_steps=5, sparsity_warmup_steps=5, decay_start=20)
    common = dict(activation_dim=D, dict_size=M, layer=0, lm_name="none", seed=0, device="cpu")
    peer = JumpReluTrainer(**steps, **common, lr=1e-3, bandwidth=0.02, sparsity_penalty=2.0, target_l0=K)
    config = jumprelu(
        M,
        K,
        jumprelu=JumpReLUConfig(bandwidth=0.02, penalty=2.0, warmup_steps=5, variant="dictionary_learning"),
        optimizer=replace(PAPER_OPTIMIZER, lr=1e-3, beta1=0.0, warmup_steps=5),
        init=PAPER_INIT,
    )
    ours = Learner(config, D, STEPS, 0, torch.device("cpu"), torch.float32)
    own = JumpReLUParameters(*((w.data.T if n == "W_enc" else w.data) for n, w in in_order(peer.ae)))
    for mine, theirs in zip(ours.weights, own, strict=True):
        mine.copy_(theirs)
    for step, x in enumerate(data()):
        if step > 0:
            other = copy.deepcopy(peer)
            other.loss(x, step=step).backward()
            mine = ours.path.gradients(ours.path.select(x, step, ours.pool), None).gradients
            for (name, weight), gradient in zip(in_order(other.ae), mine, strict=True):
                theirs = weight.grad.T if name == "W_enc" else weight.grad
                torch.testing.assert_close(gradient, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        theirs, stats = peer.update(step, x), ours.step(x, step)
        assert abs(float(stats.loss) - theirs) <= 1e-5 * max(1, abs(theirs))
        if step == 0:  # the first rate is 0; a threshold below half the bandwidth would count the zeros of the codes
            peer.ae.threshold.data.fill_(0.05)
            ours.weights.threshold.fill_(0.05)
    for (name, weight), mine in zip(in_order(peer.ae), ours.weights, strict=True):
        other = weight.data.T if name == "W_enc" else weight.data
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    x = data()[0]
    torch.testing.assert_close(ours.sae().encode(x), peer.ae.encode(x).detach(), rtol=0, atol=1e-4)
    assert float((ours.weights.threshold - 0.05).abs().max()) > 1e-3, "the thresholds were not trained"


def in_order(ae: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, getattr(ae, name)) for name in JumpReLUParameters._fields]
