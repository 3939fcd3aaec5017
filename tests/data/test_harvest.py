from collections import Counter

import pytest
import torch

import sampled_sae as ss
from sampled_sae.data.contexts import TextConfig
from sampled_sae.data.harvest import SPARE, HarvestConfig, HarvestStream
from sampled_sae.data.layers import LanguageModel
from sampled_sae.data.stream import open_stream
from tests.data.tiny_models import CONTEXT, LAYERS, WIDTH, make_model, make_tokenizer

TEXT = TextConfig(length=20, skip_first=8)  # behind eight others, no two tokens look the same
CONFIG = HarvestConfig(1, TEXT, buffer_tokens=400, contexts_at_once=3, max_norm=None)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(make_model("llama"), make_tokenizer(), "tiny")


def documents(count: int = 60):
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        words = torch.randint(0, 50, (int(torch.randint(5, 40, (), generator=generator)),), generator=generator)
        yield f"{number:03d} " + " ".join(f"the{int(w)}" for w in words)


def stream(model, config=CONFIG, count=60, **options) -> HarvestStream:
    return HarvestStream(
        model, documents(count), config, **{"batch_size": 30, "heldout_tokens": 40, "seed": 0} | options
    )


def rows(x: torch.Tensor) -> Counter[bytes]:
    return Counter(row.numpy().tobytes() for row in x)


def test_batches_are_the_models_activations_without_the_first_positions(model):
    s = stream(model)
    assert s.held_contexts == 4 and s.block_contexts == 20 and s.block_batches == int(20 * 12 * (1 - SPARE)) // 30
    tokens = s.bank.take(0, 20, skip=4)
    truth = rows(model.activations(tokens.long(), [1])[1][:, 8:].reshape(-1, WIDTH))
    given = [s.batch(i) for i in range(s.block_batches)]
    assert all(b.shape == (30, WIDTH) for b in given)
    block = rows(torch.cat(given))
    assert block <= truth
    assert not rows(s.heldout) & block


@pytest.mark.parametrize("at_once", [1, 7, 50])
def test_batches_do_not_depend_on_how_many_contexts_go_through_the_model(model, at_once):
    other = HarvestConfig(1, TEXT, buffer_tokens=400, contexts_at_once=at_once, max_norm=None)
    a, b = stream(model), stream(model, other)
    for index in range(30):
        torch.testing.assert_close(a.batch(index), b.batch(index), rtol=1e-4, atol=1e-4)


def test_a_batch_follows_from_its_number_and_the_seed(model):
    whole, later, other = stream(model), stream(model), stream(model, seed=1)
    batches = [whole.batch(i) for i in range(40)]
    assert torch.equal(later.batch(31), batches[31])
    assert torch.equal(later.batch(39), batches[39])
    assert not torch.equal(other.batch(0), batches[0])
    assert torch.equal(other.heldout, whole.heldout)


def test_a_block_mixes_documents(model):
    s = stream(model)
    tokens = s.bank.take(0, 20, skip=4)
    where = {
        row.numpy().tobytes(): n for n, x in enumerate(model.activations(tokens.long(), [1])[1][:, 8:]) for row in x
    }
    first = {where[key] for key in rows(s.batch(0))}
    assert len(first) > 10


def test_a_short_text_begins_again_in_another_order(model):
    s = stream(model, count=12, heldout_tokens=400)
    total = s.bank.has(10**6)
    blocks = [torch.cat([s.batch(b * s.block_batches + i) for i in range(s.block_batches)]) for b in range(3)]
    assert s.held_contexts == max(1, total // 10)
    assert len(rows(torch.cat(blocks))) < sum(map(len, blocks))
    assert not torch.equal(blocks[0], blocks[1])
    assert not rows(s.heldout) & rows(torch.cat(blocks))


def test_tokens_of_high_norm_are_left_out(model):
    every = stream(model)
    norms = torch.cat([every.batch(i) for i in range(20)]).norm(dim=1)
    config = HarvestConfig(1, TEXT, buffer_tokens=400, max_norm=1.05)
    s = stream(model, config)
    assert s.limit < float(norms.max())
    x = torch.cat([s.batch(i) for i in range(20)])
    assert float(x.norm(dim=1).max()) <= s.limit
    assert float(s.heldout.norm(dim=1).max()) <= s.limit
    assert s.metadata["max_norm"] == s.limit


def test_training_on_a_harvest_resumes_to_the_same_weights(model, tmp_path):
    common = {"steps": 30, "batch_size": 30, "progress": False, "device": "cpu", "checkpoint_every": 10}
    config = ss.batchtopk(64, 4)
    (whole,) = ss.train(stream(model), config, **common)
    assert whole.metadata["hook_name"] == "blocks.1.hook_resid_post"
    assert whole.metadata["hook_module"] == "model.layers.1"

    class Broken(HarvestStream):
        def batch(self, index):
            if index == 17:
                raise RuntimeError("power cut")
            return super().batch(index)

    broken = Broken(model, documents(), CONFIG, batch_size=30, heldout_tokens=40)
    with pytest.raises(RuntimeError):
        ss.train(broken, config, out=tmp_path / "run", **common)
    (resumed,) = ss.train(stream(model), config, out=tmp_path / "run", resume=True, **common)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    loaded = ss.SAE.load(tmp_path / "run" / "saes" / "batchtopk-s0")
    assert loaded.metadata["model_name"] == "tiny" and loaded.metadata["layer"] == 1


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda m: stream(m, HarvestConfig(LAYERS, TEXT, 400)), f"layer = {LAYERS}: tiny has {LAYERS} layers"),
        (lambda m: HarvestStream(m, iter(["the " * 15]), CONFIG, batch_size=30), "text holds .* two are needed"),
        (lambda m: stream(m, batch_size=5000), "batch_size = 5000: a block of buffer_tokens"),
        (lambda m: HarvestConfig(1, TEXT, buffer_tokens=10), "buffer_tokens = 10: must hold at least one context"),
        (lambda m: HarvestConfig(1, TEXT, max_norm=0), "max_norm = 0.0: must be positive"),
        (lambda m: HarvestConfig(1, TEXT, contexts_at_once=0), "contexts_at_once = 0"),
        (
            lambda m: stream(m, HarvestConfig(1, TextConfig(CONTEXT + 1), 400)),
            "tiny reads at most",
        ),
        (lambda m: open_stream(stream(m), 31, 0, 0), "batch_size = 31: the stream of activations gives batches of 30"),
    ],
)
def test_bad_settings_are_refused_in_one_line(model, make, line):
    with pytest.raises(ss.UserError, match=line) as error:
        make(model)
    assert "\n" not in str(error.value)
