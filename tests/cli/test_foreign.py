"""SAEs of other programs beside ours, in one folder: every command reads them all."""

import csv
import json
import re
import warnings

import pytest
import torch

import sampled_sae as ss
from sampled_sae import cli
from sampled_sae.evals.core.schema import CoreConfig
from sampled_sae.formats import saes_in
from sampled_sae.method.architectures import InferenceConfig
from tests.formats.foreign import FOREIGN, saelens, weights
from tests.models.tiny_models import WIDTH, make_model, make_tokenizer

M = 40
FOLDERS = {"layer1.sae.pt": "qwen", "Llama3_1-8B-Base-L1R-8x": "llama"}
PAIR = set(FOLDERS)
NAMES = {
    "saelens": "saelens v5 topk",
    "gated": "saelens gated",
    "dictionary": "dictionary_learning matryoshka",
    "sparsify": "sparsify groupmax",
    "gemma": "gemma_scope",
    "gemma2": "gemma_scope_2",
    "llama": "llama_scope",
    "qwen": "qwen_scope",
}


def run(*words) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cli.main([str(word) for word in words])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, a text, and SAEs of all formats: one of ours in saes/ours."""
    place = tmp_path_factory.mktemp("place")
    make_model("gpt_neox").save_pretrained(place / "model")
    make_tokenizer().save_pretrained(place / "model")
    lines = [json.dumps({"text": f"{n} " + " ".join(f"the{n * i % 97}" for i in range(30))}) for n in range(20)]
    (place / "text.jsonl").write_text("\n".join(lines))
    for seed, (folder, name) in enumerate(NAMES.items()):
        FOREIGN[name](place / "saes" / folder, weights(WIDTH, M, seed))
    saelens(place / "saes" / "normalized", weights(WIDTH, M, 9), "jumprelu", normalize_activations="layer_norm")
    ours = ss.SAE(InferenceConfig(WIDTH, M, training=ss.batchtopk(M, 4)))
    with torch.no_grad():
        for tensor in ours.parameters():
            tensor.normal_(generator=torch.Generator().manual_seed(0))
    ours.cfg.metadata.update({"model_name": str(place / "model"), "layer": 1, "context_size": 20})
    ours.save(place / "saes" / "ours")
    return place


@pytest.fixture(scope="module")
def evaluated(place):
    words = ("--text", place / "text.jsonl", "--core.contexts", 4, "--core.context", 20, "--device", "cpu")
    run("eval", place / "saes", "--model", place / "model", *words)
    return place


def test_evaluate_them_all(evaluated, capsys):
    table = list(csv.DictReader((evaluated / "saes" / "evals" / "table.csv").open()))
    saes = {row["sae"] for row in table}
    assert saes == {
        "saelens",
        "gated",
        "normalized",
        "dictionary",
        "layers.1",
        "average_l0_71",
        "ours",
        "layer1.sae.pt",
    } | {
        "layer_1_width_16k_l0_small",
        "Llama3_1-8B-Base-L1R-8x",
    }
    assert {row["layer"] for row in table} == {"1"}
    assert all(any(row["sae"] == sae and row["metric"] == "fvu" for row in table) for sae in saes)
    [qwen] = (evaluated / "saes" / "qwen").rglob("core.json")
    assert qwen.parent.parent.name == "layer1.sae" and qwen.parent.parent.is_dir()
    [bench] = (evaluated / "saes" / "evals").rglob("*dictionary_eval_results.json")
    assert json.loads(bench.read_text())["sae_cfg_dict"]["d_sae"] == M
    before = {path: path.stat().st_mtime_ns for path in (evaluated / "saes").rglob("core.json")}
    assert len(before) == 10
    words = ("--text", evaluated / "text.jsonl", "--core.contexts", 4, "--core.context", 20, "--device", "cpu")
    run("eval", evaluated / "saes", "--model", evaluated / "model", *words)
    assert before == {path: path.stat().st_mtime_ns for path in before}, "results are reused"
    core = json.loads((evaluated / "saes" / "dictionary" / "evals" / "core.json").read_text())
    del core["checksum"]
    (evaluated / "saes" / "dictionary" / "evals" / "core.json").write_text(json.dumps(core | {"weights": "other"}))
    run("eval", evaluated / "saes" / "dictionary", "--model", evaluated / "model", *words)
    assert json.loads((evaluated / "saes" / "dictionary" / "evals" / "core.json").read_text())["weights"] != "other"


def test_results_are_those_of_the_same_sae_in_our_format(evaluated, tmp_path):
    words = {"text": str(evaluated / "text.jsonl"), "device": "cpu", "layer": 1}
    for folder in ("dictionary", "qwen", "normalized"):
        [found] = (evaluated / "saes" / folder).rglob("core.json")
        [path] = saes_in(evaluated / "saes" / folder)
        copy = ss.SAE.load(path).save(tmp_path / folder)
        [result] = ss.evaluate(copy, str(evaluated / "model"), CoreConfig(contexts=4, context=20), **words)
        assert result["core"] == json.loads(found.read_text())["result"]


def test_compare_them_all(evaluated, tmp_path, capsys):
    run("compare", evaluated / "saes", "--out", tmp_path, "--device", "cpu")
    found = json.loads((tmp_path / "compare.json").read_text())
    assert len(found["saes"]) == 10 and len(found["pairs"]) == 45
    assert {sae["latents"] for sae in found["saes"]} == {M}
    [row] = [row for row in csv.DictReader((tmp_path / "pairs.csv").open()) if {row["a"], row["b"]} == PAIR]
    a, b = (ss.SAE.load(saes_in(evaluated / "saes" / FOLDERS[row[side]])[0]).W_dec.detach() for side in "ab")
    cosines = torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T
    assert abs(float(cosines.amax(1).mean()) - float(row["mmcs_a_to_b"])) < 1e-4


def test_report_them_all(evaluated, tmp_path, capsys):
    pytest.importorskip("plotly")
    run("report", evaluated / "saes", "--out", tmp_path, "--no-figures")
    said = capsys.readouterr()
    assert sum(map(int, re.findall(r"(\d+) SAEs", said.out))) == 10, said
    page = (tmp_path / "index.html").read_text()
    assert all(name in page for name in ("layer1.sae", "average_l0_71", "dictionary", "ours"))


@pytest.mark.parametrize("folder", ["dictionary", "qwen", "gemma"])
def test_browse_one(evaluated, tmp_path, folder, capsys):
    pytest.importorskip("jinja2")
    [path] = saes_in(evaluated / "saes" / folder)
    words = ("--text", evaluated / "text.jsonl", "--model", evaluated / "model", "--context", 16, "--tokens", 320)
    run("browse", path, *words, "--out", tmp_path, "--device", "cpu", "--other", evaluated / "saes" / "ours")
    assert "of 40 latents fire in" in capsys.readouterr().out and (tmp_path / "index.html").exists()


def test_saes_of_another_width_or_model(place, tmp_path, capsys):
    wide = FOREIGN["dictionary_learning topk"](tmp_path / "wide", weights(WIDTH + 1, M)).path
    words = ("--text", place / "text.jsonl", "--core.contexts", 2, "--core.context", 20, "--device", "cpu")
    with pytest.raises(SystemExit) as stop:
        run("eval", wide, "--model", place / "model", *words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and f"has width {WIDTH + 1}: must be {WIDTH}, the width of" in error
    other = FOREIGN["dictionary_learning topk"](tmp_path / "other", weights(WIDTH, M)).path
    run("eval", other, "--model", place / "model", *words)
    assert f"{other} was trained on tiny; it is measured on {place / 'model'}" in capsys.readouterr().err
