"""Absorption from the words to the result."""

import json
from dataclasses import replace

import pytest
import torch

from sampled_sae.config import plain as as_plain
from sampled_sae.evals.absorption.evaluate import evaluate_absorption_many, measure_sae, read_words
from sampled_sae.evals.absorption.probes import survey_layers
from sampled_sae.evals.absorption.schema import to_saebench
from sampled_sae.evals.absorption.words import LETTERS, make_prompts
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from tests.evals.absorption.tools import (
    ABSORBED,
    GROUP,
    GROUPS,
    QUICK,
    WIDTH,
    letter_sae,
    make_speller,
    results,
    speller,
)

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


@torch.no_grad()
def test_an_sae_that_normalizes_each_token_is_measured_in_units_of_the_residual_stream():
    spoken = read_words(speller(), 1, QUICK)
    times = 100 / float(spoken.readings.measured.x.norm(dim=1).mean())
    parts = {name: getattr(spoken.readings, name) for name in ("train", "test", "measured")}
    larger = spoken.readings._replace(**{name: part._replace(x=part.x * times) for name, part in parts.items()})
    plain = letter_sae().rescale_(times)
    normalized = letter_sae().rescale_(times * WIDTH**0.5 / 100)  # its tokens have the norm sqrt(d_in)
    normalized.cfg = replace(normalized.cfg, normalize_activations="constant_norm_rescale")
    found = [measure_sae(sae, larger, spoken.spelling, QUICK)[ABSORBED] for sae in (plain, normalized)]
    assert found[0].fraction == pytest.approx(found[1].fraction) and found[0].fraction > 0
    assert found[0].full_words == found[1].full_words > 0


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
    json.dumps([as_plain(item) for item in found], allow_nan=False)


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
    json.dumps([as_plain(found), written], allow_nan=False)


def test_an_sae_that_never_fires_is_not_evaluable():
    sae = letter_sae()
    sae.threshold.fill_(1e6)
    [found] = evaluate_absorption_many([sae], speller(), 1, QUICK)
    assert found.usable_letters == 26
    assert found.not_evaluable == "no latent of the SAE fires at any word"
    assert found.fraction is None
    assert all(item.fraction is None and item.main == [] for item in found.letters)


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
    wide, elsewhere = SAE(InferenceConfig(WIDTH + 1, 4)), letter_sae()
    elsewhere.cfg.metadata["layer"] = 0
    with pytest.raises(UserError, match=f"sae has width {WIDTH + 1}: must be {WIDTH}"):
        list(evaluate_absorption_many([wide], speller(), 1, QUICK))
    with pytest.raises(UserError, match=r"layer = 1: saes\[1\] was trained on layer 0"):
        list(evaluate_absorption_many([letter_sae(), elsewhere], speller(), 1, QUICK))
    del elsewhere.cfg.metadata["layer"]
    elsewhere.cfg.metadata["hook_name"] = "blocks.0.hook_resid_post"
    with pytest.raises(UserError, match=r"layer = 1: sae was trained on blocks\.0\.hook_resid_post"):
        list(evaluate_absorption_many([elsewhere], speller(), 1, QUICK))
    with pytest.raises(UserError, match="layer = 2: speller has 2 layers"):
        list(evaluate_absorption_many([letter_sae()], speller(), 2, QUICK))
    with pytest.raises(UserError, match=r"saes = \[\]"):
        list(evaluate_absorption_many([], speller(), 1, QUICK))


# ---- what is given out -------------------------------------------------------------------------------


def test_progress_goes_up_to_the_end():
    told = []
    config = replace(QUICK, probe_epochs=1, max_words=300)
    list(evaluate_absorption_many([letter_sae()] * 2, speller(), 0, config, lambda *seen: told.append(seen)))
    done, totals = zip(*told, strict=True)
    assert set(totals) == {3 * (300 + 60)}
    assert list(done) == sorted(done)
    assert done[-1] == totals[0]


def test_result_is_json_and_saebenchs_layout():
    found = results()[0]
    plain = json.loads(json.dumps(as_plain(found), allow_nan=False))
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
