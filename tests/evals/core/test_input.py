import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sampled_sae as ss
from sampled_sae.evals.core import fidelity as core_fidelity
from sampled_sae.evals.core import loss as core_loss
from sampled_sae.evals.core.evaluate import evaluate_core_many
from sampled_sae.evals.core.schema import CoreConfig
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from tests.evals.core.tools import LAYER, as_json, assert_near, evaluate_core, random_sae, shared, some_contexts, tiny
from tests.models.tiny_models import WORDS, make_model

# ---- what must not matter ----------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.integers(1, 8), st.integers(1, 80), st.integers(1, 5))
def test_sizes_of_chunks_do_not_matter(contexts_at_once, tokens_at_once, rows):
    lm, contexts = shared(), some_contexts()
    sae = random_sae(config=ss.batchtopk(40, 3))
    given = dict(skip_first=1, norm_factor=1.5, cut_batch=4, legacy_batch=2, resamples=20)
    chosen = CoreConfig(**given, contexts_at_once=contexts_at_once, tokens_at_once=tokens_at_once)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_loss, "MOST", rows * len(WORDS))
        found = evaluate_core(sae, lm, LAYER, contexts, chosen)
    assert_near(as_json(found), as_json(evaluate_core(sae, lm, LAYER, contexts, CoreConfig(**given))))


def test_sparse_and_dense_decoding_agree(lm, contexts, monkeypatch):
    first = evaluate_core(random_sae(), lm, LAYER, contexts)
    monkeypatch.setattr(core_fidelity, "DENSE", 2.0)
    assert_near(as_json(first), as_json(evaluate_core(random_sae(), lm, LAYER, contexts)))


def test_many_are_as_one_by_one(lm, contexts):
    saes = [
        random_sae(seed=0),
        random_sae(24, 1, ss.batchtopk(24, 2)),
        random_sae(24, 2, ss.sampled(24, 2, score="uniform", l=4)),
    ]
    given = CoreConfig(cut_batch=16)
    together = evaluate_core_many(saes, lm, LAYER, contexts, given)
    for sae, result in zip(saes, together, strict=True):
        assert as_json(result) == as_json(evaluate_core(sae, lm, LAYER, contexts, given))


def test_contexts_of_another_type_of_number(lm, contexts):
    first = evaluate_core(random_sae(), lm, LAYER, contexts)
    assert as_json(first) == as_json(evaluate_core(random_sae(), lm, LAYER, contexts.int()))


def test_an_sae_in_another_dtype_than_the_model(contexts):
    lm = LanguageModel(make_model("llama").bfloat16(), None, "tiny")
    result = evaluate_core(random_sae().float(), lm, LAYER, contexts)
    exact = evaluate_core(random_sae(), shared(), LAYER, contexts)
    assert result.measured.fvu.value == pytest.approx(exact.measured.fvu.value, rel=0.1)
    assert result.loss.ce_model.value == pytest.approx(exact.loss.ce_model.value, rel=0.1)
    as_json(result)


def test_without_the_loss_the_model_is_not_read_to_the_end(contexts):
    lm, called = tiny(), []
    lm.blocks[LAYER + 1].register_forward_pre_hook(lambda *_: called.append(1))
    result = evaluate_core(random_sae(), lm, LAYER, contexts, CoreConfig(loss=False))
    assert result.loss is None
    assert not called
    assert result.measured == evaluate_core(random_sae(), shared(), LAYER, contexts).measured


def test_seed_level_and_no_resamples(lm, contexts):
    def fvu(**given):
        return evaluate_core(random_sae(), lm, LAYER, contexts, CoreConfig(loss=False, **given)).measured.fvu

    assert fvu() == fvu()
    assert fvu().value == fvu(seed=1).value
    assert fvu().low != fvu(seed=1).low
    assert fvu().low < fvu(level=0.5).low < fvu(level=0.5).high < fvu().high
    assert fvu(resamples=0)[1:] == (None, None)


# ---- refusals ----------------------------------------------------------------------------------------


def test_bad_input(lm, contexts):
    with pytest.raises(UserError, match="sae has width 5: must be 16, the width of tiny"):
        evaluate_core(SAE(InferenceConfig(5, 8)), lm, LAYER, contexts)
    with pytest.raises(UserError, match=r"saes\[1\] has width 5"):
        evaluate_core_many([random_sae(), SAE(InferenceConfig(5, 8))], lm, LAYER, contexts)
    with pytest.raises(UserError, match="at least one SAE"):
        evaluate_core_many([], lm, LAYER, contexts)
    with pytest.raises(UserError, match="layer = 9: tiny has 3 layers"):
        evaluate_core(random_sae(), lm, 9, contexts)
    for bad in (contexts[0], contexts.float(), contexts[:0], contexts[:, :1]):
        with pytest.raises(UserError, match=r"contexts are .* must be token ids"):
            evaluate_core(random_sae(), lm, LAYER, bad)
    with pytest.raises(UserError, match=r"skip_first = 10, left_out = \(\): leave no position of the text"):
        evaluate_core(random_sae(), lm, LAYER, contexts, CoreConfig(skip_first=10))
    with pytest.raises(UserError, match=r"left_out = .*: leave no position of the text"):
        evaluate_core(random_sae(), lm, LAYER, contexts, CoreConfig(left_out=tuple(range(len(WORDS)))))
    with pytest.raises(UserError, match="another model's tokenizer"):
        evaluate_core(random_sae(), lm, LAYER, contexts + 10**6)


def test_activations_that_overflow(contexts):
    lm = tiny()
    lm.blocks[0].register_forward_hook(lambda *seen: seen[2] * math.inf)
    with pytest.raises(UserError, match="layer = 1: tiny gives activations that are nan or infinite"):
        evaluate_core(random_sae(), lm, LAYER, contexts)


def test_out_of_memory_names_the_settings(lm, contexts, monkeypatch):
    def fail(*_):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(SAE, "encode", fail)
    with pytest.raises(UserError, match=r"tokens_at_once = 2048.*out of GPU memory; lower them"):
        evaluate_core(random_sae(), lm, LAYER, contexts)
