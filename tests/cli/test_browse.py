"""`sampled-sae browse` as a person meets it, on SAEs of a tiny model made on the spot."""

import json
import re
from pathlib import Path

import pytest
import torch

from sampled_sae.cli import parse
from sampled_sae.cli.evaluate import Browse
from sampled_sae.evals.results import save_explanations, save_firing
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from tests.browser.test_files import unpack
from tests.models.tiny_models import LAYERS, WIDTH, make_model, make_tokenizer

M = 40


def browse(*words) -> None:
    parse(Browse, [str(word) for word in words], "sampled-sae browse").run()


def make_sae(seed: int, width: int = WIDTH, threshold: float = 2.0, layer: int = 1, model: object = "?") -> SAE:
    generator = torch.Generator().manual_seed(seed)
    sae = SAE(InferenceConfig(width, M))
    sae.W_dec.data = torch.nn.functional.normalize(torch.randn(M, width, generator=generator), dim=1)
    sae.W_enc.data = sae.W_dec.data.T.clone()
    sae.threshold.fill_(threshold)
    sae.cfg.metadata.update({"model_name": str(model), "layer": layer, "context_size": 20})
    return sae


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a model, a text and two SAEs."""
    place = tmp_path_factory.mktemp("place")
    make_model("llama").save_pretrained(place / "model")
    make_tokenizer().save_pretrained(place / "model")
    texts = [f"{n} <script>\u202e🦀 " + " ".join(f"the{n * i % 97}" for i in range(30)) for n in range(9)]
    (place / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    for name, seed in (("a", 0), ("b", 1)):
        make_sae(seed, model=place / "model").save(place / name)
    return place


@pytest.fixture
def words(place, tmp_path):
    """The usual arguments after the SAE's folder."""
    usual = ("--text", place / "text.jsonl", "--context", 16, "--tokens", 640, "--device", "cpu")
    return (*usual, "--out", tmp_path / "out")


def content(out: Path, name: str):
    [file] = out.glob(f"data-*/{name}.js")
    return json.loads(file.read_text()[len("sampledSae(...") : -3])[1]


def test_a_page_with_nothing_but_the_sae(place, words, tmp_path, capsys):
    browse(place / "a", *words)
    shown = capsys.readouterr()
    assert f"of {M} latents fire in" in shown.out and f"Page: {tmp_path / 'out' / 'index.html'}" in shown.out
    assert "No latent is explained yet" in shown.err and "reading" in shown.err and "writing" in shown.err
    index = content(tmp_path / "out", "index")
    assert set(index["columns"]) == {"density", "fired", "maximum", "near", "tokens"}
    assert index["about"]["title"] == "a" and index["about"]["other"] is None
    assert any("No latent is explained yet" in note for note in index["about"]["notes"])
    assert content(tmp_path / "out", "explanations")["text"] == []


def test_counts_against_the_model(place, words, tmp_path):
    from sampled_sae.models.load import load_model

    browse(place / "a", *words)
    index, chunk = (content(tmp_path / "out", name) for name in ("index", "chunk-0"))
    spelled = content(tmp_path / "out", "words")["text"]
    model, sae = load_model(place / "model"), SAE.load(place / "a")
    numbers = unpack(content(tmp_path / "out", "text-0")["tokens"]).view(-1, 16)
    text = json.loads((place / "text.jsonl").read_text().splitlines()[0])["text"]
    tokens = torch.tensor(model.tokenizer(text, add_special_tokens=False)["input_ids"][:32]).view(2, 16)
    codes = sae.encode(model.activations(tokens, [1])[1]).detach()
    # The first two contexts are the beginning of the first document.
    columns = {name: unpack(item) for name, item in chunk["columns"].items()}
    compared = 0
    for latent in range(M):
        for w in range(int(columns["windows"][latent]), int(columns["windows"][latent + 1])):
            context, (begin, end) = int(columns["context"][w]), columns["firings"][w : w + 2].tolist()
            if context < 2:
                line = torch.zeros(16)
                line[columns["position"][begin:end].long()] = columns["value"][begin:end]
                torch.testing.assert_close(line, codes[context, :, latent], rtol=1e-4, atol=1e-5)
                compared += 1
    assert compared > 10
    assert [spelled[number] for number in numbers[0, :3]] == ["0", " ", "<"]
    assert index["latents"] == M


def test_what_others_have_found_out(place, words, tmp_path, capsys):
    folder = make_sae(0, model=place / "model").save(tmp_path / "runs" / "mine")
    save_firing(folder, torch.arange(M), 1000)
    save_explanations(folder, {3: {"explanation": "<b>cats</b>", "score": 0.5, "scores": {"detection": 0.5}}})
    other = make_sae(1, model=place / "model").save(tmp_path / "runs" / "other")
    save_explanations(other, {n: {"explanation": f"dogs {n}", "score": None} for n in range(M)})
    row = {"latent": 3, "overall": 0.2, "decoder": 0.1, "text": 0.3, "match": 4, "match_explanation": "birds"}
    pairs = [{"unique": [{"of": "mine", "against": "other", "table": [row]}]}]
    found = {"saes": [{"name": "mine"}, {"name": "other"}], "pairs": pairs}
    (tmp_path / "compare.json").write_text(json.dumps(found))
    browse(folder, *words, "--other", other, "--compare", tmp_path, "--near", 3)
    index, chunk = (content(tmp_path / "out", name) for name in ("index", "chunk-0"))
    columns = {name: unpack(item) for name, item in index["columns"].items()}
    torch.testing.assert_close(columns["density"], torch.arange(M) / 1000)
    assert float(columns["score"][3]) == 0.5 and float(columns["listed"][3]) == pytest.approx(0.8)
    cosine = SAE.load(folder).W_dec @ SAE.load(other).W_dec.T
    torch.testing.assert_close(columns["unique"], 1 - cosine.detach().amax(1))
    assert content(tmp_path / "out", "explanations")["text"] == ["<b>cats</b>"]
    near = unpack(chunk["columns"]["other"]).view(M, 3)
    assert torch.equal(near.long(), cosine.topk(3).indices)
    assert {int(latent) for latent in chunk["otherText"]} == set(near.flatten().tolist())
    assert "otherTokens" in chunk["columns"] and chunk["unique"]["3"]["match_text"] == "birds"
    assert "1 are explained" in capsys.readouterr().out


def test_another_sae_of_another_layer_is_not_read(place, words, tmp_path, capsys):
    other = make_sae(1, layer=LAYERS - 1, model=place / "model").save(tmp_path / "deep")
    browse(place / "a", *words, "--other", other)
    assert "deep is of another hook point or model" in capsys.readouterr().err
    columns = content(tmp_path / "out", "chunk-0")["columns"]
    assert "other" in columns and "otherTokens" not in columns


def test_the_same_again_is_the_same(place, words, tmp_path):
    def files():
        return {path.relative_to(tmp_path): path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}

    browse(place / "a", *words)
    before = files()
    browse(place / "a", *words)
    assert files() == before
    fired = unpack(content(tmp_path / "out", "index")["columns"]["fired"])
    browse(place / "a", *words, "--contexts-at-once", 3, "--tokens-at-once", 5)
    assert torch.equal(unpack(content(tmp_path / "out", "index")["columns"]["fired"]), fired)


def test_bad_input_is_one_line(place, words, tmp_path, capsys):
    def refused(line, *arguments):
        with pytest.raises(UserError, match=re.escape(line)) as error:
            browse(*arguments)
        assert "\n" not in str(error.value)

    silent = make_sae(0, threshold=1e9, model=place / "model").save(tmp_path / "silent")
    refused("no latent of this SAE fires on the", silent, *words)
    narrow = make_sae(0, width=8, model=place / "model").save(tmp_path / "narrow")
    refused("other: has width 8: must be 16, as the first SAE has", place / "a", *words, "--other", narrow)
    refused("the SAE has width 8: must be 16", narrow, *words)
    (tmp_path / "short.txt").write_text("a few")
    short = [tmp_path / "short.txt" if word == place / "text.jsonl" else word for word in words]
    refused("16", place / "a", *short)
    refused("no such file or folder", place / "a", *words[2:], "--text", tmp_path / "absent.jsonl")
    refused("tokens = 0: must be at least 1", place / "a", *words[:4], "--tokens", 0, *words[6:])
    refused("layer = 9: ", place / "a", *words, "--layer", 9)
    refused("top = 0: must be at least 1", place / "a", *words, "--top", 0)
    nameless = SAE(InferenceConfig(WIDTH, 4)).save(tmp_path / "nameless")
    refused("does not name its model; give --model", nameless, *words)
    (tmp_path / "file").write_text("in the way")
    refused("cannot write there", place / "a", *words[:-1], tmp_path / "file" / "x")
    capsys.readouterr()
    browse(place / "a", *words[:4], "--tokens", 10**6, *words[6:])
    assert "all of them are read" in capsys.readouterr().err


def test_without_a_text_a_page_can_only_be_served(place, tmp_path):
    with pytest.raises(UserError, match="text: must name a text, unless --serve is given"):
        browse(place / "a", "--out", tmp_path)
    with pytest.raises(UserError, match="other: has no effect without --text"):
        browse(place / "a", "--out", tmp_path, "--serve", "--other", place / "b")
    with pytest.raises(UserError, match="holds no page of latents"):
        browse(place / "a", "--out", tmp_path, "--serve")
    with pytest.raises(UserError, match="holds no page of latents"):
        browse(place / "a", "--serve")


def test_the_page_is_made_and_served(place, words, tmp_path, monkeypatch, capsys):
    served = []
    monkeypatch.setattr("sampled_sae.browser.serve.ThreadingHTTPServer.serve_forever", lambda self: served.append(self))
    browse(place / "a", *words, "--serve", "--port", 0)
    browse(place / "a", "--serve", "--port", 0, "--out", tmp_path / "out", "--device", "cpu")
    told = capsys.readouterr()
    assert len(served) == 2 and told.err.count("Serving http://localhost:") == 2
    assert f"Page: {tmp_path / 'out' / 'index.html'}" in told.out
