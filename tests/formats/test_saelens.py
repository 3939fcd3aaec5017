import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import sampled_sae as ss
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.sae import SAE
from sampled_sae.training.learner import CLOSED


@pytest.fixture
def sae() -> SAE:
    made = SAE(InferenceConfig(6, 20, training=ss.released(20, 3, score="entropy")))
    with torch.no_grad():
        for tensor in made.parameters():
            tensor.copy_(torch.randn(tensor.shape))
    made.threshold.fill_(0.3)
    made.threshold_ema.fill_(0.4)
    made.cfg.metadata.update({"model_name": "tiny", "hook_name": "blocks.1.hook_resid_post", "note": [1, 2]})
    return made


def test_what_is_saved_is_loaded(sae, tmp_path):
    back = SAE.load(sae.save(tmp_path / "a" / "sae"))
    x = torch.randn(4, 5, 6)
    assert torch.equal(back(x), sae(x))
    assert back.cfg.training == sae.cfg.training
    assert back.cfg.metadata == sae.cfg.metadata
    assert back.threshold_ema == sae.threshold_ema
    assert back.threshold.shape == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["saelens", "dictionary_learning"])
def test_thresholds_are_saved_without_rounding(sae, tmp_path, dtype, format):
    sae = sae.to(dtype)
    sae.cfg = replace(sae.cfg, apply_b_dec_to_input=False)  # dictionary_learning has no other with such thresholds
    for threshold in (torch.tensor(0.4237), torch.rand(20) + 0.1, torch.where(torch.arange(20) < 5, CLOSED, 0.3)):
        sae.threshold = threshold
        folder = sae.save(tmp_path / "sae", format)
        assert torch.equal(SAE.load(folder).threshold, threshold)
        assert sae.is_saved_in(folder) or format != "saelens"  # results are then reused and written there


def test_the_widths_of_prefixes_are_saved(sae, tmp_path):
    sae.cfg = replace(sae.cfg, prefixes=(3, 20))
    assert SAE.load(sae.save(tmp_path / "sae")).cfg.prefixes == (3, 20)


def test_the_folder_has_saelens_shapes(sae, tmp_path):
    sae.save(tmp_path / "sae")
    weights = load_file(tmp_path / "sae" / "sae_weights.safetensors")
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        "W_enc": (6, 20),
        "W_dec": (20, 6),
        "b_enc": (20,),
        "b_dec": (6,),
        "threshold": (20,),
    }
    config = json.loads((tmp_path / "sae" / "cfg.json").read_text())
    assert config["architecture"] == "jumprelu"
    assert config["metadata"]["model_name"] == "tiny"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sae"]


def test_saving_again_replaces_the_folder(sae, tmp_path):
    sae.save(tmp_path / "sae")
    sae.threshold.fill_(0.9)
    sae.save(tmp_path / "sae")
    assert SAE.load(tmp_path / "sae").threshold == torch.tensor(0.9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sae"]


def test_a_folder_from_elsewhere_loads_without_ours(sae, tmp_path):
    sae.save(tmp_path / "sae")
    (tmp_path / "sae" / "sampled_sae.json").unlink()
    path = tmp_path / "sae" / "sae_weights.safetensors"
    weights = load_file(path)
    weights["threshold"][3] = 2.0
    save_file(weights, path)
    back = SAE.load(tmp_path / "sae")
    assert back.cfg.training is None
    assert back.threshold.shape == (20,)
    x = torch.randn(9, 6)
    z = back.pre_activations(x)
    assert torch.equal(back.encode(x), z * (z > weights["threshold"]))


def test_damaged_folders_get_a_clear_line(sae, tmp_path):
    with pytest.raises(ss.UserError, match=r"nowhere: no SAE there \(no such folder\)"):
        SAE.load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ss.UserError, match=r"file: a file, not the folder of an SAE"):
        SAE.load(tmp_path / "file")
    with pytest.raises(ss.UserError, match=r": no SAE in this folder; the formats that are recognized are"):
        SAE.load(tmp_path)
    sae.save(tmp_path / "sae")
    path = tmp_path / "sae" / "sae_weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ss.UserError, match=r"sae_weights\.safetensors: missing or damaged"):
        SAE.load(tmp_path / "sae")
    path.write_bytes(whole)
    config = json.loads((tmp_path / "sae" / "cfg.json").read_text())
    (tmp_path / "sae" / "cfg.json").write_text(json.dumps(config | {"architecture": "transcoder"}))
    with pytest.raises(
        ss.UserError,
        match="architecture = 'transcoder': only 'gated', 'groupmax', 'jumprelu', 'standard', 'topk', "
        "'batchtopk', 'matryoshka_batchtopk' can be loaded",
    ):
        SAE.load(tmp_path / "sae")
    (tmp_path / "sae" / "cfg.json").write_text(json.dumps(config | {"d_in": 7}))
    with pytest.raises(ss.UserError, match=r"cfg\.json: missing or damaged"):
        SAE.load(tmp_path / "sae")
    edit(tmp_path / "sae" / "sampled_sae.json", checksums=None)
    with pytest.raises(ss.UserError, match=r"W_enc has shape \(6, 20\): must be \(7, 20\)"):
        SAE.load(tmp_path / "sae")


@pytest.mark.parametrize("below", [".", "saes", "layer-3/saes", "pass-1/layer-3/saes"])
def test_a_runs_folder_names_the_saes_in_it(sae, tmp_path, below):
    for name in "abcd":
        sae.save(tmp_path / below / name)
    with pytest.raises(ss.UserError) as error:
        SAE.load(tmp_path)
    names = ", ".join(str(tmp_path / below / name) for name in "abc")
    assert str(error.value) == f"{tmp_path}: no SAE itself, but there are SAEs in it: {names} and 1 more; name one"


def test_a_damaged_configuration_of_ours_gets_a_clear_line(sae, tmp_path):
    sae.save(tmp_path / "sae")
    (tmp_path / "sae" / "sampled_sae.json").write_text("{}")
    with pytest.raises(ss.UserError, match=r"sampled_sae\.json: config: is missing"):
        SAE.load(tmp_path / "sae")


def test_saving_never_destroys_what_is_not_an_sae(sae, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ss.UserError, match="holds something else than an SAE"):
        sae.save(tmp_path)
    with pytest.raises(ss.UserError, match="holds something else than an SAE"):
        sae.save(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_thresholds_stay_in_float32(sae):
    assert sae.to(torch.bfloat16).threshold.dtype == torch.float32
    assert sae.threshold == torch.tensor(0.3)
    assert sae.W_dec.dtype == torch.bfloat16


def edit(path, **fields):
    """Change fields of a JSON file; None removes one. The file then has no checksum of its own."""
    content = json.loads(path.read_text()) | {"checksum": None} | fields
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_changed_weights_are_noticed(sae, tmp_path):
    folder = sae.save(tmp_path / "sae")
    own = json.loads((folder / "sampled_sae.json").read_text())
    assert own["format_version"] == 2 and own["checksums"].keys() == {"cfg.json", "sae_weights.safetensors"}
    path = folder / "sae_weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(ss.UserError, match=r"sae_weights\.safetensors: missing or damaged \(its CRC-32 is \d+, but"):
        SAE.load(folder)
    with torch.no_grad():
        sae.b_dec.add_(1)
    (sae.save(tmp_path / "other") / path.name).replace(path)
    with pytest.raises(ss.UserError, match="missing or damaged"):
        SAE.load(folder)
    # Without checksums, as before version 1, the folder is read as it is.
    edit(folder / "sampled_sae.json", checksums=None, format_version=None)
    assert torch.equal(SAE.load(folder).b_dec, sae.b_dec)


def test_changed_settings_are_noticed(sae, tmp_path):
    """Each would load as another valid SAE."""
    for file, fields in (("cfg.json", {"apply_b_dec_to_input": False}), ("sampled_sae.json", {"threshold_ema": 9.0})):
        path = sae.save(tmp_path / file) / file
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        with pytest.raises(ss.UserError, match=r"changed since it was written|missing or damaged"):
            SAE.load(path.parent)


@pytest.mark.parametrize(
    "file, fields, line",
    [
        ("cfg.json", {"d_in": "6"}, "d_in = '6': must be a whole number"),
        ("cfg.json", {"d_sae": 0}, "d_sae = 0: must be at least 1"),
        ("cfg.json", {"d_sae": None}, "d_sae is missing: not a SAELens configuration"),
        ("cfg.json", {"architecture": ["jumprelu"]}, "architecture = .'jumprelu'.: only"),
        ("cfg.json", {"architecture": "topk"}, "k = None: must be a number for 'topk' SAEs"),
        ("cfg.json", {"normalize_activations": "whiten"}, "normalize_activations = 'whiten': only 'none', 'const"),
        ("cfg.json", {"metadata": [3]}, "metadata = .3.: must be an object with named fields"),
        ("sampled_sae.json", {"metadata": [3]}, "metadata = .3.: must be an object with named fields"),
        ("sampled_sae.json", {"checksums": 3}, "checksums = 3: must be an object with named fields"),
        ("sampled_sae.json", {"threshold_ema": "high"}, "threshold_ema = 'high': must be a number"),
        ("sampled_sae.json", {"config": 3}, "config = 3: must be an object with named fields, or none"),
    ],
)
def test_wrong_values_in_the_configuration_get_a_clear_line(sae, tmp_path, file, fields, line):
    folder = sae.save(tmp_path / "sae")
    if file == "cfg.json":
        own = folder / "sampled_sae.json"
        edit(own, config={})
        own.write_text(own.read_text().replace('"config": {}', '"config": null'))
        if "metadata" in fields:
            own.unlink()
    edit(folder / file, **fields)
    with pytest.raises(ss.UserError, match=line) as error:
        SAE.load(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@torch.no_grad()
def test_a_topk_folder_with_rescaled_codes(sae, tmp_path):
    """SAELens multiplies codes by the norms of the decoder rows before the selection, and divides for decoding."""
    source = SAE(InferenceConfig(6, 20, "topk", k=4, apply_b_dec_to_input=False))
    for name in ("W_enc", "b_enc", "W_dec", "b_dec"):
        getattr(source, name).copy_(getattr(sae, name))
    folder = source.save(tmp_path / "sae")
    (folder / "sampled_sae.json").unlink()
    edit(folder / "cfg.json", rescale_acts_by_decoder_norm=True)
    x, norms = torch.randn(9, 6), sae.W_dec.norm(dim=1)
    codes = (x @ sae.W_enc + sae.b_enc).relu() * norms
    codes = codes * (codes >= codes.topk(4, dim=1).values[:, -1:])
    back = SAE.load(folder)
    torch.testing.assert_close(back.encode(x), codes)
    torch.testing.assert_close(back(x), codes / norms @ sae.W_dec + sae.b_dec)


def test_loading_in_another_dtype(sae, tmp_path):
    back = SAE.load(sae.save(tmp_path / "sae"), dtype=torch.bfloat16)
    assert back.dtype == torch.bfloat16 and back.threshold == sae.threshold
    assert back.folder == tmp_path / "sae"
    with pytest.raises(ss.UserError, match=r"format = 'zip': unknown; the formats are .*saelens"):
        sae.save(tmp_path / "other", format="zip")
