import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sampled_sae.method.config import (
    Annealed,
    Everything,
    Fraction,
    Multiplier,
    PoolConfig,
    Released,
    SAEConfig,
    Scope,
    Size,
)
from sampled_sae.method.parameters import Parameters
from sampled_sae.method.pools import PlainEncoder, churn, draw, highest
from sampled_sae.method.scores import SCORES, get_score
from sampled_sae.utils.errors import UserError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(hnp.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=st.integers(0, 4)), st.data())
def test_highest_takes_exactly_the_largest_and_ties_by_index(q, data):
    q = torch.from_numpy(q)
    size = data.draw(st.integers(1, q.shape[1]))
    expected = torch.zeros_like(q, dtype=torch.bool)
    order = q.sort(dim=1, descending=True, stable=True).indices[:, :size]
    expected.scatter_(1, order, True)
    assert torch.equal(highest(q, size), expected)


weak_to_strong = st.one_of(st.just(0.0), st.floats(0.0009765625, 8192.0, width=32))


@given(hnp.arrays(np.float32, (6, 20), elements=weak_to_strong), st.integers(1, 20))
def test_l2_and_squared_l2_give_the_same_pool(Z, size):
    """In the precision of training, whatever the strength of the latents."""
    Z = torch.from_numpy(Z)
    pools = [draw(SCORES[name](Z, generator())[None], size, "top", generator()) for name in ("l2", "squared_l2")]
    assert torch.equal(*pools)


def test_l2_and_squared_l2_differ_when_sampled():
    Z = torch.rand(50, 40, generator=generator()) * torch.linspace(0.1, 3, 40)
    counts = [
        sum(draw(SCORES[name](Z, generator())[None], 5, "sample", generator(i))[0].float() for i in range(300))
        for name in ("l2", "squared_l2")
    ]
    assert counts[1][-10:].sum() > 1.1 * counts[0][-10:].sum()


def test_uniform_pools_are_uniform():
    m, size, draws = 20, 5, 4000
    own = generator()
    blank = torch.empty(1, 1).expand(3, m)
    counts = sum(draw(SCORES["uniform"](blank, own)[None], size, "top", own)[0].long() for _ in range(draws))
    assert counts.sum() == size * draws
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_sampling_is_in_proportion_to_the_score():
    q = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    own = generator()
    counts = sum(draw(q, 1, "sample", own)[0].long() for _ in range(6000))
    assert counts[3] == 0
    assert stats.chisquare(counts[:3].numpy(), [1000, 2000, 3000]).pvalue > 1e-3
    with pytest.raises(UserError, match="negative"):
        draw(-q, 1, "sample", own)


def test_prefix_is_what_the_papers_uniform_does():
    blank = torch.empty(1, 1).expand(3, 10)
    assert (
        draw(SCORES["prefix"](blank, generator())[None], 4, "top", generator())[0].tolist() == [True] * 4 + [False] * 6
    )


def test_sizes():
    assert [Multiplier(l).latents(60, 4096) for l in (1, 1.1, 5, 1000)] == [60, 66, 300, 4096]
    assert Fraction(0.5).latents(60, 4096) == 2048
    assert Fraction(0.001).latents(60, 4096) == 60
    assert Size(100).latents(60, 4096) == 100
    assert Everything().latents(60, 4096) == 4096


def test_schedules():
    def at(schedule, step):
        return SAEConfig(100, 4, PoolConfig(size=Fraction(0.5), schedule=schedule)).pool_size_at(step, 1000)

    assert [at(Released(0.7), step) for step in (0, 699, 700, 999)] == [50, 50, 100, 100]
    assert [at(Annealed(0.5), step) for step in (0, 250, 500, 999)] == [50, 75, 100, 100]
    scope = Scope(tokens=1, until=0.7)
    assert [scope.group_at(64, step, 1000) for step in (0, 699, 700)] == [1, 1, 64]
    with pytest.raises(UserError, match=r"scope\.tokens = 7: must divide batch_size = 64"):
        Scope(tokens=7).group_at(64, 0, 10)


def test_churn():
    old = torch.tensor([True, True, False, False])
    new = torch.tensor([False, True, True, False])
    assert churn(new, old) == 0.5
    assert churn(old, old) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name, score in SCORES.items() if score.builtin and score.reads != "nothing"])
def test_weights_of_16_bits_are_scored_in_32(name, dtype):
    """Counts and sums over many tokens would be rounded until most latents are equal."""
    weights = Parameters(*(torch.randn(shape).to(dtype) for shape in ((50, 8), 50, (50, 8), 8)))
    encoder, score, state = PlainEncoder(torch.randn(700, 8).to(dtype), weights), get_score(name), torch.zeros(50)
    q = encoder.scores(score, 700, generator(), state)
    if score.reads == "input":
        right = score.from_input((encoder.x - weights.b_dec).float(), weights.W_enc.float(), weights.b_enc.float())
    else:
        right = score(encoder.encode(None).float(), generator(), state)
    assert torch.equal(q[0].double(), right.double())
