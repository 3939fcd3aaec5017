import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sampled_sae.evals.autointerp.chat import Answer, Chat, ChatConfig
from sampled_sae.evals.autointerp.explain import TokenText
from sampled_sae.evals.autointerp.judge import ChatJudge, EmbeddingJudge, Sheet, make_sheet, quoted_share, read_verdict
from sampled_sae.evals.autointerp.trials import Item, Trial, Window, score_trial
from sampled_sae.models.embedder import Embedder, open_embedder
from tests.evals.autointerp.tools import WORDS, need_minilm, word_tokenizer


def trial(kind: str, right: list[bool]) -> Trial:
    tokens = [WORDS.index(word) for word in ("the", "gene", "of")]
    marks = [False, True, False] if kind == "fuzzing" else None
    items = [Item(Window(0, 1, tokens, [0.0, 1.0, 0.0]), marks, truth) for truth in right]
    return Trial(kind, items, sum(right))


# ---- the sheet and the score -------------------------------------------------------------------------


def test_a_sheet_does_not_say_what_is_right():
    text = TokenText(word_tokenizer())
    one, other = trial("balanced", [True, False]), trial("balanced", [False, True])
    assert make_sheet(one, "genes", text) == make_sheet(other, "genes", text)
    assert make_sheet(one, "genes", text) == Sheet("genes", [" the gene of"] * 2, False, 1)
    assert make_sheet(trial("fuzzing", [True, False]), "x", text).texts == [" the<< gene>> of"] * 2


def test_naming_nothing_scores_as_semantics_say():
    right = [True] * 4 + [False] * 10
    assert score_trial(trial("detection", right), [False] * 14) == pytest.approx(0.714, abs=5e-4)
    assert score_trial(trial("balanced", [True] * 5 + [False] * 5), [False] * 10) == 0.5


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=20))
def test_scores_are_the_formulas(pairs):
    right, named = [[pair[i] for pair in pairs] for i in (0, 1)]
    assert score_trial(trial("detection", right), named) == sum(a == b for a, b in pairs) / len(pairs)
    if any(right) and not all(right):
        found = score_trial(trial("balanced", right), named)
        sensitivity = sum(a and b for a, b in pairs) / sum(right)
        specificity = sum(not a and not b for a, b in pairs) / (len(right) - sum(right))
        assert found == pytest.approx((sensitivity + specificity) / 2)
        assert found == pytest.approx(1 - score_trial(trial("fuzzing", right), [not name for name in named]))


# ---- through a chat model ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        ("1, 3", [1, 3]),
        ("1,3,4.", [1, 3, 4]),
        ("2 and 4", [2, 4]),
        ("1, 2, and 4", [1, 2, 4]),
        ("[2; 3]", [2, 3]),
        ("4", [4]),
        ("None", []),
        ("none.", []),
        ("<think>maybe 3, no</think> 2", [2]),
    ],
)
def test_reading_verdicts(said, numbers):
    assert read_verdict(Answer(said), 4).named == [number in numbers for number in range(1, 5)]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Examples 1 and 3 mention genes", "no list of numbers"),
        ("I would say 3", "no list of numbers"),
        ("1. The gene\n2. The cell", "no list of numbers"),
        ("1, 5", "names windows that are not there"),
        ("0", "names windows that are not there"),
        ("1, -2", "no list of numbers"),
        ("<think>1, 2", "no list of numbers"),
    ],
)
def test_answers_that_are_no_verdict(said, reason):
    found = read_verdict(Answer(said), 4)
    assert found.named is None
    assert reason in found.reason


def test_no_answer_keeps_its_reason():
    assert read_verdict(Answer(None, "HTTP 500"), 4) == (None, "HTTP 500")


def test_the_question_has_explanation_windows_and_an_example_of_its_form():
    judge = ChatJudge(Chat(ChatConfig(base_url="http://localhost:1/v1", cache=None)))
    sheet = Sheet("words about genes", [f"text {number}" for number in range(14)], False, 4)
    question = judge.question(sheet)
    assert question == judge.question(sheet)
    assert "this latent fires on words about genes" in question.user
    assert "\n14. text 13" in question.user
    assert question.most == 33
    assert "<<" not in question.system
    example = question.system.split("such as ")[1].split(";")[0]
    assert sum(read_verdict(Answer(example), 14).named) == 4
    assert "<< and >>" in judge.question(sheet._replace(marked=True)).system


# ---- offline -----------------------------------------------------------------------------------------


def along_axes(texts: list[str]) -> torch.Tensor:
    """Embeddings of which everything is known: how often each of three words is there."""
    return torch.tensor([[text.count(word) + 0.01 for word in ("sea", "law", "art")] for text in texts])


KNOWN = Embedder(along_axes, "known", torch.device("cpu"), 3)


def test_the_nearest_windows_are_named():
    sheet = Sheet("texts on law", ["sea", "law", "art", "law sea", "sea art"], False, 2)
    assert EmbeddingJudge(KNOWN).judge([sheet])[0].named == [False, True, False, True, False]
    swapped = sheet._replace(texts=sheet.texts[::-1])
    assert EmbeddingJudge(KNOWN).judge([swapped])[0].named == [False, True, False, True, False]


def test_marked_tokens_alone_are_judged_where_marks_are():
    sheet = Sheet("law", ["law law<< sea>>", "sea sea<< law>>", "<<law>> x<<art>>", "law"], True, 1)
    assert EmbeddingJudge(KNOWN).judge([sheet])[0].named == [False, True, False, False]


def test_quoted_tokens_count_besides():
    sheet = Sheet("the token 'court', or 'jury'", ["sea court", "sea sea", "sea jury", "sea"], False, 1)
    assert EmbeddingJudge(KNOWN).judge([sheet])[0].named == [True, False, False, False]
    assert quoted_share(sheet.explanation, "a Court") == 1
    assert quoted_share(sheet.explanation, "the jury") == 0.5
    assert quoted_share(sheet.explanation, "a tennis-court") == 1
    assert quoted_share(sheet.explanation, "escourt") == 0
    assert quoted_share("it doesn't matter, and isn't 'x'", "matter") == 0
    assert quoted_share("“law” or `sea`", "the sea") == 0.5
    assert quoted_share("\"'s\", '.'", "what's.") == 1


def test_many_sheets_are_judged_as_one():
    sheets = [Sheet("law" if number % 2 else "sea", ["sea", "law", "art"], False, 1) for number in range(600)]
    told = []
    found = EmbeddingJudge(KNOWN).judge(sheets, told.append)
    assert told == [256, 512, 600]
    assert all(v.named == ([False, True, False] if n % 2 else [True, False, False]) for n, v in enumerate(found))


def test_a_real_embedding_tells_subjects_apart():
    need_minilm()
    sheet = Sheet(
        "words about music and instruments",
        [
            "the judge heard the appeal",
            "she played the violin",
            "cells divide",
            "a song for two guitars",
            "the tax law",
        ],
        False,
        2,
    )
    assert EmbeddingJudge(open_embedder("minilm", "cpu")).judge([sheet])[0].named == [False, True, False, True, False]
