"""The buffer of a cache: no larger than its tokens need, and the same one when it is continued."""

from types import SimpleNamespace

import pytest

from sampled_sae import load_model
from sampled_sae.data import buffer
from sampled_sae.data.cache import open_cache, write
from sampled_sae.data.cache_index import Index, Part, path_of
from sampled_sae.data.model_source import ModelActivations
from sampled_sae.data.text import TextList
from tests.data.test_cache import contents
from tests.data.tools import harvest
from tests.models.tiny_models import make_model, make_tokenizer

TEXT = TextList(tuple(" ".join(f"the{n * i % 97}" for i in range(60)) for n in range(200)))
SETTINGS = {"heldout_tokens": 40, "shard_tokens": 100, "progress": False}


@pytest.fixture(scope="module")
def model():
    return load_model((make_model("llama"), make_tokenizer()), device="cpu")


@pytest.fixture
def used(model, monkeypatch):
    """Buffers of up to 800 tokens, batches of 50, and how many tokens went through the model."""
    monkeypatch.setattr(buffer, "CACHE_BATCH", 50)
    monkeypatch.setattr(buffer, "SMALLEST", 200)
    monkeypatch.setitem(buffer.LARGEST, "cpu", 800)
    monkeypatch.setattr(buffer, "available", lambda device: None)
    count, usual = SimpleNamespace(tokens=0, stop=None), type(model).activations

    def counted(self, tokens, *more):
        if count.stop is not None and count.tokens >= count.stop:
            raise RuntimeError("power cut")
        count.tokens += tokens.numel()
        return usual(self, tokens, *more)

    monkeypatch.setattr(type(model), "activations", counted)
    return count


def source(model, **settings):
    return ModelActivations(model, TEXT, harvest((1,), contexts_at_once=4, **settings), False)


@pytest.mark.parametrize("tokens", [10, 100, 250, 470, 500, 900, 1500, 2000])
def test_a_cache_takes_about_its_tokens_of_the_model(tokens, model, used, tmp_path):
    write(source(model), tmp_path / "c", tokens, **SETTINGS)
    of_the_text = (used.tokens - 80) * 12 / 20  # without four held-out contexts and what is left out of each context
    assert len(open_cache(tmp_path / "c")) == tokens <= of_the_text < 1.1 * tokens + 50


def test_no_round_is_prepared_beyond_the_last_shard(model, used, tmp_path, monkeypatch):
    """On a GPU, the next round is harvested meanwhile."""
    ends, usual = [], ModelActivations.open

    def kept(self, *settings):
        [stream] = usual(self, *settings).values()
        end_at = stream.end_at
        stream.end_at = lambda steps: ends.append((end_at(steps), stream.harvest.rounds)[1])
        return {"only": stream}

    monkeypatch.setattr(ModelActivations, "open", kept)
    for number in (1, 2):
        write(source(model), tmp_path / "c", 1500, part=Part(number, 2), **SETTINGS)
    assert [(rounds.number, rounds.batches) for rounds in ends] == [(2, 8), (4, 8)]  # 800 of 1,500 tokens, and all


@pytest.mark.parametrize("stop", [100, 500, 1100, 2000, 2700])
def test_interrupted_and_continued_with_less_memory_it_is_the_same(stop, model, used, tmp_path, monkeypatch):
    write(source(model), tmp_path / "whole", 1500, **SETTINGS)
    used.tokens, used.stop = 0, stop
    with pytest.raises(RuntimeError):
        write(source(model), tmp_path / "c", 1500, **SETTINGS)
    used.stop = None
    if (tmp_path / "c/cache.json").exists():
        monkeypatch.setitem(buffer.LARGEST, "cpu", 400)
    write(source(model), tmp_path / "c", 1500, **SETTINGS)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


def test_a_cache_that_grows_keeps_its_buffer(model, used, tmp_path):
    for name, steps in (("at once", [200, 1500]), ("slowly", [200, 700, 1500])):
        for tokens in steps:
            write(source(model), tmp_path / name, tokens, **SETTINGS)
            assert Index.read(tmp_path / name).description["buffer_tokens"] == 360
        first = [path_of(tmp_path / name, number).read_bytes() for number in (0, 1)]
        write(source(model), tmp_path / "first", 200, **SETTINGS)
        assert first == [path_of(tmp_path / "first", number).read_bytes() for number in (0, 1)]
    assert contents(tmp_path / "at once") == contents(tmp_path / "slowly")


def test_with_a_set_buffer_a_cache_that_grew_is_the_one_written_at_once(model, used, tmp_path):
    for name, steps in (("at once", [1500]), ("slowly", [200, 1500])):
        for tokens in steps:
            write(source(model, buffer_tokens=700), tmp_path / name, tokens, **SETTINGS)
    assert contents(tmp_path / "at once") == contents(tmp_path / "slowly")


def test_a_cache_with_a_rolling_buffer_is_continued_in_its_order(model, used, tmp_path):
    """So caches began earlier: with a buffer of the default size, whatever the number of tokens."""

    class Earlier(ModelActivations):
        def for_cache(self, tokens):
            return self

    earlier = Earlier(model, TEXT, harvest((1,), contexts_at_once=4), False)
    write(earlier, tmp_path / "whole", 1500, **SETTINGS)
    write(earlier, tmp_path / "c", 500, **SETTINGS)
    write(source(model), tmp_path / "c", 1500, **SETTINGS)
    description = Index.read(tmp_path / "c").description
    assert description["rolling"] and description["buffer_tokens"] == 800
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


@pytest.mark.parametrize("rolling", ["auto", True])
def test_few_tokens_of_each_context(rolling, model, used, tmp_path):
    """The batch follows from the buffer's size alone, so that a cache can be continued."""
    for size in (None, 200, 800):
        given = source(model, skip_first=18, rolling=rolling, buffer_tokens=size)
        begun = given.for_cache(100)
        assert begun.as_begun({"buffer_tokens": begun.config.buffer_tokens}).cache_batch == begun.cache_batch
        write(given, tmp_path / str(size), 100, **SETTINGS)
        assert len(open_cache(tmp_path / str(size))) == 100
