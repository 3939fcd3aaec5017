"""The optimizer's settings on the plain path, against the specification in float64."""

from dataclasses import replace

import pytest
import torch

from sampled_sae.method.config import OptimizerConfig, Rates
from sampled_sae.method.parameters import Parameters, start_parameters
from sampled_sae.method.presets import PAPER_OPTIMIZER
from sampled_sae.training import optimizer
from sampled_sae.training.optimizer import Optimizer
from sampled_sae.utils.errors import UserError
from tests import reference

M, D = 11, 6
OPTIMIZERS = {
    "defaults": OptimizerConfig(),
    "paper": PAPER_OPTIMIZER,
    "clipped low": replace(PAPER_OPTIMIZER, clip=0.1),
    "normalized": replace(PAPER_OPTIMIZER, gradient="normalize", clip=None),
    "cautious": replace(PAPER_OPTIMIZER, cautious=True),
    "rates": replace(PAPER_OPTIMIZER, rates=Rates()),
}


def gradients(step: int, d: int = D) -> Parameters:
    """Gradients whose signs change between steps; every third row of the matrices is zero, another one each time."""
    generator = torch.Generator().manual_seed(step)
    made = Parameters(*(torch.randn(s, generator=generator).double() for s in ((M, d), (M,), (M, d), (d,))))
    for g in made[:3]:
        g[step % 3 :: 3] = 0
    return made


def double(weights: Parameters) -> Parameters:
    return Parameters(*(w.double() for w in weights))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_the_specification(name, monkeypatch):
    monkeypatch.setitem(optimizer.ROWS_AT_ONCE, "cpu", 4)
    config = OPTIMIZERS[name]
    weights = double(start_parameters(D, M, torch.Generator().manual_seed(0), torch.float32))
    mine, wanted = Optimizer(weights, config), reference.Adam(weights, config)
    for step in range(8):
        if step == 5:  # the state moves on to another optimizer
            state = {key: value.clone() for key, value in mine.state().items()}
            mine = Optimizer(weights, config)
            mine.load_state(state)
        mine.update(gradients(step), 0.01)
        wanted.step(gradients(step), 0.01)
        for one, other in zip(weights, wanted.weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_normalized_gradients_have_a_mean_square_of_one_whatever_their_scale(scale):
    weights = double(start_parameters(D, M, torch.Generator().manual_seed(0), torch.float32))
    scaled = Parameters(*(scale * g for g in gradients(0)))
    norm = optimizer.scale_(scaled, OptimizerConfig())
    values = torch.cat([g.flatten() for g in scaled])
    torch.testing.assert_close(values.square().mean(), torch.ones((), dtype=torch.float64))
    assert float(norm) == pytest.approx(scale * float(torch.cat([g.flatten() for g in gradients(0)]).norm()))
    zeros = Parameters(*(torch.zeros_like(w) for w in weights))
    optimizer.scale_(zeros, OptimizerConfig())
    assert not any(g.any() for g in zeros)
    infinite = Parameters(*(torch.full_like(w, torch.inf) for w in weights))
    optimizer.scale_(infinite, OptimizerConfig())
    assert infinite.b_dec.isnan().all()  # so that the run stops rather than going on without a gradient


def test_clip_belongs_to_clipping():
    right = "gradient = 'clip' needs a norm, such as 1, and gradient = 'normalize' takes none"
    for settings, value in (({"clip": 2}, "2.0"), ({"gradient": "clip"}, "None")):
        with pytest.raises(UserError) as caught:
            OptimizerConfig(**settings)
        assert str(caught.value) == f"clip = {value}: {right}"
