"""Absorption from the words to the result, on a small model that is made to know first letters."""

import json
from dataclasses import replace
from functools import cache
from string import ascii_lowercase

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sampled_sae.data.layers import LanguageModel
from sampled_sae.errors import UserError
from sampled_sae.evals.absorption import AbsorptionConfig, evaluate_absorption_many, to_saebench
from sampled_sae.evals.absorption.spelling import survey_layers
from sampled_sae.evals.absorption.words import LETTERS, find_words, make_prompts
from sampled_sae.sae import SAE
from tests.data.tiny_models import make_tokenizer

GROUPS = "abcdefghijkl"
WIDTH = 26 + len(GROUPS)
QUICK = AbsorptionConfig(lines=2, probe_epochs=20, probe_batch=16, lr=0.05, f1_jump=0.2, prompts_at_once=128)
ABSORBED, GROUP = LETTERS.index("s"), 0


@cache
def words_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words of two letters, with and without a space, are one token each; so are single letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in LETTERS for second in GROUPS]
    spaced = [("Ġ", f"{first}{second}") for first, second in pairs]
    tokens = ["<|endoftext|>", *alphabet, *("".join(pair) for pair in pairs + spaced)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs + spaced))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokens[0], bos_token=tokens[0])


def make_speller() -> LanguageModel:
    """Embeddings hold 3 in the place of the first letter and 3 in that of the second; blocks add next to nothing."""
    tokenizer = words_tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        max_position_embeddings=256,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        for number in range(len(tokenizer)):
            text = tokenizer.decode([number]).strip().lower()
            if text and all(char in ascii_lowercase for char in text):
                model.model.embed_tokens.weight[number, LETTERS.index(text[0])] += 3
                if text[1:] and text[1] in GROUPS:
                    model.model.embed_tokens.weight[number, 26 + GROUPS.index(text[1])] += 3
    return LanguageModel(model, tokenizer, "speller")


@cache
def speller() -> LanguageModel:
    return make_speller()


@torch.no_grad()
def letter_sae(absorbing: bool = True) -> SAE:
    """A latent for each letter and each group. If absorbing, latent 0 takes words with S in the first group: the
    latents of S and of that group are silent there."""
    sae = SAE(WIDTH, 1 + WIDTH)
    sae.W_enc_rows[1:] = sae.W_dec[1:] = torch.eye(WIDTH)
    sae.threshold.fill_(1.0)
    both = torch.zeros(WIDTH)
    both[[ABSORBED, 26 + GROUP]] = 1.0
    sae.W_dec[0] = both / both.norm()
    if absorbing:
        sae.W_enc_rows[0], sae.b_enc[0] = both * 2, -7.5
        sae.W_enc_rows[1 + ABSORBED, 26 + GROUP] = -1.0
        sae.W_enc_rows[1 + 26 + GROUP, ABSORBED] = -1.0
    return sae


@cache
def results() -> list:
    return evaluate_absorption_many([letter_sae(), letter_sae(absorbing=False)], speller(), 1, QUICK)


# ---- answers that are known --------------------------------------------------------------------------


def test_only_the_absorbed_words_are_found():
    found, clean = results()
    prompts = make_prompts(speller().tokenizer, QUICK)
    with_s = [prompt.word.text.strip().lower() for prompt in prompts.test if prompt.word.letter == ABSORBED]
    absorbed = [word for word in with_s if word[1:] == GROUPS[GROUP]]
    assert 0 < len(absorbed) < len(with_s)
    assert found.usable_letters == clean.usable_letters == 26
    assert found.not_evaluable is None
    for item in found.letters:
        assert item.f1 == 1.0
        assert item.words == item.test_words > 0
        if item.letter == LETTERS[ABSORBED]:
            assert item.fraction == pytest.approx(len(absorbed) / len(with_s))
            assert item.full == pytest.approx(len(absorbed) / len(with_s))
            assert item.full_words == len(absorbed)
            assert item.absorbers == [(0, len(absorbed), len(absorbed))]
            assert item.absorbing == 1
        else:
            assert item.main == [1 + LETTERS.index(item.letter)]
            assert item.fraction == item.full == item.full_words == item.absorbing == 0
    share = len(absorbed) / len(with_s)
    assert found.fraction.mean == pytest.approx(share / 26)
    assert found.fraction.std == pytest.approx(share / 26**0.5)
    assert clean.fraction == clean.full == (0.0, 0.0)
    assert clean.splits == clean.main_f1 == (1.0, 0.0)
    assert {tuple(item.sparse_f1[:1]) for item in clean.letters} == {(1.0,)}


def test_several_saes_are_measured_as_if_alone():
    [alone] = evaluate_absorption_many([letter_sae()], speller(), 1, QUICK)
    assert alone == results()[0]


def test_how_much_at_once_does_not_matter():
    config = replace(QUICK, prompts_at_once=37, words_at_once=100)
    [found] = evaluate_absorption_many([letter_sae()], speller(), 1, config)
    assert found.letters == results()[0].letters


def test_fresh_prompts_are_of_the_same_words_after_other_lines():
    prompts = make_prompts(speller().tokenizer, QUICK)
    assert [p.word for p in prompts.fresh] == [p.word for p in prompts.test]
    same = [p.tokens.tolist() == q.tokens.tolist() for p, q in zip(prompts.fresh, prompts.test, strict=True)]
    assert sum(same) < 0.1 * len(same)
    [found] = evaluate_absorption_many([letter_sae()], speller(), 1, replace(QUICK, fresh_prompts=False))
    assert found.fraction.mean == pytest.approx(results()[0].fraction.mean)


def test_layers_are_surveyed_in_one_pass():
    told = []
    found = survey_layers(speller(), [0, 1], QUICK, lambda *seen: told.append(seen))
    assert [item.layer for item in found] == [0, 1]
    assert [item.usable for item in found] == [26, 26]
    assert found[1].f1 == {item.letter: item.f1 for item in results()[0].letters}
    assert told[-1] == (found[0].words, found[0].words)
    json.dumps([item.to_dict() for item in found], allow_nan=False)


# ---- words and prompts -------------------------------------------------------------------------------


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


# ---- what cannot be measured -------------------------------------------------------------------------


def test_a_letter_without_words_says_so():
    lm = make_speller()
    lm.tokenizer = _Only(lm.tokenizer, "q")
    [found] = evaluate_absorption_many([letter_sae(False)], lm, 1, QUICK)
    item = found.letters[LETTERS.index("q")]
    assert item.train_words == item.test_words == item.words == 0
    assert item.why_not == "no words to train on begin with it"
    assert not item.usable
    assert item.f1 is item.fraction is item.full is None
    assert item.main == item.sparse_f1 == []
    assert found.usable_letters == 25
    assert found.fraction == (0.0, 0.0)


def test_a_model_that_does_not_spell_is_not_evaluable():
    lm = make_speller()
    with torch.no_grad():
        lm.model.get_input_embeddings().weight.normal_()
    [found] = evaluate_absorption_many([letter_sae()], lm, 1, QUICK)
    assert found.usable_letters < 20
    assert f"{found.usable_letters} of 26 letters" in found.not_evaluable
    assert "min_letters = 20" in found.not_evaluable
    assert found.fraction is found.full is found.splits is found.main_f1 is None
    unusable = [item for item in found.letters if not item.usable]
    assert all("not above 0.6" in item.why_not or "no words" in item.why_not for item in unusable)
    written = to_saebench(found)
    assert written["eval_result_metrics"]["mean"]["mean_absorption_fraction_score"] is None
    assert written["eval_result_unstructured"] == {"not_evaluable": found.not_evaluable}
    json.dumps([found.to_dict(), written], allow_nan=False)


def test_an_sae_that_never_fires_is_not_evaluable():
    sae = letter_sae()
    sae.threshold.fill_(1e6)
    [found] = evaluate_absorption_many([sae], speller(), 1, QUICK)
    assert found.usable_letters == 26
    assert found.not_evaluable == "no latent of the SAE fires at any word"
    assert found.fraction is None
    assert all(item.fraction is None and item.main == [] for item in found.letters)


def test_too_few_words():
    with pytest.raises(UserError, match=r"max_words = 12: 9 words to train and 3 to test, .* lines = 10 need more"):
        make_prompts(words_tokenizer(), AbsorptionConfig(max_words=12))
    with pytest.raises(UserError, match=r"of 54 that the tokenizer has"):
        make_prompts(make_tokenizer(), AbsorptionConfig(lines=20))
    numbers = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"1": 0}, "1")))
    with pytest.raises(UserError, match="no words of ASCII letters"):
        make_prompts(numbers, AbsorptionConfig())


def test_words_of_one_letter_teach_nothing():
    lm = make_speller()
    lm.tokenizer = _Only(lm.tokenizer, LETTERS[1:])
    with pytest.raises(UserError, match="begin with 1 letter"):
        survey_layers(lm, [0], QUICK)


class _Only:
    """A tokenizer without words of some letters."""

    def __init__(self, tokenizer, without):
        self.tokenizer, self.without = tokenizer, without

    def get_vocab(self):
        found = self.tokenizer.get_vocab().items()
        return {token: number for token, number in found if token.strip("Ġ")[:1].lower() not in set(self.without)}

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *texts, **options):
        return self.tokenizer(*texts, **options)


def test_an_sae_of_another_width_or_layer():
    wide, elsewhere = SAE(WIDTH + 1, 4), letter_sae()
    elsewhere.metadata["layer"] = 0
    with pytest.raises(UserError, match=f"sae has width {WIDTH + 1}: must be {WIDTH}"):
        evaluate_absorption_many([wide], speller(), 1, QUICK)
    with pytest.raises(UserError, match=r"layer = 1: saes\[1\] was trained on layer 0"):
        evaluate_absorption_many([letter_sae(), elsewhere], speller(), 1, QUICK)
    elsewhere.metadata = {"hook_name": "blocks.0.hook_resid_post"}
    with pytest.raises(UserError, match=r"layer = 1: sae was trained on blocks\.0\.hook_resid_post"):
        evaluate_absorption_many([elsewhere], speller(), 1, QUICK)
    with pytest.raises(UserError, match="layer = 2: speller has 2 layers"):
        evaluate_absorption_many([letter_sae()], speller(), 2, QUICK)
    with pytest.raises(UserError, match=r"saes = \[\]"):
        evaluate_absorption_many([], speller(), 1, QUICK)


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


# ---- what is given out -------------------------------------------------------------------------------


def test_progress_goes_up_to_the_end():
    told = []
    config = replace(QUICK, probe_epochs=1, max_words=300)
    evaluate_absorption_many([letter_sae()] * 2, speller(), 0, config, lambda *seen: told.append(seen))
    done, totals = zip(*told, strict=True)
    assert set(totals) == {3 * (300 + 60)}
    assert list(done) == sorted(done)
    assert done[-1] == totals[0]


def test_result_is_json_and_saebenchs_layout():
    found = results()[0]
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["letters"][ABSORBED]["absorbers"][0] == {
        "latent": 0,
        "words": found.letters[ABSORBED].full_words,
        "full": found.letters[ABSORBED].full_words,
    }
    assert plain["settings"]["lines"] == 2
    written = json.loads(json.dumps(to_saebench(found, QUICK), allow_nan=False))
    assert written["eval_type_id"] == "absorption_first_letter"
    assert written["eval_result_metrics"]["mean"]["mean_absorption_fraction_score"] == found.fraction.mean
    assert written["eval_result_metrics"]["mean"]["std_dev_full_absorption_score"] == found.full.std
    assert len(written["eval_result_details"]) == 26
    detail = written["eval_result_details"][ABSORBED]
    assert detail["first_letter"] == "s"
    assert detail["num_full_absorption"] == found.letters[ABSORBED].full_words
    assert detail["num_probe_true_positives"] == found.letters[ABSORBED].words
    tail = len(speller().tokenizer(" has the first letter:")["input_ids"])
    assert written["eval_config"]["prompt_token_pos"] == -1 - tail
