"""benchmarks/quality.py measures what the peers have trained: their SAEs and the converted ones reconstruct alike."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

D_IN, D_SAE, K, BATCH, STEPS = 16, 64, 4, 32, 40


@pytest.fixture
def x():
    """Activations far from norm 1 and from mean 0, [BATCH * STEPS, D_IN]."""
    generator = torch.Generator().manual_seed(0)
    fires = torch.rand(BATCH * STEPS, 50, generator=generator) < 0.1
    return 30 * fires.float() @ torch.randn(50, D_IN, generator=generator) + 20


def trained(x, make, scaled, **settings):
    """A peer after its training, and what its functions refer to."""
    from peers import Recipe

    batches = list(x.split(BATCH))
    recipe = Recipe(STEPS, 3e-3, 8, 8, batches[:4] if scaled else ())
    peer = make(D_IN, D_SAE, K, BATCH, "cpu", recipe, **settings)
    for i, batch in enumerate(batches):
        peer.step(batch, i)
    names = peer.finish.__code__.co_freevars
    return peer, dict(zip(names, (cell.cell_contents for cell in peer.finish.__closure__), strict=True))


def check(tensors, x, expected):
    from quality import converted

    found = converted(tensors, K, "cpu")(x)
    assert found.std() > 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scaled", [False, True])
@torch.no_grad()
def test_saelens(x, scaled):
    pytest.importorskip("sae_lens")
    from peers import saelens

    with torch.enable_grad():
        peer, inside = trained(x, saelens, scaled, autocast=False)
    sae, scale = inside["sae"], inside["scaler"].scaling_factor
    assert (scale is not None) == scaled
    if scaled:
        assert float((x * scale).norm(dim=1).mean()) == pytest.approx(D_IN**0.5, rel=0.05)
    scale = scale or 1.0
    _, pre = sae.encode_with_hidden_pre(x * scale)
    expected = sae.decode(pre * (pre > sae.topk_threshold.clamp_min(0))) / scale
    check(peer.finish(), x, expected)


@pytest.mark.parametrize("scaled", [False, True])
@torch.no_grad()
def test_dictionary_learning(x, scaled):
    pytest.importorskip("dictionary_learning")
    from peers import dictionary_learning

    with torch.enable_grad():
        peer, inside = trained(x, dictionary_learning, scaled, dtype=torch.float32)
    sae, norm = inside["trainer"].ae, inside["norm"]
    assert (norm != 1) == scaled
    sae.threshold.fill_(20 / norm)  # training sets one after 1,000 steps
    expected = sae(x / norm) * norm
    check(peer.finish(), x, expected)


@pytest.mark.parametrize("package, name", [("sae_lens", "saelens"), ("dictionary_learning", "dictionary_learning")])
def test_seeds(x, package, name):
    """A seed gives its own initial weights, the same each time."""
    pytest.importorskip(package)
    import peers

    settings = {"autocast": False} if name == "saelens" else {"dtype": torch.float32}

    def first(seed):
        recipe = peers.Recipe(STEPS, 3e-3, 8, 8, (), seed)
        return getattr(peers, name)(D_IN, D_SAE, K, BATCH, "cpu", recipe, **settings).finish()["W_dec"]

    torch.testing.assert_close(first(0), first(0), rtol=0, atol=0)
    assert not torch.allclose(first(0), first(1))
