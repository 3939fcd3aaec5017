"""What only a GPU shows of a harvest: the next block is collected beside the training. Skipped without one."""

from dataclasses import replace

import pytest
import torch

import sampled_sae as ss
from sampled_sae.models.language_model import LanguageModel
from tests.data.test_harvest import documents
from tests.data.tools import harvest, open_harvest
from tests.models.tiny_models import make_model, make_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = harvest((0, 2), skip_first=0, high_norm_factor=10.0, buffer_tokens=400, contexts_at_once=7)
SETTINGS = {"batch_size": 32, "heldout_tokens": 40}


def model(device: str) -> LanguageModel:
    return LanguageModel(make_model("llama").to(device), make_tokenizer(), "tiny")


def test_batches_are_those_of_a_cpu():
    here, there = (open_harvest(model(d), documents(), CONFIG, **SETTINGS) for d in ("cuda", "cpu"))
    for layer in here:
        for index in (0, 1, 11, 12, 13, 30, 31):
            torch.testing.assert_close(here[layer].batch(index).cpu(), there[layer].batch(index), rtol=1e-3, atol=1e-3)


def test_training_beside_the_harvest_is_deterministic_and_resumes(tmp_path):
    lm, config = model("cuda"), ss.batchtopk(256, 4)
    common = {"steps": 90, "batch_size": 32, "device": "cuda", "progress": False, "checkpoint_every": 20}

    def streams():
        return open_harvest(lm, documents(), CONFIG, **SETTINGS)

    whole = ss.train(streams(), [config], **common)
    broken = streams()
    given = broken["layer-2"].batch
    broken["layer-2"].batch = lambda index: given(index) if index < 50 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        ss.train(broken, [config], out=tmp_path, **common)
    resumed = ss.train(streams(), [config], out=tmp_path, resume=True, **common)
    for layer in whole:
        for a, b in zip(whole[layer][0].parameters(), resumed[layer][0].parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_harvest_through_compiled_blocks_is_the_same_but_for_rounding(monkeypatch):
    """A block has 10 contexts: passes of 5, all of the shape for which the blocks are compiled."""
    plain = open_harvest(model("cuda"), documents(), CONFIG, **SETTINGS)["layer-2"]
    lm, shapes = model("cuda"), set()
    fast = open_harvest(lm, documents(), replace(CONFIG, compile=True), **SETTINGS)["layer-2"]
    given = lm.activations

    def seen(tokens, hooks):
        shapes.add(tuple(tokens.shape))
        return given(tokens, hooks)

    monkeypatch.setattr(lm, "activations", seen)
    for index in (0, 1, 13, 30):
        torch.testing.assert_close(fast.batch(index), plain.batch(index), rtol=1e-3, atol=1e-3)
    assert lm._compiles and shapes == {(5, 20)} == {lm._compiled_for}


def test_a_compiled_model_gives_the_same_but_for_rounding():
    lm = model("cuda")
    tokens = torch.randint(0, lm.vocabulary, (5, 20), generator=torch.Generator().manual_seed(0))
    before = lm.activations(tokens, [0, 2])
    lm.compile()
    after = lm.activations(tokens, [0, 2])
    for layer in (0, 2):
        torch.testing.assert_close(after[layer], before[layer], rtol=1e-3, atol=1e-3)
