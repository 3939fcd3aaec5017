"""One reading of a text against dense codes."""

import pytest
import torch

from sampled_sae.browser.latents import NONE, histogram, top_tokens
from sampled_sae.evals import reading
from sampled_sae.evals.reading import Streams, collect_firings
from sampled_sae.utils.errors import UserError
from tests.browser.made_up import made_up_firings
from tests.evals.autointerp.tools import ALWAYS, LATENTS, LAYER, NEVER, WORDS, word_contexts, word_model, word_sae


def read(saes, at_once=2048, contexts=None):
    contexts = word_contexts(20) if contexts is None else contexts
    counted = torch.ones(contexts.shape, dtype=torch.bool)
    counted[:, 0] = False
    streams = Streams(word_model(), LAYER, contexts, counted, at_once=6, keep_gib=0.0)
    return collect_firings(saes, streams, tokens_at_once=at_once)


def test_against_dense_codes():
    sae, contexts = word_sae(), word_contexts(20)
    stream = word_model().activations(contexts, [LAYER])[LAYER]
    codes = sae.encode(stream).detach()
    codes[:, 0] = 0
    first, second = read([sae, sae], at_once=7)
    assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True))
    dense = torch.zeros(contexts.numel(), sae.d_sae)
    dense[first.position.long(), first.latent.long()] = first.value
    torch.testing.assert_close(dense.view(*contexts.shape, -1), codes)
    assert torch.equal(first.fired, (codes > 0).sum((0, 1)))
    torch.testing.assert_close(first.maximum, codes.amax((0, 1)))
    assert first.fired[NEVER] == 0 and first.fired[ALWAYS] > 500


def test_top_tokens_are_what_the_latents_were_made_for():
    [found] = read([word_sae()])
    tokens, shares = top_tokens(found, word_contexts(20), 3)
    assert [WORDS[int(token)] for token in tokens[: len(LATENTS), 0]] == list(LATENTS)
    assert tokens[NEVER].tolist() == [NONE] * 3 and shares[NEVER].tolist() == [0] * 3


def test_summaries_against_loops():
    found, contexts = made_up_firings(30, 9, 6, 5), torch.randint(5, (9, 6))
    tokens, shares = top_tokens(found, contexts, 3)
    counts = histogram(found, 7)
    for latent in range(30):
        own = found.latent == latent
        value, ids = found.value[own].double(), contexts.flatten()[found.position[own].long()]
        total = torch.zeros(5, dtype=torch.float64).index_add(0, ids, value)
        order = total.argsort(descending=True)[: min(3, int((total > 0).sum()))]
        assert tokens[latent, : len(order)].tolist() == order.tolist() and (tokens[latent, len(order) :] == NONE).all()
        torch.testing.assert_close(shares[latent, : len(order)].double(), total[order] / total.sum(), rtol=1e-6, atol=0)
        if len(value):
            torch.testing.assert_close(counts[latent].float(), value.float().histc(7, 0, float(value.max())))
    assert int(counts.sum()) == len(found.value)


def test_a_silent_sae_has_empty_summaries():
    sae = word_sae()
    sae.threshold.fill_(1e9)
    [found] = read([sae])
    assert len(found.value) == 0 and int(histogram(found, 4).sum()) == 0
    assert (top_tokens(found, word_contexts(20), 2).token == NONE).all()


def test_too_many_and_damaged(monkeypatch):
    damaged = word_sae()
    damaged.b_enc.data[2] = torch.nan
    with pytest.raises(UserError, match="its weights are damaged"):
        read([damaged])
    monkeypatch.setattr(reading, "MAX_FIRINGS", 100)
    with pytest.raises(UserError, match="are more than can be held; read fewer tokens"):
        read([word_sae()])
