import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import sampled_sae as ss
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.sae import SAE


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
    with pytest.raises(ss.UserError, match=r": no SAE in this folder \(no cfg.json\)"):
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
        ss.UserError, match="architecture = 'transcoder': only 'gated', 'jumprelu', 'standard', 'topk' can be loaded"
    ):
        SAE.load(tmp_path / "sae")
    (tmp_path / "sae" / "cfg.json").write_text(json.dumps(config | {"d_in": 7}))
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
    with pytest.raises(ss.UserError, match=r"sampled_sae\.json: not a configuration of this program"):
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
