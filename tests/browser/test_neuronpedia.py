"""Batch files for Neuronpedia: each line against its database's schema, the numbers against the browser's own."""

import gzip
import json
from types import NoneType

import pytest
import torch

import sampled_sae as ss
from sampled_sae.browser.collect import BrowseConfig, collect
from sampled_sae.browser.latents import TOP
from sampled_sae.browser.neuronpedia import NeuronpediaConfig
from sampled_sae.browser.write import first_contexts
from sampled_sae.cli import main
from sampled_sae.evals.results import save_explanations
from tests.cli.test_browse import M, make_sae
from tests.models.tiny_models import WIDTH, make_model, make_tokenizer

NUMBER, TEXTS, NUMBERS, WHOLES = (int, float), [str], [int, float], [int]
# Columns of Neuronpedia's tables Neuron, Activation and Explanation (apps/webapp/prisma/schema.prisma) that its own
# converter writes, with their types; the first of each are required.
FEATURE = {
    **dict.fromkeys(("modelId", "layer", "index", "creatorId", "createdAt"), str),
    **dict.fromkeys(("maxActApprox", "frac_nonzero", "vectorDefaultSteerStrength"), NUMBER),
    **{"hasVector": bool, "vectorLabel": (str, NoneType), "hookName": (str, NoneType)},
    **dict.fromkeys(("vector", "topkCosSimValues", "neg_values", "pos_values", "decoder_weights_dist"), NUMBERS),
    **dict.fromkeys(("neg_str", "pos_str"), TEXTS),
    **{f"{kind}_hist_data_bar_{what}": NUMBERS for kind in ("freq", "logits") for what in ("heights", "values")},
    **{f"neuron_alignment_{what}": NUMBERS for what in ("values", "l1")},
    **{f"correlated_{of}_{what}": NUMBERS for of in ("neurons", "features") for what in ("pearson", "l1")},
    **dict.fromkeys(("topkCosSimIndices", "neuron_alignment_indices"), WHOLES),
    **dict.fromkeys(("correlated_neurons_indices", "correlated_features_indices"), WHOLES),
}
ACTIVATION = {
    **dict.fromkeys(("id", "modelId", "layer", "index", "creatorId", "createdAt"), str),
    **{"tokens": TEXTS, "values": NUMBERS, "dfaValues": NUMBERS, "lossValues": NUMBERS},
    **dict.fromkeys(("maxValue", "minValue", "binMin", "binMax", "binContains"), NUMBER),
    **{"maxValueTokenIndex": int, "qualifyingTokenIndex": int},
    **dict.fromkeys(("dataIndex", "dataSource", "logitContributions"), (str, NoneType)),
    **{"dfaTargetIndex": (int, NoneType), "dfaMaxValue": (float, NoneType)},
}
EXPLANATION = {
    **dict.fromkeys(("id", "modelId", "layer", "index", "description", "authorId", "createdAt"), str),
    **dict.fromkeys(("typeName", "explanationModelName", "notes"), (str, NoneType)),
    "embedding": (list, NoneType),
}


def check(row: dict, schema: dict) -> None:
    assert set(row) == set(schema)
    for name, kind in schema.items():
        values, kinds = (row[name], tuple(kind)) if isinstance(kind, list) else ([row[name]], kind)
        assert isinstance(values, list) and all(isinstance(value, kinds) for value in values), name


def read(folder, kind: str) -> list[dict]:
    files = sorted((folder / kind).iterdir(), key=lambda file: int(file.name[6:-9]))
    assert [file.name for file in files] == [f"batch-{n}.jsonl.gz" for n in range(len(files))]
    return [json.loads(line) for file in files for line in gzip.open(file, "rt", encoding="utf-8")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny model, an SAE of which one latent never fires, a text, and what the command wrote."""
    place = tmp_path_factory.mktemp("place")
    make_model("llama").save_pretrained(place / "Tiny.Model")
    make_tokenizer().save_pretrained(place / "Tiny.Model")
    text = "\n".join(
        json.dumps({"text": f"{n}\n " + " ".join(f"the{n * i % 97}" for i in range(30))}) for n in range(9)
    )
    (place / "text.jsonl").write_text(text)
    sae = make_sae(0, model=place / "Tiny.Model")
    sae.cfg.metadata["hook_name"] = "blocks.1.hook_resid_post"
    sae.W_enc.data[:, 7], sae.b_enc.data[7] = 0, -1
    sae.save(place / "my sae")
    save_explanations(sae.folder, {3: {"explanation": "digits <b>", "score": 0.75, "scores": {"detection": 0.75}}})
    usual = ["--text", place / "text.jsonl", "--context", 16, "--tokens", 640, "--device", "cpu", "--near", 3]
    words = ["browse", sae.folder, *usual, "--out", place / "out", "--neuronpedia", place / "np"]
    main([*map(str, words), "--export.creator", "Me", "--export.hf-repo", "me/saes"])
    return place, sae


def test_every_line_has_neuronpedias_columns(made):
    place, _ = made
    folder = place / "np" / "tiny-model" / "1-my-sae"
    features, activations, explanations = (read(folder, k) for k in ("features", "activations", "explanations"))
    for rows, schema in ((features, FEATURE), (activations, ACTIVATION), (explanations, EXPLANATION)):
        for row in rows:
            check(row, schema)
            assert (row["modelId"], row["layer"]) == ("tiny-model", "1-my-sae")
    assert [row["index"] for row in features] == [str(n) for n in range(M)]
    assert len({row["id"] for row in activations}) == len(activations) > M
    [one] = explanations
    assert (one["index"], one["description"], json.loads(one["notes"])["detection"]) == ("3", "digits <b>", 0.75)
    about = {name: json.loads((folder / f"{name}.jsonl").read_text()) for name in ("model", "release", "sourceset")}
    source = json.loads((folder / "source.jsonl").read_text())
    assert source["id"] == "1-my-sae" and source["setName"] == about["sourceset"]["name"] == "my-sae"
    assert about["sourceset"]["releaseName"] == about["release"]["name"] and source["hfRepoId"] == "me/saes"
    assert about["model"]["id"] == source["modelId"] and about["release"]["creatorName"] == "Me"


def test_numbers_are_the_browsers(made):
    place, sae = made
    folder, model = place / "np" / "tiny-model" / "1-my-sae", ss.load_model(place / "Tiny.Model", "cpu")
    contexts = first_contexts(sae, model, ss.data.text.TextSource(str(place / "text.jsonl")), 640, 16)
    browsed = collect(sae, model, 1, contexts, BrowseConfig(near=3))
    activations = read(folder, "activations")
    for row in read(folder, "features"):
        latent = int(row["index"])
        assert row["maxActApprox"] == pytest.approx(float(browsed.firings.maximum[latent]), rel=1e-5)
        assert row["frac_nonzero"] == pytest.approx(browsed.firings.count(latent) / browsed.read)
        assert sum(row["freq_hist_data_bar_heights"]) == browsed.firings.count(latent)
        assert row["topkCosSimIndices"] == browsed.near.latent[latent].tolist()
        assert row["pos_str"] == [model.tokenizer.decode([t]) for t in browsed.output.promoted[latent].tolist()]
        assert row["neg_values"] == pytest.approx(browsed.output.suppressed_by[latent].tolist(), rel=1e-5)
        shown = browsed.windows.latent == latent
        own = [one for one in activations if one["index"] == row["index"]]
        assert len(own) == int(shown.sum()) and (latent != 7 or not own)
        dense, bands = browsed.firings.dense(latent), browsed.windows.band[shown].tolist()
        for one, band, center in zip(own, bands, browsed.windows.center[shown].tolist(), strict=True):
            place_ = int(browsed.firings.position[center])
            assert one["values"] == pytest.approx(dense[place_ // 16].tolist(), rel=1e-5)
            assert one["tokens"] == [model.tokenizer.decode([t]) for t in contexts[place_ // 16].tolist()]
            assert one["maxValue"] == max(one["values"]) == one["values"][one["maxValueTokenIndex"]]
            assert one["qualifyingTokenIndex"] == place_ % 16 and one["values"][place_ % 16] > 0
            if band == TOP:
                assert (one["binMin"], one["binContains"]) == (-1, -1) and one["binMax"] == row["maxActApprox"]
            else:
                inside = (dense > one["binMin"]) & (dense <= one["binMax"])
                assert one["binMin"] <= one["values"][place_ % 16] * 1.00001
                assert one["binContains"] == pytest.approx(float(inside.sum()) / browsed.read, abs=1.5 / browsed.read)
    assert torch.equal(contexts, browsed.contexts)


def test_names_and_vectors(made, tmp_path):
    place, sae = made
    names = NeuronpediaConfig(model_id="tiny", source_set="res-40", vectors=True)
    text = str(place / "text.jsonl")
    done = ss.browse(
        ss.SAE.load(sae.folder),
        ss.load_model(place / "Tiny.Model", "cpu"),
        text,
        tmp_path / "out",
        tokens=160,
        context=16,
        neuronpedia=tmp_path / "np",
        export=names,
    )
    assert done.neuronpedia == tmp_path / "np" / "tiny" / "1-res-40"
    rows = read(done.neuronpedia, "features")
    assert all(row["hasVector"] and len(row["vector"]) == WIDTH for row in rows)
    torch.testing.assert_close(torch.tensor([row["vector"] for row in rows]), sae.W_dec.data, rtol=1e-4, atol=1e-6)
    with pytest.raises(ss.UserError, match="model_id = 'a/b': must be letters, digits, dashes and underscores"):
        NeuronpediaConfig(model_id="a/b")


def test_names_without_a_folder_are_an_error(made, tmp_path, capsys):
    place, sae = made
    words = ["browse", sae.folder, "--text", place / "text.jsonl", "--out", tmp_path, "--export.creator", "Me"]
    with pytest.raises(SystemExit):
        main([str(word) for word in words])
    assert "export: has no effect without --neuronpedia FOLDER" in capsys.readouterr().err
