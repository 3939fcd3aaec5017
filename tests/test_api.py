"""The public functions, as in the README: from a model and a text to SAEs, results, a comparison, pages."""

import json
import math

import numpy as np
import pytest
import torch

import sampled_sae as ss
from sampled_sae.evals.core.schema import CoreConfig
from tests.models.tiny_models import make_model, make_tokenizer

SMALL = {"batch_size": 50, "device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def pair():
    """A transformers model and its tokenizer, as users have them."""
    return make_model("gpt_neox"), make_tokenizer()


@pytest.fixture(scope="module")
def model(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    pair[0].save_pretrained(folder)
    pair[1].save_pretrained(folder)
    return ss.load_model(folder, device="cpu")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [json.dumps({"text": f"{n} " + " ".join(f"the{n * i % 97}" for i in range(30))}) for n in range(60)]
    file.write_text("\n".join(lines))
    return str(file)


@pytest.fixture(scope="module")
def source(model, text):
    return ss.activations(model, text, layer=1, context=20, buffer_tokens=800, progress=False)


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "a"
    configs = [ss.batchtopk(d_sae=64, k=4), ss.sampled(d_sae=64, k=4, l=5)]
    saes = ss.train(source, configs, tokens=600, out=out, heldout_tokens=60, **SMALL)
    return out, saes


def same(a: ss.SAE, b: ss.SAE) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_from_a_model_to_trained_saes(run):
    out, saes = run
    assert [sae.folder for sae in saes] == [out / "saes" / name for name in ("batchtopk-s0", "l2-l5-s0")]
    assert all(same(ss.SAE.load(sae.folder), sae) for sae in saes)


def test_evaluate_saes_in_memory_and_in_folders(run, model, text, capsys):
    out, saes = run
    results = ss.evaluate(saes, model, evals=["core"], text=text, out=out / "evals")
    assert results[0]["core"]["contexts"] == 3 and results.names == ["batchtopk-s0", "l2-l5-s0"]
    assert "CE recovered" in str(results) and results.table == out / "evals" / "table.csv"
    before = (saes[0].folder / "evals" / "core.json").stat().st_mtime_ns
    again = ss.evaluate(out, model, "core", text=text)
    assert again == results and before == (saes[0].folder / "evals" / "core.json").stat().st_mtime_ns
    changed = ss.SAE.load(saes[0].folder)
    with torch.no_grad():
        changed.W_dec.mul_(0.5)
    # Weights that are no longer those of the folder are measured as they are, and leave no trace there.
    other = ss.evaluate(changed, model, text=text)
    assert other[0]["core"]["normal"] != results[0]["core"]["normal"]
    assert before == (saes[0].folder / "evals" / "core.json").stat().st_mtime_ns
    with pytest.raises(ss.UserError, match="evals = 'cor': must be among core"):
        ss.evaluate(saes, model, ["cor"], text=text)
    with pytest.raises(ss.UserError, match="text: is missing; core reads one"):
        ss.evaluate(saes, model)


def test_evaluate_on_documents_in_memory(run, model):
    """Again with the same documents, the results are taken from the folder; others are measured."""
    documents = [f"{n} " + " ".join(f"the{n * i % 97}" for i in range(30)) for n in range(60)]
    config = CoreConfig(contexts=4, context=16)
    first, again, other = (
        ss.evaluate(run[1][0], model, config, text=texts)[0]["core"]
        for texts in (documents, tuple(documents), documents[::-1])
    )
    assert first == again
    assert first["normal"]["fvu"] != other["normal"]["fvu"]


def test_compare_report_and_browse(run, model, text, tmp_path, capsys):
    pytest.importorskip("plotly")
    out, saes = run
    found = ss.compare(saes, out=tmp_path / "compare", device="cpu")
    assert len(found.to_dict()["pairs"]) == 1 and (tmp_path / "compare" / "pairs.csv").exists()
    # Without folders: names come from the configurations.
    fresh = [ss.SAE.load(sae.folder) for sae in saes]
    for sae in fresh:
        sae.folder = None
    assert [sae["name"] for sae in ss.compare(fresh, device="cpu").to_dict()["saes"]] == ["batchtopk-s0", "l2-l5-s0"]
    written = ss.report(out, out=tmp_path / "report", figures=False)
    assert written.page == tmp_path / "report" / "index.html" and written.page.exists()
    made = ss.browse(saes[0], model, text=text, out=tmp_path / "browser", tokens=400, context=16, device="cpu")
    assert made.page == tmp_path / "browser" / "index.html" and "of 64 latents fire" in made.summary


def test_a_model_that_is_loaded_already(pair, model, text, run):
    source = ss.activations(pair, text, layer=1, context=20, buffer_tokens=800, progress=False)
    sae = ss.train(source, ss.batchtopk(64, 4), tokens=600, heldout_tokens=60, **SMALL)
    assert isinstance(sae, ss.SAE) and same(sae, run[1][0])
    assert ss.load_model(model) is model


def test_several_hook_points_give_a_dictionary(model, text, tmp_path):
    source = ss.activations(model, text, layer=[0, 1], context=20, buffer_tokens=800, progress=False)
    found = ss.train(source, [ss.batchtopk(64, 4)], steps=5, out=tmp_path, heldout_tokens=60, **SMALL)
    assert {name: len(saes) for name, saes in found.items()} == {"layer-0": 1, "layer-1": 1}
    assert found["layer-1"][0].folder == tmp_path / "layer-1" / "saes" / "batchtopk-s0"
    one = ss.train({"here": torch.randn(500, 8)}, ss.batchtopk(16, 2), steps=5, **SMALL)
    assert isinstance(one["here"], ss.SAE)


def test_anything_can_be_trained_on(activations, tmp_path):
    np.save(tmp_path / "x.npy", activations.numpy())
    wanted = ss.train(activations, ss.topk(32, 3), steps=10, **SMALL)
    for given in (activations.numpy(), tmp_path / "x.npy", str(tmp_path / "x.npy"), activations.view(-1, 10, 16)):
        assert same(ss.train(given, ss.topk(32, 3), steps=10, **SMALL), wanted)
    batches = [activations[n : n + 77] for n in range(0, 4000, 77)]
    assert isinstance(ss.train(batches, ss.topk(32, 3), steps=10, heldout_tokens=100, **SMALL), ss.SAE)


def test_length_and_settings_are_checked(activations):
    for given, line in (
        ({}, "steps = None, tokens = None: give one of the two"),
        ({"steps": 1, "tokens": 100}, "give one of the two"),
        ({"tokens": 10}, "tokens = 10: must be at least batch_size = 50"),
        ({"tokens": "900"}, "tokens = '900': must be a number"),
        ({"tokens": math.inf}, "tokens = inf: must be a number"),
        ({"tokens": 900, "batch_size": "50"}, "batch_size = '50': must be a whole number"),
        ({"steps": 3, "checkpoint_evry": 5}, "checkpoint_evry: is no setting of training; must be one of"),
    ):
        with pytest.raises(ss.UserError, match=line):
            ss.train(activations, ss.topk(32, 3), **{**SMALL, **given})


@pytest.mark.parametrize("configs", ["batchtopk", ["batchtopk"], 3])
def test_a_name_is_no_configuration(activations, configs):
    with pytest.raises(
        ss.UserError, match=r"configs = .*: must be one or several configurations, such as ss\.topk_then_batchtopk"
    ):
        ss.train(activations, configs, steps=1)


def test_public_names_are_documented():
    for name in ss.__all__:
        value = getattr(ss, name)
        assert name == "__version__" or isinstance(value, dict) or value.__doc__, name
    for function in (ss.load_model, ss.activations, ss.train, ss.evaluate, ss.compare, ss.report, ss.browse):
        assert function.__module__ == "sampled_sae.api"
