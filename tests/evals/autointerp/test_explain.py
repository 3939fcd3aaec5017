import pytest
import torch

from sampled_sae.evals.autointerp.chat import Answer, Chat, ChatConfig
from sampled_sae.evals.autointerp.explain import ChatExplainer, ContrastExplainer, TokenText, quote, read_explanation
from sampled_sae.evals.autointerp.schema import AutointerpConfig
from sampled_sae.evals.autointerp.trials import build_case
from sampled_sae.evals.reading import Streams, collect_firings
from tests.evals.autointerp.tools import LATENTS, SUBJECTS, WORDS, word_contexts, word_model, word_sae, word_tokenizer

BUFFER = 5


@pytest.fixture(scope="module")
def cases():
    contexts = word_contexts()
    latents = range(len(LATENTS))
    everywhere = torch.ones_like(contexts, dtype=torch.bool)
    [firings] = collect_firings([word_sae()], Streams(word_model(), 0, contexts, everywhere), [latents])
    return [build_case(contexts, firings, latent, AutointerpConfig(buffer=BUFFER)) for latent in latents]


def offline() -> ContrastExplainer:
    return ContrastExplainer(word_contexts(), TokenText(word_tokenizer()), BUFFER)


def test_the_token_a_latent_fires_on_is_named_with_its_contexts(cases):
    for word, explained in zip(LATENTS, offline().explain(cases), strict=True):
        head, _, around = explained.text.partition("; in text with ")
        assert head.startswith(f"'{word}' (100%)")
        subject = next((words for words in SUBJECTS.values() if word in words), None)
        if subject is not None:
            named = around.split(", ")
            assert len(named) >= 5
            assert set(named) <= set(subject) - {word}


def test_a_token_before_is_named_where_it_is_always_there():
    words = ["gene", "court", "whale", "the", "of", "jury", "was", "of", "ship", "in"]
    contexts = torch.tensor([[WORDS.index(word) for word in words]] * 8)
    explainer = ContrastExplainer(contexts, TokenText(word_tokenizer()), 2)
    after_of = (contexts.flatten() == WORDS.index("of")).nonzero().squeeze(1) + 1
    assert explainer.sentence(after_of, torch.ones(len(after_of))).startswith(
        "'jury', 'ship' (100%), after 'of'; in text with "
    )


def test_many_different_tokens_are_called_so():
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(word_contexts().numel(), generator=generator)[:2000]
    said = offline().sentence(places, torch.ones(2000))
    assert said.startswith("many tokens such as '")
    assert "after" not in said


def test_one_context_does_not_make_a_subject():
    contexts = word_contexts(8)
    explainer = ContrastExplainer(contexts, TokenText(word_tokenizer()), BUFFER)
    first = torch.arange(20, 28)
    assert "in text with" not in explainer.sentence(first, torch.ones(8))
    # Alternating subjects: contexts 0 and 4 share theirs.
    assert "in text with" in explainer.sentence(torch.cat((first, first + 4 * contexts.shape[1])), torch.ones(16))


def test_quotes_within_tokens():
    assert quote("the") == "'the'"
    assert quote("'s") == '"\'s"'


# ---- through a chat model ----------------------------------------------------------------------------


def test_the_question_shows_the_windows_with_the_firing_tokens_marked(cases):
    explainer = ChatExplainer(
        Chat(ChatConfig(base_url="http://localhost:1/v1", cache=None)), TokenText(word_tokenizer())
    )
    question = explainer.question(cases[0])
    lines = question.user.splitlines()[2:]
    assert len(lines) == 15
    assert question.most == 30
    for number, (line, window) in enumerate(zip(lines, cases[0].shown, strict=True), 1):
        assert line.startswith(f"{number}. ")
        assert line.count("<< gene>>") == window.tokens.count(WORDS.index("gene"))
        assert line.count("<<") == line.count(" gene")
    assert "<<" not in explainer.question(cases[0]._replace(cut=1e9)).user


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("This latent fires on words about the sea.", "words about the sea"),
        ("This neuron activates on  the word 'gene'", "the word 'gene'"),
        ("This latent fires on 'gene' and 'cell'.", "'gene' and 'cell'"),
        ("\"This latent fires on the word 'gene'.\"", "the word 'gene'"),
        ("'words about the sea'", "words about the sea"),
        ("Sure! This SAE latent primarily activates for dogs.", "dogs"),
        ("It fires when a name ends", "a name ends"),
        ("words about\nthe sea", "words about the sea"),
        ("<think>It fires on cats?</think>This latent fires on dogs.", "dogs"),
        ("**This latent fires on:** dogs", "dogs"),
        # An explanation's own words that look like an opening.
        ("news of wildfires, such as 'fires in California'", "news of wildfires, such as 'fires in California'"),
        ("a callback that activates when a button is pressed", "a callback that activates when a button is pressed"),
        ("This latent fires on artillery that fires on a town", "artillery that fires on a town"),
    ],
)
def test_reading_explanations(said, text):
    assert read_explanation(Answer(said)).text == text


@pytest.mark.parametrize("said", ["This latent fires on", "...", "<think>and so on and on", "<think>x</think>"])
def test_answers_without_an_explanation(said):
    found = read_explanation(Answer(said))
    assert found.text is None
    assert found.reason == "the chat model's answer holds no explanation"


def test_no_answer_keeps_its_reason():
    assert read_explanation(Answer(None, "HTTP 500")) == (None, "HTTP 500")


# ---- text --------------------------------------------------------------------------------------------


def test_tokens_as_text():
    text = TokenText(word_tokenizer())
    ids = [WORDS.index(word) for word in ("the", "gene", "of")]
    assert text.show(ids) == " the gene of"
    assert text.show(ids, [False, True, False]) == " the<< gene>> of"
