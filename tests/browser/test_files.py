"""The page's files, read back without a browser."""

import base64
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from sampled_sae.browser.files import LATENTS_A_CHUNK, column, data_files, ranking, script, words_of
from sampled_sae.browser.latents import TOP
from sampled_sae.browser.write import write_browser
from sampled_sae.evals.results import Explanation
from tests.browser.made_up import HOSTILE, SILENT, WORDS, M, hostile_tokenizer, made_up_page
from tests.evals.autointerp.tools import WORDS as SPACED
from tests.evals.autointerp.tools import word_tokenizer
from tests.models.tiny_models import make_tokenizer

PAGE = made_up_page(len(WORDS))


def unpack(item) -> torch.Tensor:
    """As the page does it."""
    array = np.frombuffer(base64.b64decode(item["data"]), f"<{item['type']}")
    if item["type"] in ("u1", "u2"):
        return torch.from_numpy(np.where(array == np.iinfo(array.dtype).max, -1, array.astype(np.int64)))
    return torch.from_numpy(array.copy())


def read(text: str):
    assert text.isascii() and text.startswith("sampledSae(...[") and text.endswith("]);\n")
    return json.loads(text[len("sampledSae(...") : -3])


@pytest.fixture(scope="module")
def files():
    return {name: read(text) for name, text in data_files(PAGE, hostile_tokenizer())}


@given(st.lists(st.integers(-1, 2**31 - 1), max_size=20))
def test_whole_numbers_come_back(values):
    assert unpack(column(torch.tensor(values, dtype=torch.int64))).tolist() == values


@pytest.mark.parametrize("most", [0, 254, 255, 256, 65534, 65535, 2**31 - 1])
def test_the_edges_of_types(most):
    assert unpack(column(torch.tensor([-1, 0, most]))).tolist() == [-1, 0, most]


def test_numbers_that_have_no_place():
    with pytest.raises(ValueError, match="below -1"):
        column(torch.tensor([-2]))
    with pytest.raises(ValueError):
        script("x", {"score": float("nan")})


@given(st.text())
def test_text_comes_back_and_ends_no_script(text):
    made = script("x", text)
    assert read(made) == ["x", text] and not set("<>&\u2028") & set(made)


def test_index(files):
    name, index = files["index"]
    columns = {key: unpack(item) for key, item in index["columns"].items()}
    assert name == "index" and index["latents"] == M
    density = PAGE.density.fired / PAGE.density.tokens
    torch.testing.assert_close(columns["density"], density)
    assert {latent: round(float(columns["score"][latent]), 4) for latent in (3, 300)} == {3: 0.75, 300: 0.9}
    assert int(columns["score"].isnan().sum()) == M - 2
    assert float(columns["listed"][300]) == pytest.approx(0.79)
    torch.testing.assert_close(columns["unique"], 1 - PAGE.browsed.other.near.cosine[:, 0])
    words = files["words"][1]["text"]
    tokens = columns["tokens"].view(M, -1)
    shown = [[words[number] for number in row if number >= 0] for row in tokens.tolist()]
    tokenizer = hostile_tokenizer()
    real = [tokenizer.convert_ids_to_tokens(int(token)) for token in PAGE.browsed.tokens.token[12] if token >= 0]
    assert [re.sub(r"\\u....|↵", "", text) for text in shown[12]] == [re.sub("[\u202e\u2028\n]", "", t) for t in real]


def test_a_chunk_holds_each_latents_contexts(files):
    browsed = PAGE.browsed
    dense = torch.zeros(M, browsed.contexts.numel())
    dense[browsed.firings.latent.long(), browsed.firings.position.long()] = browsed.firings.value
    dense = dense.view(M, *browsed.contexts.shape)
    seen = 0
    for number in range(PAGE.chunks):
        content = files[f"chunk-{number}"][1]
        columns = {key: unpack(item) for key, item in content["columns"].items()}
        latents = len(columns["windows"]) - 1
        assert latents == min(LATENTS_A_CHUNK, M - number * LATENTS_A_CHUNK)
        for row in range(latents):
            latent = number * LATENTS_A_CHUNK + row
            inside = range(int(columns["windows"][row]), int(columns["windows"][row + 1]))
            assert (len(inside) == 0) == (latent == SILENT or not dense[latent].any())
            for w in inside:
                begin, end = columns["firings"][w : w + 2].tolist()
                line = torch.zeros(browsed.contexts.shape[1])
                line[columns["position"][begin:end].long()] = columns["value"][begin:end]
                context = int(columns["context"][w])
                assert torch.equal(line, dense[latent, context])
                if columns["band"][w] == TOP:
                    assert line[columns["center"][w]] == line.max()
                seen += 1
        torch.testing.assert_close(
            columns["shares"], browsed.tokens.share[number * LATENTS_A_CHUNK :][:latents].flatten()
        )
    assert seen == len(browsed.windows.latent)


def test_text_files_hold_the_text(files, monkeypatch):
    words = files["words"][1]["text"]
    assert len(words) == len(WORDS)
    assert unpack(files["text-0"][1]["tokens"]).tolist() == PAGE.browsed.contexts.flatten().tolist()
    monkeypatch.setattr("sampled_sae.browser.files.TOKENS_A_FILE", 500)
    parts = {name: read(text)[1] for name, text in data_files(PAGE, hostile_tokenizer())}
    texts = [unpack(parts[f"text-{i}"]["tokens"]) for i in range(sum(name.startswith("text-") for name in parts))]
    assert len(texts) == 3 and torch.cat(texts).tolist() == PAGE.browsed.contexts.flatten().tolist()
    assert parts["index"]["contextsAFile"] == len(texts[0]) // PAGE.browsed.firings.shape[1]


def test_a_rerun_leaves_only_what_it_made(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    (tmp_path / "data-notes").mkdir()
    small = made_up_page(len(WORDS), m=20, n=10)
    first = write_browser(small, hostile_tokenizer(), tmp_path)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    text = first.read_text()
    write_browser(small, hostile_tokenizer(), tmp_path)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before and first.read_text() == text
    write_browser(made_up_page(len(WORDS), m=21, n=10, other=False), hostile_tokenizer(), tmp_path)
    [folder] = [path.name for path in tmp_path.glob("data-????????????")]
    assert folder in first.read_text() and folder not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder, "data-notes", "index.html", "mine.txt"]


def test_what_breaks_off_leaves_the_old_page(tmp_path):
    small = made_up_page(len(WORDS), m=20, n=10)
    write_browser(small, hostile_tokenizer(), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def stop(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_browser(made_up_page(len(WORDS), m=21, n=10), hostile_tokenizer(), tmp_path, stop)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# ---- tokens as text ----


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


def test_latents_are_sorted_by_balanced_detection_minus_its_control():
    def explained(balanced, control):
        scores = {"balanced": balanced} if balanced is not None else {}
        return Explanation("x", 0.9, scores, {"balanced": control} if control is not None else {})

    both = {0: explained(0.9, 0.4), 1: explained(0.8, 0.7), 2: explained(0.9, None)}
    gains = ranking(both)
    assert gains.head == "Gain" and gains.values == pytest.approx({0: 0.5, 1: 0.1})
    alone = ranking({0: explained(0.9, None), 1: explained(None, None)})
    assert alone.head == "Balanced" and alone.values == {0: 0.9} and "guessing gives 0.5" in alone.meaning
    assert ranking({0: explained(None, None)}).head == "Detection" and ranking({}) is None
