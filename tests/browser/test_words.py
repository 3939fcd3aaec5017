"""Tokens as text that can be shown."""

from transformers import PreTrainedTokenizerFast

from sampled_sae.browser.files import words_of
from tests.browser.made_up import HOSTILE, WORDS, hostile_tokenizer
from tests.evals.autointerp.tools import WORDS as SPACED
from tests.evals.autointerp.tools import word_tokenizer
from tests.models.tiny_models import make_tokenizer


def test_hidden_characters_become_visible():
    found = words_of(range(len(WORDS)), hostile_tokenizer())
    assert found.text[: len(HOSTILE)] == [
        *(
            "<script>alert(1)</script>",
            "</script>",
            "\"'`&quot;",
            "\\u202eright",
            "🦀",
            "a↵b",
            "\\u2028",
            "عربية",
            "-->",
        ),
    ]
    assert found.bytes == {}


def test_parts_of_a_character_keep_their_bytes():
    tokenizer: PreTrainedTokenizerFast = make_tokenizer()
    ids = tokenizer("the 🦀\n", add_special_tokens=False)["input_ids"]
    found = words_of(ids, tokenizer)
    assert found.text == ["the", " ", "\\xf0", "\\x9f", "\\xa6", "\\x80", "↵"]
    assert bytes(byte for number in sorted(found.bytes) for byte in found.bytes[number]).decode() == "🦀"


def test_the_space_that_a_lone_token_loses():
    tokenizer = word_tokenizer()
    assert words_of([SPACED.index("gene")], tokenizer).text == [" gene"]
