import inspect
import json
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sampled_sae.data import contexts as module
from sampled_sae.data.contexts import TextConfig, contexts, find_end_of_text
from sampled_sae.data.text import TextSource
from sampled_sae.utils.errors import UserError

END = "<|endoftext|>"


def make_tokenizer(specials=(END, "<s>"), **roles) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 600 tokens, as GPT-2 and its kin have, learnt from a few modules of Python."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([inspect.getsource(part) for part in (inspect, json)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


TOKENIZER = make_tokenizer(eos_token=END, bos_token="<s>")


class Called:
    """The same tokenizer without the quick way into it."""

    bos_token_id, eos_token_id = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id

    def get_vocab(self):
        return TOKENIZER.get_vocab()

    def __call__(self, text, **options):
        return TOKENIZER(text, **options)


class Counting(Called):
    """Remembers what it tokenized."""

    def __init__(self):
        self.texts = []

    def __call__(self, text, **options):
        self.texts += text
        return super().__call__(text, **options)


def token_stream(texts) -> list[int]:
    """All tokens, one end-of-text between two documents."""
    ids = []
    for text in filter(None, texts):
        begin = [TOKENIZER.eos_token_id] if ids else []
        ids += begin + TOKENIZER([text], add_special_tokens=False, split_special_tokens=True)["input_ids"][0]
    return ids


def lists(stream) -> list[list[int]]:
    return [context.tolist() for context in stream]


TEXTS = [f"def f{number}(x):\n    return x + {number}\n" for number in range(40)]
a_text = st.one_of(st.text(max_size=30), st.text("ab <|endoftx>", max_size=60))
some_texts = st.lists(a_text, max_size=12)


@given(texts=some_texts, length=st.integers(2, 40), bos=st.booleans(), at_once=st.integers(1, 9), call=st.booleans())
def test_contexts_are_the_token_stream_cut(texts, length, bos, at_once, call):
    config = TextConfig(context=length, bos=bos, documents_at_once=at_once)
    flat = token_stream(texts)
    own = length - bos
    stream = contexts(texts, Called() if call else TOKENIZER, config)
    if len(flat) < own:
        with pytest.raises(UserError, match=f"text: {len(flat)} tokens in all, too few for one context of"):
            next(stream)
        return
    got = list(stream)
    assert all(context.dtype == torch.int64 and context.shape == (length,) for context in got)
    assert [id for context in got for id in context[bos:].tolist()] == flat[: len(flat) // own * own]
    assert all(context[0] == TOKENIZER.bos_token_id for context in got if bos)


def test_the_end_is_repeated():
    stream = contexts(TEXTS, TOKENIZER, TextConfig(context=50))
    assert len(list(stream)) > 0
    assert next(stream, None) is None


def test_a_document_that_quotes_special_tokens_has_none():
    texts = [f"a {END} b", "c<s>d", "e" * 30]
    for tokenizer in (TOKENIZER, Called()):
        flat = torch.cat(list(contexts(texts, tokenizer, TextConfig(context=2))))
        assert (flat == TOKENIZER.eos_token_id).sum() == 2
        assert (flat == TOKENIZER.bos_token_id).sum() == 0
    assert TOKENIZER([texts[0]])["input_ids"][0].count(TOKENIZER.eos_token_id) == 1  # the user's is as it was


def test_settings_of_the_tokenizer_do_not_matter():
    tokenizer = make_tokenizer(eos_token=END, bos_token="<s>", pad_token=END)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=99)
    config = TextConfig(context=16)
    assert lists(contexts(TEXTS, tokenizer, config)) == lists(contexts(TEXTS, TOKENIZER, config))
    assert tokenizer.backend_tokenizer.truncation is not None


def test_long_documents_are_tokenized_in_parts(monkeypatch):
    source = inspect.getsource(inspect)[:20_000]
    whole = lists(contexts([source, "x"], TOKENIZER, TextConfig(context=8)))
    monkeypatch.setattr(module, "LONGEST", 300)
    monkeypatch.setattr(module, "MOST", 1000)
    counting, config = Counting(), TextConfig(context=8)
    stream = contexts([source, "x"], counting, config)
    first = lists(islice(stream, len(whole) // 2))
    assert max(map(len, counting.texts)) <= 300
    assert len(counting.texts) < 50
    assert first + lists(stream) == whole
    assert "".join(module._parts("x" * 1000)) == "x" * 1000
    assert list(module._parts("")) == []


def test_halves_of_surrogates_are_replaced():
    assert lists(contexts(["a\ud800b" * 9], TOKENIZER, TextConfig(4))) == lists(
        contexts(["a\ufffdb" * 9], TOKENIZER, TextConfig(4))
    )


def test_the_standard_library_end_to_end():
    config = TextConfig(bos=True, skip_first=1)
    first = list(islice(contexts(TextSource("stdlib").documents(), TOKENIZER, config), 3))
    assert [context.shape for context in first] == [(1024,)] * 3
    beginning = next(TextSource("stdlib").documents())
    assert TOKENIZER.decode(first[0][1:]).startswith(beginning[:500])


# ---- the token between documents -------------------------------------------------------------------


def test_the_end_of_text_is_the_one_of_pretraining():
    chat = make_tokenizer(("<s>", "<|im_end|>", END), eos_token="<|im_end|>")
    assert find_end_of_text(chat) == 2
    assert find_end_of_text(chat, "<|im_end|>") == 1
    assert find_end_of_text(make_tokenizer(("<s>", "<|end_of_text|>"), eos_token="<s>")) == 1
    assert find_end_of_text(make_tokenizer(("<s>", "</s>"), eos_token="</s>")) == 1


def test_a_tokenizer_without_what_is_needed():
    bare = make_tokenizer(())
    with pytest.raises(UserError, match="end_of_text = None: the tokenizer has no end-of-text token; name a token"):
        contexts(TEXTS, bare)
    with pytest.raises(UserError, match="end_of_text = '</s>': the tokenizer has no such token"):
        contexts(TEXTS, TOKENIZER, TextConfig(end_of_text="</s>"))
    with pytest.raises(UserError, match="bos = True: the tokenizer has no BOS token; must be False"):
        contexts(TEXTS, bare, TextConfig(bos=True, end_of_text="a"))


# ---- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": 1}, "context = 1: a context must have at least 2 tokens"),
        ({"context": 8.5}, "context = 8.5: must be a whole number"),
        ({"context": 8, "skip_first": 8}, "skip_first = 8: must leave some of the 8 positions"),
        ({"skip_first": -1}, "skip_first = -1: must not be negative"),
        ({"bos": "yes"}, "bos = 'yes': must be True or False"),
        ({"end_of_text": 3}, "end_of_text = 3: must be text, or none"),
        ({"documents_at_once": 0}, "documents_at_once = 0: must be at least 1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(UserError, match=message):
        TextConfig(**settings)


def test_documents_that_are_none():
    with pytest.raises(UserError, match="documents = 'a text': must be an iterable of texts"):
        next(contexts("a text", TOKENIZER))
    with pytest.raises(UserError, match="documents: item 1 is a NoneType: must be a text"):
        next(contexts(["a", None], TOKENIZER))
    with pytest.raises(UserError, match="text: 0 tokens in all, too few for one context of 1024; give more"):
        next(contexts([], TOKENIZER))
