import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sampled_sae as ss
from sampled_sae.evals.core.fidelity import MixedBatches
from sampled_sae.evals.core.schema import CoreConfig
from sampled_sae.method.config import Everything, PoolConfig, SAEConfig, Scope
from sampled_sae.training.heldout import as_trained
from sampled_sae.utils.errors import UserError
from tests.evals.core.tools import LAYER, evaluate_core, random_sae


def test_trained_cut_of_one_batch_is_as_trained(lm, contexts):
    sae = random_sae(config=ss.sampled(40, 3, l=4))
    result = evaluate_core(sae, lm, LAYER, contexts, CoreConfig(skip_first=1, trained_on_high_norm=True)).trained
    x = lm.activations(contexts, [LAYER])[LAYER][:, 1:].flatten(0, 1)
    truth = as_trained(sae, x, len(x))
    assert result.tokens == len(x)
    assert result.fvu.value == pytest.approx(1 - truth.fve)
    assert result.l0.value == truth.l0


def test_trained_cut_leaves_out_high_norms_and_the_last_part(lm, contexts):
    sae = random_sae(config=ss.batchtopk(40, 3))
    few = evaluate_core(sae, lm, LAYER, contexts, CoreConfig(norm_factor=1.2, cut_batch=8))
    normal = few.normal.tokens
    assert few.trained.tokens == normal - normal % 8 < few.measured.tokens
    everything = evaluate_core(sae, lm, LAYER, contexts, CoreConfig(norm_factor=1.2, trained_on_high_norm=True))
    assert everything.trained.tokens == 70
    assert everything.trained.l0.value == 3


def test_trained_cut_in_groups_of_tokens(lm, contexts):
    pool = PoolConfig(size=Everything(), scope=Scope(tokens=8))
    sae = random_sae(config=SAEConfig(d_sae=40, k=3, pool=pool))
    assert evaluate_core(sae, lm, LAYER, contexts).trained.tokens == 64
    with pytest.raises(UserError, match=r"scope\.tokens = 8: must divide batch_size = 12"):
        evaluate_core(sae, lm, LAYER, contexts, CoreConfig(cut_batch=12))


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 5))
def test_mixed_batches_hold_every_token_at_most_once(sizes, size):
    x = torch.arange(sum(sizes), dtype=torch.float32)[:, None]

    def batches(parts):
        mixed = MixedBatches(size, seed=0)
        given = [batch for part in parts for batch in mixed.add(part, part[:, 0].long())]
        return [*given, *mixed.finish()]

    found = batches(x.split(sizes))
    again = batches([x])
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(found, again, strict=True))
    assert all(torch.equal(a[:, 0].long(), context) for a, context in found)
    numbers = torch.cat([context for _, context in found]).tolist() if found else []
    assert len(numbers) == len(set(numbers))
    assert len(numbers) == (len(x) - len(x) % size if len(x) >= size else len(x))
