import json
import re
from dataclasses import replace

import pytest
import torch

from sampled_sae.config import plain as as_plain
from sampled_sae.evals.autointerp import Autointerp
from sampled_sae.evals.autointerp.chat import ChatConfig
from sampled_sae.evals.autointerp.evaluate import evaluate_autointerp, evaluate_autointerp_many
from sampled_sae.evals.autointerp.schema import (
    DENSITIES,
    AutointerpConfig,
    AutointerpResult,
    density_bin,
    estimate_calls,
)
from sampled_sae.evals.results import explanations_path, read_explanations
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from tests.evals.autointerp.test_chat import completion, serving
from tests.evals.autointerp.tools import ALWAYS, LATENTS, NEVER, need_minilm, word_contexts, word_model, word_sae

OFFLINE = AutointerpConfig(embedder="minilm", buffer=5, resamples=50)


def run(settings: AutointerpConfig, **options) -> AutointerpResult:
    return evaluate_autointerp(word_sae(), word_model(), 0, word_contexts(), settings, **options)


@pytest.fixture(scope="module")
def found() -> AutointerpResult:
    need_minilm()
    return run(OFFLINE)


# ---- offline -----------------------------------------------------------------------------------------


def test_latents_of_one_word_are_told_from_shuffled_ones(found):
    for latent, word in zip(found.latents, LATENTS, strict=False):
        assert latent.explanation.startswith(f"'{word}'")
    words = found.latents[: len(LATENTS)]
    assert sum(latent.scores.balanced for latent in words) / len(words) > 0.95
    assert sum(latent.scores.fuzzing for latent in words) / len(words) > 0.95
    assert sum(latent.control.balanced for latent in words) / len(words) < 0.8
    assert found.balanced.mean.value > found.control["balanced"].mean.value + 0.2
    assert found.fuzzing.mean.value > found.control["fuzzing"].mean.value + 0.2
    assert found.detection.mean.low <= found.detection.mean.value <= found.detection.mean.high


def test_what_cannot_be_scored_is_counted_with_the_reason(found):
    # The latent that never fires is not alive, so it is not among those drawn.
    assert found.alive == found.chosen == len(LATENTS) + 1
    assert [latent.latent for latent in found.latents] == [*range(len(LATENTS)), ALWAYS]
    everywhere = found.latents[-1]
    assert everywhere.scores.detection is not None
    assert everywhere.scores.balanced is everywhere.scores.fuzzing is None
    assert everywhere.random_that_fire == 10
    assert found.skipped == {"balanced: no silent windows": 1, "fuzzing: no silent windows": 1}
    assert found.detection.latents == len(LATENTS) + 1
    assert found.balanced.latents == len(LATENTS)


def test_a_latent_that_never_fires_is_a_counted_skip():
    need_minilm()
    result = run(replace(OFFLINE, latents=(NEVER, 2)))
    never = result.latents[1]
    assert (never.latent, never.fired, never.explanation) == (NEVER, 0, None)
    assert set(never.scores) == {None}
    assert result.skipped == {"fires too rarely": 1}
    assert result.detection.latents == 1
    assert result.alive is None
    # One latent alone has no other's explanation.
    assert result.control == {}


@torch.no_grad()
def test_an_sae_in_which_nothing_fires():
    need_minilm()
    dead = SAE(InferenceConfig(64, 5))
    result = evaluate_autointerp(dead, word_model(), 0, word_contexts(), OFFLINE)
    assert result.alive == result.chosen == 0
    assert result.detection.mean.value is None
    assert result.latents == []
    as_json(result)


def test_several_saes_share_the_reading_and_the_rest_does_not_matter(found):
    ticks = []
    given = replace(OFFLINE, contexts_at_once=7, tokens_at_once=33, keep_gib=0.0)
    saes = [SAE(InferenceConfig(64, 5)), word_sae()]
    _, again = evaluate_autointerp_many(
        saes, word_model(), 0, word_contexts(), given, progress=lambda done, total: ticks.append((done, total))
    )
    assert again._replace(settings=found.settings) == found
    assert ticks[-1][0] == ticks[-1][1]
    assert [done for done, _ in ticks] == sorted(done for done, _ in ticks)
    assert len({total for _, total in ticks}) == 1


def test_a_draw_of_latents(found):
    few = run(replace(OFFLINE, max_latents=3))
    assert few.alive == found.alive
    assert few.chosen == len(few.latents) == 3
    same = {latent.latent: latent for latent in found.latents}
    for latent in few.latents:
        assert latent.explanation == same[latent.latent].explanation
        assert latent.scores == same[latent.latent].scores


def test_a_draw_by_density(found):
    each = run(replace(OFFLINE, latents_per_bin=1))
    bins = {
        name: [latent for latent in found.latents if density_bin(latent.fired, found.tokens) == name]
        for name in DENSITIES
    }
    filled = {name: latents for name, latents in bins.items() if latents}
    assert list(filled) == ["0.1% to 10%", "above 10%"] and each.chosen == 2
    assert set(found.by_density) == set(each.by_density) == set(filled)
    assert all(scores["balanced"].latents <= 1 for scores in each.by_density.values())
    rare = [latent.scores.balanced for latent in filled["0.1% to 10%"] if latent.scores.balanced is not None]
    assert found.by_density["0.1% to 10%"]["balanced"].mean.value == pytest.approx(sum(rare) / len(rare))
    assert [density_bin(fired, 10_000) for fired in (9, 10, 999, 1000, 10_000)] == [
        list(bins)[i] for i in (0, 1, 1, 2, 2)
    ]


# ---- what is written ---------------------------------------------------------------------------------


def as_json(result: AutointerpResult) -> dict:
    return json.loads(json.dumps(as_plain(result), allow_nan=False))


def test_plain_json_and_the_best(found):
    plain = as_json(found)
    assert plain["settings"]["chat"]["model"] == "gpt-4o-mini"
    assert plain["latents"][0]["scores"]["balanced"] == found.latents[0].scores.balanced
    best = found.best(3)
    assert len(best) == 3
    assert best[0].scores.detection == max(latent.scores.detection for latent in found.latents)


def test_saebench_layout(found):
    plain = json.loads(json.dumps(Autointerp().to_saebench(found, OFFLINE), allow_nan=False))
    scores = torch.tensor([latent.scores.detection for latent in found.latents])
    metrics = plain["eval_result_metrics"]["autointerp"]
    assert metrics["autointerp_score"] == pytest.approx(float(scores.mean()))
    assert metrics["autointerp_std_dev"] == pytest.approx(float(scores.std()))
    assert plain["eval_type_id"] == "autointerp"
    assert plain["eval_result_details"] == []


def test_explanations_on_disk(found, tmp_path):
    path = found.save_explanations(tmp_path)
    assert path == explanations_path(tmp_path) == tmp_path / "evals" / "explanations.json"
    texts = {latent: item.text for latent, item in read_explanations(tmp_path).items()}
    assert texts == {latent.latent: latent.explanation for latent in found.latents}
    plain = json.loads(path.read_text())
    assert plain["latents"]["0"]["score"] == found.latents[0].scores.detection
    assert plain["explainer"] == plain["latents"]["0"]["explainer"] == "offline contrast"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "not valid JSON"),
        ("[]", "an object with named fields"),
        ("{}", "must be an object with `latents`"),
        ('{"latents": {"x": {"explanation": "y"}}}', r"latents\['x'\] must be a latent's number"),
        ('{"latents": {"1": {"explanation": 3}}}', r"latents\['1'\] must be a latent's number with an `explanation`"),
    ],
)
def test_damaged_explanations(tmp_path, content, line):
    assert read_explanations(tmp_path) == {}
    explanations_path(tmp_path).parent.mkdir()
    explanations_path(tmp_path).write_text(content)
    with pytest.raises(UserError, match=line):
        read_explanations(tmp_path)


# ---- through an endpoint that answers by rule --------------------------------------------------------


def by_rule(n, body):
    """Explains by the first marked word, and names the windows that have the word of the explanation."""
    system, user = (message["content"] for message in body["messages"])
    if system.startswith("You are looking"):
        word = user.split("<< ")[1].split(">>")[0]
        # Some are not explained, others not judged.
        return 200, {}, completion("This latent fires on." if word == "jury" else f"This latent fires on {word}")
    explanation, windows = user.split("\n\nThe excerpts:\n\n")
    word = explanation.rsplit(" ", 1)[1]
    if word == "the":
        return 200, {}, completion("I cannot tell.")
    wanted = f"<< {word}>>" if "<<" in windows else f" {word}"
    numbers = [str(i) for i, line in enumerate(windows.split("\n"), 1) if wanted in line]
    return 200, {}, completion(", ".join(numbers) or "None")


def chat(url: str, cache, **options) -> AutointerpConfig:
    config = ChatConfig(base_url=url, model="rule", cache=str(cache), wait=0.01, attempts=2)
    return replace(OFFLINE, explainer="chat", judge="chat", chat=config, latents=(0, 4, 6), **options)


def test_explained_and_judged_by_chat(tmp_path):
    with serving(by_rule) as (url, script):
        result = run(chat(url, tmp_path))
        assert result.latents[0].explanation == "gene"
        assert result.latents[0].scores.balanced == result.latents[0].scores.fuzzing == 1
        # Naming what fires is right for all but the random windows that fire and count as silent.
        assert result.latents[0].scores.detection == (14 - result.latents[0].random_that_fire) / 14
        assert result.latents[1].explanation == "the"
        assert set(result.latents[1].scores) == {None}
        assert result.latents[2].explanation is None
        assert result.skipped == {
            "no explanation: the chat model's answer holds no explanation": 1,
            "detection: the chat model's answer is no list of numbers": 1,
            "balanced: the chat model's answer is no list of numbers": 1,
            "fuzzing: the chat model's answer is no list of numbers": 1,
        }
        assert result.calls == (9, 0, 0, 9 * 11, 9 * 3)
        assert result.control == {}
        assert script.requests == 9
        # A second run costs nothing, and says the same.
        again = run(chat(url, tmp_path))
        assert script.requests == 9
        assert again.calls == (9, 9, 0, 0, 0)
        assert again._replace(calls=None) == result._replace(calls=None)


def test_a_mix_of_both(tmp_path):
    need_minilm()
    with serving(by_rule) as (url, script):
        result = run(replace(chat(url, tmp_path), explainer="offline", latents=(0,)))
        assert (result.explainer, result.judge) == ("offline contrast", "chat rule")
        assert script.requests == 3
        result = run(replace(chat(url, tmp_path), judge="offline", latents=(0, 1)))
        assert (result.explainer, result.judge) == ("chat rule", "offline minilm")
        assert script.requests == 5
        assert result.control["balanced"].latents == 2


def test_a_control_through_chat(tmp_path):
    with serving(by_rule) as (url, script):
        result = run(replace(chat(url, tmp_path), latents=(0, 1, 2), control=True))
        assert script.requests == 3 + 2 * 9
        assert result.balanced.mean.value == 1
        assert result.control["balanced"].mean.value < 0.7


def test_an_endpoint_that_is_down_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no answer to 3 calls: cannot be reached"):
        run(chat("http://127.0.0.1:9/v1", tmp_path))


def test_an_estimate_before_anything_is_asked(tmp_path):
    with serving(by_rule) as (url, script):
        settings = chat(url, tmp_path)
        run(settings)
        # Two latents are judged of the three that are explained.
        assert estimate_calls(settings, saes=1).calls == 3 + 3 * 3
        texts = [message["content"] for _, body in script.bodies for message in body["messages"]]
        # About one token a word, and one for each pair of signs.
        sent = sum(len(re.findall(r"\w+|[^\w\s]{1,2}", text)) for text in texts)
        share = script.requests / estimate_calls(settings, saes=1).calls
        assert estimate_calls(settings, saes=1).prompt_tokens * share == pytest.approx(sent, rel=0.4)
    assert estimate_calls(settings, saes=2).calls == 2 * estimate_calls(settings, saes=1).calls
    assert estimate_calls(OFFLINE, saes=5) == (0, 0, 0)
    assert estimate_calls(AutointerpConfig(explainer="chat", judge="chat"), saes=1).calls == 4000


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"explainer": "gpt"}, "explainer = 'gpt': must be 'chat' or 'offline'"),
        ({"judge": ""}, "judge = '': must be 'chat' or 'offline'"),
        ({"max_latents": 0}, "max_latents = 0: must be at least 1"),
        ({"buffer": 0}, "buffer = 0: must be at least 1"),
        ({"dead_below": -1}, "dead_below = -1: must not be negative"),
        ({"balanced_each": 1}, "balanced_each = 1: must be at least 2, or 0 for none"),
        ({"mark_above": 1}, "mark_above = 1.0: must be a share"),
        ({"latents": (1, 1)}, r"latents = \(1, 1\): must name each one once"),
        ({"latents": ("a",)}, r"latents\[0\] = 'a': must be a whole number"),
        ({"level": 1}, "level = 1.0: must be a share"),
        ({"control": 1}, "control = 1: must be True or False"),
        ({"norm_factor": 0.5}, "norm_factor = 0.5: must be at least 1"),
        ({"keep_gib": -1}, "keep_gib = -1.0: must not be negative"),
    ],
)
def test_bad_settings(given, line):
    with pytest.raises(UserError, match=line):
        AutointerpConfig(**given)


def test_bad_input(tmp_path):
    settings = chat("http://127.0.0.1:9/v1", tmp_path)
    given = (word_model(), 0, word_contexts())
    with pytest.raises(UserError, match=r"saes = \[\]"):
        list(evaluate_autointerp_many([], *given, settings))
    with pytest.raises(UserError, match=r"saes\[1\] has width 3: must be 64, the width of words"):
        list(evaluate_autointerp_many([word_sae(), SAE(InferenceConfig(3, 9))], *given, settings))
    with pytest.raises(UserError, match="latents = 6: the SAE has 5 latents, 0 to 4"):
        list(evaluate_autointerp_many([SAE(InferenceConfig(64, 5))], *given, settings))
    with pytest.raises(UserError, match=r"contexts are torch.float32 of shape \(2, 3\): must be token ids"):
        evaluate_autointerp(word_sae(), word_model(), 0, torch.zeros(2, 3), settings)
    with pytest.raises(UserError, match="buffer = 5: a window has 11 tokens, but a context only 9"):
        evaluate_autointerp(word_sae(), word_model(), 0, word_contexts()[:, :9], settings)
