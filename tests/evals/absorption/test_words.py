from dataclasses import replace

import pytest
import transformers
from tokenizers import Tokenizer, models

from sampled_sae.evals.absorption.schema import AbsorptionConfig
from sampled_sae.evals.absorption.words import LETTERS, find_words, make_prompts
from sampled_sae.utils.errors import UserError
from tests.evals.absorption.tools import GROUPS, QUICK, words_tokenizer
from tests.models.tiny_models import make_tokenizer


def test_words_are_the_tokens_of_letters():
    tokenizer = words_tokenizer()
    words, left_out = find_words(tokenizer, QUICK)
    texts = {word.text for word in words}
    assert texts == {*LETTERS, *LETTERS.upper(), *(s + a + b for s in ("", " ") for a in LETTERS for b in GROUPS)}
    assert left_out == 0
    assert all(tokenizer.decode([word.token]) == word.text for word in words)
    assert {word.letter for word in words if word.text.strip()[0] in "zZ"} == {25}


def test_a_prompt_ends_with_its_word_after_solved_lines():
    tokenizer = words_tokenizer()
    prompts = make_prompts(tokenizer, replace(QUICK, lines=3))
    parts = {"train": {p.word.text for p in prompts.train}, "test": {p.word.text for p in prompts.test}}
    assert not parts["train"] & parts["test"]
    assert len(prompts.train) + len(prompts.test) == prompts.words
    assert len(prompts.train) == int(0.8 * prompts.words)
    for name, own in parts.items():
        for prompt in getattr(prompts, name)[:50]:
            assert prompt.tokens[0] == tokenizer.bos_token_id
            assert prompt.tokens[-1] == prompt.word.token
            first, *lines, last = tokenizer.decode(prompt.tokens[1:].tolist()).split("\n")
            assert (first, last, len(lines)) == ("", prompt.word.text, 3)
            for line in lines:
                word, answer = line.split(" has the first letter: ")
                assert word in own - {prompt.word.text}
                assert answer == word.strip()[0].upper()


def test_the_seed_decides_words_and_lines():
    tokenizer = words_tokenizer()

    def drawn(**changes):
        return [p.tokens.tolist() for p in make_prompts(tokenizer, replace(QUICK, **changes)).train]

    assert drawn() == drawn() != drawn(seed=1)
    assert len(drawn(max_words=100)) == 80
    assert drawn(bos=False) == [tokens[1:] for tokens in drawn()]


def test_words_that_a_line_splits_are_left_out_and_counted():
    """After a q, a word without a space melts into it."""
    tokenizer = words_tokenizer()
    config = replace(QUICK, template="q{word} has the first letter:")
    words, left_out = find_words(tokenizer, config)
    spaced = [word for word in words if word.text.startswith(" ")]
    assert len(spaced) == 26 * len(GROUPS)
    assert left_out > 0
    assert len(words) + left_out == 52 + 2 * 26 * len(GROUPS)
    prompts = make_prompts(tokenizer, config)
    assert prompts.left_out >= left_out
    assert all(prompt.tokens[-1] == prompt.word.token for prompt in (*prompts.train, *prompts.test))


def test_too_few_words():
    with pytest.raises(UserError, match=r"max_words = 12: gives 9 to train and 3 to test; lines = 10 need more"):
        make_prompts(words_tokenizer(), AbsorptionConfig(max_words=12))
    with pytest.raises(UserError, match=r"of 54 that the tokenizer has"):
        make_prompts(make_tokenizer(), AbsorptionConfig(lines=20))
    numbers = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"1": 0}, "1")))
    with pytest.raises(UserError, match="no words of ASCII letters"):
        make_prompts(numbers, AbsorptionConfig())


# ---- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"max_words": 1},
        {"lines": -1},
        {"lines": 1.5},
        {"train_share": 1.0},
        {"template": "{word}"},
        {"template": "the word: "},
        {"template": "{word} and {other}"},
        {"min_letters": 27},
        {"max_k": 0},
        {"l1": -0.1},
        {"end_lr": 0.1},
        {"min_cosine": 1.5},
        {"bos": 1},
        {"seed": 2**63},
        {"start": "somewhere"},
        {"lr": "fast"},
    ],
)
def test_settings_that_make_no_sense(changes):
    [name] = changes
    with pytest.raises(UserError, match=f"^{name} = "):
        AbsorptionConfig(**changes)
