"""The sparse path against the dense, autograd-differentiated specification."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampled_sae.method.config import AuxKConfig, Fraction, Multiplier, PoolConfig, SAEConfig, Scope
from sampled_sae.method.parameters import Parameters, start_parameters
from sampled_sae.method.pools import PlainEncoder, candidates
from sampled_sae.method.selection import keep_largest
from sampled_sae.training.step import loss_and_gradients
from tests import reference


def random_weights(d: int, m: int, seed: int) -> Parameters:
    generator = torch.Generator().manual_seed(seed)
    weights = start_parameters(d, m, generator, torch.float64)
    weights.b_enc.copy_(0.1 * torch.randn(m, generator=generator, dtype=torch.float64))
    weights.b_dec.copy_(0.1 * torch.randn(d, generator=generator, dtype=torch.float64))
    return weights


def reference_step(x, weights, k, group, pool, dead, alpha, k_aux, prefixes):
    """Loss, codes and gradients by autograd, everything dense."""
    leaves = Parameters(*(w.clone().requires_grad_() for w in weights))
    z = reference.activations(x, leaves.W_enc.T, leaves.b_enc, leaves.b_dec)
    codes = reference.batch_topk(z, k, group, pool)
    x_hat = reference.reconstruct(codes, leaves.W_dec, leaves.b_dec)
    loss = reference.prefix_loss(x, codes, leaves.W_dec, leaves.b_dec, prefixes)
    loss = loss + alpha * reference.auxk_loss(x, x_hat, z, dead, leaves.W_dec, k_aux)
    return loss, codes, torch.autograd.grad(loss, leaves)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    d=st.integers(2, 9),
    m=st.integers(4, 24),
    k=st.integers(1, 4),
    groups=st.sampled_from([1, 2, 3, 6]),
    pool=st.sampled_from([None, "top", "sample"]),
    dead_share=st.sampled_from([0.0, 0.3, 1.0]),
    k_aux=st.integers(1, 5),
    narrower=st.sets(st.integers(1, 23), max_size=4),
)
def test_loss_codes_and_gradients_equal_the_reference(seed, d, m, k, groups, pool, dead_share, k_aux, narrower):
    weights = random_weights(d, m, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(6, d, generator=generator, dtype=torch.float64)
    dead = torch.rand(m, generator=generator) < dead_share
    group = 6 // groups
    settings_ = PoolConfig() if pool is None else PoolConfig(size=Fraction(0.5), pick=pool)
    config = SAEConfig(m, k, pool=PoolConfig(settings_.score, settings_.size, settings_.pick, Scope(tokens=group)))

    found = candidates(PlainEncoder(x, weights), config, 0, 10, torch.Generator().manual_seed(seed))
    codes = keep_largest(found.z.clone(), k, found.group, m, found.columns, "batch")
    numbers = dead.nonzero().squeeze(1) if dead.any() else None
    prefixes = (*sorted(width for width in narrower if width < m), m)
    outcome = loss_and_gradients(x, weights, codes, numbers, AuxKConfig(0.25, k=k_aux), prefixes)
    if len(prefixes) == 1:
        assert torch.equal(outcome.loss, loss_and_gradients(x, weights, codes, numbers, AuxKConfig(0.25, k=k_aux)).loss)

    # The specification is handed the pools that were drawn: group by group, from the codes' own candidates.
    mask = None
    if pool is not None:
        again = candidates(PlainEncoder(x, weights), config, 0, 10, torch.Generator().manual_seed(seed))
        z = reference.activations(x, weights.W_enc.T, weights.b_enc, weights.b_dec)
        if again.columns is not None:
            mask = again.pool[None]
        else:
            mask = ((again.z > 0) | (z == 0)).view(groups, group, m).all(1)
    loss, expected_codes, gradients = reference_step(x, weights, k, group, mask, dead, 0.25, k_aux, prefixes)

    torch.testing.assert_close(codes.dense(), expected_codes.detach())
    torch.testing.assert_close(outcome.loss, loss.detach())
    for name, got, wanted in zip(Parameters._fields, outcome.gradients, gradients, strict=True):
        torch.testing.assert_close(got, wanted, msg=lambda text, name=name: f"{name}: {text}")


@given(seed=st.integers(0, 10**6), l=st.sampled_from([1, 2, 3.5]), groups=st.sampled_from([1, 2, 4]))
def test_codes_stay_in_the_pool_and_within_the_budget(seed, l, groups):
    d, m, k, tokens = 6, 20, 3, 8
    weights = random_weights(d, m, seed)
    x = torch.randn(tokens, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    config = SAEConfig(m, k, pool=PoolConfig("l2", Multiplier(l), scope=Scope(tokens=tokens // groups)))
    found = candidates(PlainEncoder(x, weights), config, 0, 10, torch.Generator().manual_seed(0))
    codes = keep_largest(found.z, k, found.group, m, found.columns, "batch")
    dense = codes.dense()
    assert (dense[:, ~found.pool] == 0).all()
    assert (dense > 0).sum() == len(codes.value) <= k * tokens
    for part in dense.view(groups, -1, m):
        assert (part > 0).any(0).sum() <= int(k * l)


@given(seed=st.integers(0, 10**6), tokens=st.permutations(range(6)), latents=st.permutations(range(12)))
def test_permuting_tokens_or_latents_permutes_the_codes(seed, tokens, latents):
    weights = random_weights(5, 12, seed)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    config = SAEConfig(12, 2, pool=PoolConfig("l2", Multiplier(3)))

    def codes(x, weights):
        found = candidates(PlainEncoder(x, weights), config, 0, 10, torch.Generator())
        return keep_largest(found.z, 2, found.group, 12, found.columns, "batch").dense()

    shuffled = Parameters(weights.W_enc[latents], weights.b_enc[latents], weights.W_dec[latents], weights.b_dec)
    torch.testing.assert_close(codes(x[tokens], weights), codes(x, weights)[tokens])
    torch.testing.assert_close(codes(x, shuffled), codes(x, weights)[:, latents])


@pytest.mark.parametrize("l", [1, 2])
def test_one_token_scope_is_topk(l):
    """At l = 1 the pool is the token's own K largest; for l > 1 the cut makes it so."""
    weights = random_weights(8, 30, 3)
    x = torch.randn(10, 8, dtype=torch.float64)
    config = SAEConfig(30, 4, pool=PoolConfig("l2", Multiplier(l), scope=Scope(tokens=1)))
    found = candidates(PlainEncoder(x, weights), config, 0, 10, torch.Generator())
    codes = keep_largest(found.z, 4, found.group, 30, found.columns, "batch").dense()
    z = reference.activations(x, weights.W_enc.T, weights.b_enc, weights.b_dec)
    top = z.topk(4, dim=1)
    torch.testing.assert_close(codes, torch.zeros_like(z).scatter(1, top.indices, top.values))


def test_row_wise_cut_keeps_k_of_each_token_inside_the_pool():
    weights = random_weights(8, 30, 4)
    x = torch.randn(10, 8, dtype=torch.float64)
    config = SAEConfig(30, 3, pool=PoolConfig("l2", Multiplier(4)), cut="token")
    found = candidates(PlainEncoder(x, weights), config, 0, 10, torch.Generator())
    codes = keep_largest(found.z, 3, found.group, 30, found.columns, "token").dense()
    z = reference.activations(x, weights.W_enc.T, weights.b_enc, weights.b_dec) * found.pool
    top = z.topk(3, dim=1)
    torch.testing.assert_close(codes, torch.zeros_like(z).scatter(1, top.indices, top.values))


@pytest.mark.parametrize("prefixes", [None, (6, 11, 20)])
def test_a_latents_gain_is_the_loss_without_it_less_the_loss(prefixes):
    d, m, k = 6, 20, 3
    weights = random_weights(d, m, 0)
    x = torch.randn(8, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = candidates(PlainEncoder(x, weights), SAEConfig(m, k), 0, 10, torch.Generator())
    codes = keep_largest(found.z, k, found.group, m, None, "batch")
    outcome = loss_and_gradients(x, weights, codes, None, AuxKConfig(), prefixes, gains=True)
    for latent in range(m):
        without = codes.where(codes.latent != latent)
        loss = loss_and_gradients(x, weights, without, None, AuxKConfig(), prefixes).loss
        torch.testing.assert_close(outcome.gain[latent], loss - outcome.loss)
