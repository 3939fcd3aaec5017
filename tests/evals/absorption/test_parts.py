"""The parts of the absorption evaluation, each against a simple computation of the same."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn

from sampled_sae.evals.absorption.evaluate import (
    absorption,
    count_absorbers,
    encode_words,
    find_main_latents,
    rank_latents,
    split,
    without_silent_words,
)
from sampled_sae.evals.absorption.probes import Schedule, f1, fit_by_adam, fit_exactly, start_at
from sampled_sae.evals.absorption.schema import AbsorptionConfig
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.method.codes import SparseCodes
from sampled_sae.sae import SAE

seeds = st.integers(0, 2**32 - 1)


def sparse_codes(n: int, m: int, generator: torch.Generator, share: float = 0.2) -> torch.Tensor:
    """Some words have no latent at all."""
    dense = torch.rand(n, m, generator=generator) * (torch.rand(n, m, generator=generator) < share)
    dense[torch.rand(n, generator=generator) < 0.1] = 0
    return dense


# ---- codes -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_encoding_is_the_saes_with_unit_decoder_rows():
    generator = torch.Generator().manual_seed(0)
    sae = SAE(InferenceConfig(6, 20))
    for weight in sae.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    sae.threshold.fill_(0.5)
    x = torch.randn(11, 6, generator=generator)
    found = encode_words(sae, x, at_once=4)
    expected = sae.encode(x) * sae.W_dec.norm(dim=1)
    torch.testing.assert_close(found.columns(torch.arange(20)), expected)
    assert (found.value > 0).all()
    # What the SAE gives out is the same whatever the lengths of its rows, and so is this.
    scale = torch.rand(20, generator=generator) + 0.5
    other = SAE(InferenceConfig(6, 20))
    other.load_state_dict(sae.state_dict())
    other.W_dec.mul_(scale[:, None])
    other.W_enc.T.div_(scale[:, None])
    other.b_enc.div_(scale)
    sae.threshold.fill_(0)
    other.threshold.fill_(0)
    torch.testing.assert_close(
        encode_words(other, x, 4).columns(torch.arange(20)), encode_words(sae, x, 4).columns(torch.arange(20))
    )


# ---- probes ------------------------------------------------------------------------------------------


def by_torch(x, truth, start, schedule, orders):
    """The same by autograd and torch's optimizer."""
    layer = nn.Linear(x.shape[1], truth.shape[1])
    with torch.no_grad():
        layer.weight.copy_(start.weight.T)
        layer.bias.copy_(start.bias)
    loss_of = nn.BCEWithLogitsLoss(pos_weight=(1 - truth).sum(0) / truth.sum(0))
    optimizer = torch.optim.Adam(layer.parameters(), lr=schedule.lr, weight_decay=schedule.decay)
    gamma = math.exp(math.log(schedule.end_lr / schedule.lr) / schedule.epochs)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for order in orders:
        for rows in order.split(schedule.batch):
            optimizer.zero_grad()
            loss = loss_of(layer(x[rows]), truth[rows]) + schedule.l1 * layer.weight.abs().sum(1).mean()
            loss.backward()
            optimizer.step()
        scheduler.step()
    return layer


@pytest.mark.parametrize("l1", [0.0, 0.01])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_adam_is_torchs(l1, kind):
    generator = torch.Generator().manual_seed(0)
    x = sparse_codes(50, 12, generator, share=0.4)
    letters = torch.randint(4, (50,), generator=generator)
    truth = nn.functional.one_hot(letters, 4).float()
    schedule = Schedule(epochs=6, batch=16, lr=0.02, end_lr=1e-3, decay=1e-2, l1=l1)
    start = start_at("random", 12, 4, 3, torch.device("cpu"))
    orders = torch.Generator().manual_seed(5)
    expected = by_torch(x, truth, start, schedule, [torch.randperm(50, generator=orders) for _ in range(6)])
    inputs = x if kind == "dense" else SparseCodes.from_dense(x)
    found = fit_by_adam(inputs, truth, start, schedule, seed=5)
    torch.testing.assert_close(found.weight, expected.weight.T.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.bias, expected.bias.detach(), rtol=1e-4, atol=1e-5)


def test_a_random_start_is_a_linear_layers():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    found = start_at("random", 40, 26, 3, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    layer = nn.Linear(40, 26)
    assert torch.equal(found.weight, layer.weight.T)
    assert torch.equal(found.bias, layer.bias)
    assert not any(tensor.any() for tensor in start_at("zero", 40, 26, 3, torch.device("cpu")))


@given(seeds)
@settings(max_examples=10, deadline=None)
def test_exact_fits_are_the_minimum(seed):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * sparse_codes(60, 6, generator, share=0.5)
    truth = torch.rand(60, 2, generator=generator) < 0.3
    truth[:2] = torch.tensor([[True, False], [False, True]])
    places = torch.tensor([[0, 1, 2], [3, 2, 5]])
    found = fit_exactly(*without_silent_words(x, places, truth))
    for letter in range(2):
        own, y = x[:, places[letter]].double().numpy(), truth[:, letter].double().numpy()
        balance = torch.where(truth[:, letter], 60 / (2 * y.sum()), 60 / (2 * (60 - y.sum()))).double().numpy()

        def loss(w, own=own, y=y, balance=balance):
            scores = own @ w[:3] + w[3]
            entropy = balance * (torch.nn.functional.softplus(torch.tensor(scores)).numpy() - y * scores)
            return entropy.sum() + (w[:3] ** 2).sum() / 2

        best = minimize(loss, [0.0] * 4, method="BFGS", options={"gtol": 1e-7})
        ours = [*found.weight[letter].tolist(), float(found.bias[letter])]
        assert loss(torch.tensor(ours).double().numpy()) <= best.fun + 1e-8
        assert ours == pytest.approx(best.x.tolist(), abs=1e-3)


def test_exact_fits_without_inputs_stay_at_zero():
    truth = torch.zeros(9, 1, dtype=torch.bool)
    truth[:3] = True
    found = fit_exactly(*without_silent_words(torch.zeros(9, 2), torch.tensor([[0, 1]]), truth))
    assert not found.weight.any()
    assert not found.bias.any()


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_f1_is_its_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    seen, truth = (torch.rand(9, 3, generator=generator) < 0.3 for _ in range(2))
    for letter, value in enumerate(f1(seen, truth).tolist()):
        pairs = list(zip(seen[:, letter].tolist(), truth[:, letter].tolist(), strict=True))
        right, false, missed = pairs.count((True, True)), pairs.count((True, False)), pairs.count((False, True))
        assert value == pytest.approx(2 * right / (2 * right + false + missed) if right else 0)


# ---- main latents ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "count"),
    [([0.5], 1), ([0.0, 0.0], 1), ([0.5, 0.54, 0.58, 0.59, 0.9], 3), ([0.5, 0.53, 0.9], 1), ([0.1, 0.2, 0.3], 3)],
)
def test_split_stops_at_the_first_small_jump(scores, count):
    assert split(scores, 0.03) == count


def test_main_latents_are_those_that_hold_the_letter():
    """Letter 0 has latent 2; letter 1 is split between latents 4 and 7; latent 5 speaks against letter 0."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(3, (900,), generator=generator)
    x = 0.2 * sparse_codes(900, 12, generator)
    x[:, [2, 4, 7, 5]] = 0
    half = torch.rand(900, generator=generator) < 0.6
    x[letters == 0, 2] = 1.0
    x[(letters == 1) & half, 4] = 1.0
    x[(letters == 1) & ~half, 7] = 1.0
    x[letters == 2, 5] = 1.0
    truth = letters[:, None] == torch.arange(3)
    train, test = SparseCodes.from_dense(x[:600]), SparseCodes.from_dense(x[600:])
    config = AbsorptionConfig(max_k=5, sparse_batch=100)
    found = find_main_latents(train, test, truth[:600], truth[600:], config)
    assert found.main == [[2], [4, 7], [5]]
    assert found.f1[0][0] == found.f1[1][1] == 1.0
    assert [len(scores) for scores in found.f1] == [5, 5, 5]
    assert rank_latents(train, truth[:600], config).tolist() == found.ranked


def test_few_firing_latents_are_all_there_is_to_rank():
    x = torch.zeros(40, 100)
    x[:20, 3], x[20:, 50] = 1.0, 1.0
    truth = (torch.arange(40)[:, None] >= 20) == torch.tensor([False, True])
    found = find_main_latents(SparseCodes.from_dense(x), SparseCodes.from_dense(x), truth, truth, AbsorptionConfig())
    assert found.ranked == [[3, 50], [50, 3]]
    assert found.main == [[3], [50]]


# ---- absorption of a word ----------------------------------------------------------------------------


def one_word(x, codes, p, decoder, main):
    """The definition, latent by latent."""
    p = p / p.norm()
    a = float(x @ p)
    c = [float(row @ p / row.norm()) for row in decoder]
    r = [float(value) * cosine for value, cosine in zip(codes, c, strict=True)]
    M = sum(r[j] for j in main)
    others = sorted((r[j] for j in range(len(r)) if j not in main and c[j] >= 0.1 and r[j] > 0), reverse=True)
    S = sum(others[:3])
    if a <= M or S / a < 0.4:
        fraction = 0.0
    elif M <= 0:
        fraction = 1.0
    else:
        fraction = min(S, a - M) / (min(S, a - M) + M)
    top = max(range(len(r)), key=lambda j: r[j])
    full = all(codes[j] < 1e-8 for j in main) and c[top] >= 0.025 and a >= 0 and r[top] / a >= 0.4
    return fraction, full, S, top


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_absorption_is_its_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    n, d, m = 12, 4, 15
    decoder = torch.randn(m, d, generator=generator) * (1 + torch.rand(m, 1, generator=generator))
    dense = 2 * sparse_codes(n, m, generator, share=0.3)
    unit = nn.functional.normalize(decoder, dim=1)
    x = dense @ unit + 0.3 * torch.randn(n, d, generator=generator)
    directions = torch.randn(2, d, generator=generator)
    letters = torch.randint(2, (n,), generator=generator)
    main = [[0, 3], [7]]
    found = absorption(
        x, SparseCodes.from_dense(dense), letters, directions, decoder, main, AbsorptionConfig(words_at_once=5)
    )
    for row in range(n):
        letter = int(letters[row])
        fraction, full, S, top = one_word(x[row], dense[row].tolist(), directions[letter], decoder, main[letter])
        assert float(found.fraction[row]) == pytest.approx(fraction, abs=1e-4)
        assert bool(found.full[row]) == full
        assert not full or int(found.top[row]) == top
        named = [latent for latent in found.absorbers[row].tolist() if latent >= 0]
        if fraction > 0:
            unit_p = directions[letter] / directions[letter].norm()
            assert sum(float(dense[row, j] * (unit[j] @ unit_p)) for j in named) == pytest.approx(S, rel=1e-4)
        else:
            assert not named


def test_absorption_of_no_words_at_all():
    codes = encode_words(SAE(InferenceConfig(3, 5)), torch.zeros(0, 3), at_once=4)
    found = absorption(
        torch.zeros(0, 3),
        codes,
        torch.zeros(0, dtype=torch.int64),
        torch.ones(1, 3),
        torch.eye(5, 3),
        [[0]],
        AbsorptionConfig(),
    )
    assert len(found.fraction) == len(found.full) == 0


def test_absorbers_are_counted():
    decoder = torch.eye(4)
    x = torch.tensor([[2.0, 0, 0, 0]] * 3)
    p = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    dense = torch.tensor([[0, 2.0, 0, 0], [0, 2.0, 1.5, 0], [2.0, 0, 0, 0]])
    found = absorption(
        x, SparseCodes.from_dense(dense), torch.zeros(3, dtype=torch.int64), p, decoder, [[0]], AbsorptionConfig()
    )
    assert found.fraction.tolist() == [1.0, 1.0, 0.0]
    assert found.full.tolist() == [True, True, False]
    named, every = count_absorbers(found, most=1)
    assert named == [(1, 2, 2)]
    assert every == 2
