import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampled_sae.evals import reading as stream
from sampled_sae.evals.autointerp import trials as examples
from sampled_sae.method.codes import SparseCodes
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.errors import UserError
from tests.evals.autointerp.tools import ALWAYS, LATENTS, NEVER, WORDS, word_contexts, word_model, word_sae
from tests.evals.core.tools import LAYER, random_sae, shared, some_contexts


def streams(counted: torch.Tensor | None = None, **options) -> stream.Streams:
    counted = torch.ones_like(some_contexts(), dtype=torch.bool) if counted is None else counted
    return stream.Streams(shared(), LAYER, some_contexts(), counted, **options)


def dense_codes(sae, counted) -> torch.Tensor:
    codes = sae.encode(shared().activations(some_contexts(), [LAYER])[LAYER])
    return (codes * counted[..., None]).detach()


# ---- firings -----------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(
    st.integers(1, 8),
    st.integers(1, 80),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 5),
    st.sampled_from([1.1, 9.0, math.inf]),
)
def test_firings_are_the_codes(contexts_at_once, tokens_at_once, keep_gib, skip_first, norm_factor):
    saes, latents = [random_sae(seed=0), random_sae(seed=1)], [[3, 17, 5], list(range(40))]
    counted = stream.counted_positions(some_contexts(), skip_first, (int(some_contexts()[0, 9]),))
    text = streams(counted, at_once=contexts_at_once, keep_gib=keep_gib, norm_factor=norm_factor)
    counts = stream.count_firings(saes, text, tokens_at_once)
    found = stream.collect_firings(saes, text, latents, tokens_at_once)
    norms = shared().activations(some_contexts(), [LAYER])[LAYER].norm(dim=2)
    high = counted & (norms > norm_factor * norms[counted].float().median())
    assert text.high_norm == int(high.sum())
    assert bool(high.any()) == (norm_factor < 2)
    counted = counted & ~high
    for sae, chosen, count, firings in zip(saes, latents, counts, found, strict=True):
        codes = dense_codes(sae, counted)
        assert torch.equal(count, (codes > 0).sum((0, 1)))
        for latent in chosen:
            assert torch.allclose(firings.dense(latent), codes[..., latent].float())
            assert firings.count(latent) == int(count[latent]) == len(firings.of(latent)[0])


def test_the_model_reads_once_if_what_it_gives_can_be_kept():
    class Counting(LanguageModel):
        passes = 0

        def activations(self, *given):
            self.passes += 1
            return super().activations(*given)

    lm = Counting(shared().model, None, "counting")
    for keep, passes in ((1.0, 4), (0.0, 8)):
        lm.passes = 0
        everywhere = torch.ones_like(some_contexts(), dtype=torch.bool)
        text = stream.Streams(lm, LAYER, some_contexts(), everywhere, at_once=2, keep_gib=keep)
        first, again = list(text), list(text)
        assert lm.passes == passes
        assert [piece.contexts for piece in first] == [2, 2, 2, 1]
        assert torch.equal(torch.cat([piece.positions for piece in first]), torch.arange(70))
        assert all(torch.equal(a.x, b.x) for a, b in zip(first, again, strict=True))


@torch.no_grad()
def test_a_threshold_for_each_latent():
    sae = random_sae()
    sae.threshold = torch.linspace(0, 2, 40)
    [firings] = stream.collect_firings([sae], streams(), [[39, 20]])
    codes = dense_codes(sae, torch.ones_like(some_contexts(), dtype=torch.bool))
    assert firings.count(39) == int((codes[..., 39] > 0).sum())
    assert firings.count(20) == int((codes[..., 20] > 0).sum()) > 0


def test_too_many_firings_are_refused(monkeypatch):
    monkeypatch.setattr(stream, "MAX_FIRINGS", 10)
    with pytest.raises(UserError, match=r"^[\d,]+ firings after \d contexts are more than can be held; read fewer"):
        stream.collect_firings([random_sae()], streams(), [range(40)])


@torch.no_grad()
def test_activations_that_are_not_finite_are_refused():
    lm = LanguageModel(shared().model, None, "x")
    lm.activations = lambda tokens, layers: {LAYER: torch.full((*tokens.shape, 16), torch.nan)}
    with pytest.raises(UserError, match="nan or infinite"):
        list(stream.Streams(lm, LAYER, some_contexts(), torch.ones_like(some_contexts(), dtype=torch.bool)))


def test_nothing_left_is_refused():
    with pytest.raises(UserError, match=r"skip_first = 10, left_out = \(\): leave no position"):
        stream.counted_positions(some_contexts(), 10, ())


# ---- places ------------------------------------------------------------------------------------------


def made(dense: torch.Tensor) -> stream.Firings:
    """One latent, number 7, with these activations [n, L]."""
    codes = torch.zeros(dense.numel(), 8)
    codes[:, 7] = dense.flatten()
    return stream.Firings.sort(SparseCodes.from_dense(codes), dense.shape, [7])


texts = st.tuples(st.integers(1, 6), st.integers(9, 30), st.floats(0, 1), st.integers(0, 99))


def some_activations(n, length, share, seed) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    fires = torch.rand(n, length, generator=generator) < share
    return torch.rand(n, length, generator=generator) * fires


@given(texts, st.integers(1, 4), st.integers(1, 12))
def test_top_places_are_the_greedy_choice(text, buffer, k):
    dense = some_activations(*text)
    found = examples.top_places(made(dense), 7, k, buffer).tolist()
    left, expected = dense.clone(), []
    left[:, :buffer] = left[:, dense.shape[1] - buffer :] = 0
    while len(expected) < k and left.max() > 0:
        context, position = divmod(int(left.argmax()), dense.shape[1])
        expected.append([context, position])
        left[context, max(0, position - buffer) : position + buffer + 1] = 0
    assert found == expected


@given(texts, st.integers(1, 4), st.integers(1, 12))
def test_drawn_places_fire_and_are_not_drawn_twice(text, buffer, k):
    dense = some_activations(*text)
    generator = torch.Generator().manual_seed(0)
    found = examples.drawn_places(made(dense), 7, k, buffer, generator, below=0.5)
    inner = dense[:, buffer : dense.shape[1] - buffer]
    assert len(found) == min(k, int(((inner > 0) & (inner < 0.5)).sum()))
    assert len({tuple(place) for place in found.tolist()}) == len(found)
    for context, position in found.tolist():
        assert 0 < dense[context, position] < 0.5
        assert buffer <= position < dense.shape[1] - buffer


def test_draws_follow_the_square_of_the_activation():
    generator = torch.Generator().manual_seed(0)
    value = torch.tensor([1.0, 3.0, 2.0])
    orders = torch.stack([examples.drawn_order(value, 2.0, generator) for _ in range(4000)])
    first = torch.bincount(orders[:, 0], minlength=3) / 4000
    assert torch.allclose(first, torch.tensor([1, 9, 4]) / 14, atol=0.03)
    # Once the largest is drawn, the others' chances are as 1 to 4.
    second = orders[orders[:, 0] == 1][:, 1]
    assert float((second == 2).double().mean()) == pytest.approx(0.8, abs=0.03)


@given(texts, st.integers(1, 4), st.integers(1, 12))
def test_silent_places_are_silent_and_all_there_are(text, buffer, k):
    dense = some_activations(*text)
    found = examples.silent_places(dense, k, buffer, torch.Generator().manual_seed(0)).tolist()
    n, length = dense.shape
    silent = [
        [context, position]
        for context in range(n)
        for position in range(buffer, length - buffer)
        if not dense[context, position - buffer : position + buffer + 1].any()
    ]
    assert len(found) == min(k, len(silent))
    assert len({tuple(place) for place in found}) == len(found)
    assert all(place in silent for place in found)


# ---- examples of given latents -----------------------------------------------------------------------


def test_examples_are_windows_around_what_a_latent_fires_on():
    found = examples.find_examples(
        word_sae(), word_model(), 0, word_contexts(), [0, 4, NEVER, ALWAYS], top=6, random=9, buffer=3
    )
    for latent in (0, 4):
        example, token = found[latent], WORDS.index(LATENTS[latent])
        assert example.fired == int((word_contexts() == token).sum())
        assert len(example.top) == 6
        assert len(example.random) == 9
        for window in example.top + example.random:
            stretch = word_contexts()[window.context, window.centre - 3 : window.centre + 4]
            assert window.tokens == stretch.tolist()
            assert window.tokens[3] == token
            assert [value > 0 for value in window.activations] == [number == token for number in window.tokens]
        largest = [window.activations[3] for window in example.top]
        assert largest == sorted(largest, reverse=True)
        assert example.maximum >= largest[0]
    assert found[NEVER].fired == found[NEVER].maximum == 0
    assert found[NEVER].top == found[NEVER].random == []
    assert found[ALWAYS].fired == word_contexts().numel()


def test_latents_and_windows_that_do_not_fit():
    with pytest.raises(UserError, match="latents = 10: the SAE has 10 latents, 0 to 9"):
        examples.find_examples(word_sae(), word_model(), 0, word_contexts(), [10])
    with pytest.raises(UserError, match="buffer = 24: a window has 49 tokens, but a context only 48"):
        examples.find_examples(word_sae(), word_model(), 0, word_contexts(), [0], buffer=24)
