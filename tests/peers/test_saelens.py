"""Folders that are saved here and loaded by SAELens, and the other way. Runs in that peer's environment."""

import warnings

import pytest
import torch
from sae_lens import SAE as SAELensSAE
from sae_lens.loading import pretrained_sae_loaders as loaders
from sae_lens.registry import get_sae_class, get_sae_training_class
from sae_lens.training.activation_scaler import ActivationScaler, ActivationWhitening

import sampled_sae as ss
from tests.formats import foreign


def test_saelens_loads_what_we_save_and_computes_the_same(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = 5 + 3 * (torch.rand(4000, 64, generator=generator) < 0.1).float() @ torch.randn(64, 24, generator=generator)
    saes = ss.train(
        x,
        [ss.batchtopk(96, 6), ss.topk(96, 6), ss.sampled(96, 6, "entropy", l=4), ss.released(96, 6)],
        steps=100,
        batch_size=400,
        out=tmp_path / "run",
        device="cpu",
        progress=False,
    )
    for sae in saes:
        sae.cfg.metadata.update({"model_name": "pythia-160m-deduped", "hook_name": "blocks.6.hook_resid_post"})
        folder = sae.save(tmp_path / "saved" / sae.cfg.training.name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            theirs = SAELensSAE.load_from_disk(str(folder))
        codes = theirs.encode(x)
        assert (codes > 0).sum() == (sae.encode(x) > 0).sum() > 0
        torch.testing.assert_close(codes, sae.encode(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(theirs.decode(codes), sae(x), rtol=1e-5, atol=1e-5)
        assert theirs.cfg.metadata.hook_name == "blocks.6.hook_resid_post"
        assert theirs.cfg.architecture() == "jumprelu"


def fill_(module: torch.nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
            if "threshold" in name:
                parameter.abs_()


CASES = [
    ("standard", {}),
    ("standard", {"apply_b_dec_to_input": False}),
    ("standard", {"normalize_activations": "layer_norm"}),
    ("jumprelu", {}),
    ("jumprelu", {"apply_b_dec_to_input": False}),
    ("jumprelu", {"normalize_activations": "constant_norm_rescale"}),
    ("jumprelu", {"normalize_activations": "layer_norm", "apply_b_dec_to_input": False}),
    ("topk", {"k": 5}),
    ("topk", {"k": 5, "rescale_acts_by_decoder_norm": True}),
    ("topk", {"k": 5, "normalize_activations": "constant_norm_rescale"}),
    ("gated", {}),
    ("gated", {"apply_b_dec_to_input": False}),
]


@torch.no_grad()
@pytest.mark.parametrize("name, fields", CASES)
def test_we_load_what_saelens_saves_and_compute_the_same(tmp_path, name, fields):
    generator = torch.Generator().manual_seed(0)
    sae_class, config_class = get_sae_class(name)
    theirs = sae_class(config_class(d_in=24, d_sae=96, **fields))
    fill_(theirs, generator)
    x = torch.randn(300, 24, generator=generator)
    theirs.save_model(tmp_path / "theirs")
    codes = theirs.encode(x)
    codes = codes.to_dense() if codes.is_sparse else codes
    ours = ss.SAE.load(tmp_path / "theirs")
    assert ours.cfg.architecture == name
    torch.testing.assert_close(ours.encode(x), codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.encode_sparse(x).dense(), codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    back = SAELensSAE.load_from_disk(str(ours.save(tmp_path / "ours")))
    torch.testing.assert_close(back(x), ours(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("scale", [None, 2.5])
@pytest.mark.parametrize("rescaled", [True, False])
@pytest.mark.parametrize("name", ["batchtopk", "matryoshka_batchtopk", "jumprelu", "topk", "standard", "gated"])
def test_checkpoints_of_the_training_are_what_saelens_saves_for_inference(tmp_path, name, rescaled, scale):
    """A checkpoint on scaled activations, against the SAE that SAELens makes of it at the end of its training."""
    sae_class, config_class = get_sae_training_class(name)
    fields = {"d_in": 24, "d_sae": 96} | ({"k": 5} if "topk" in name else {})
    fields |= {"rescale_acts_by_decoder_norm": rescaled} if "topk" in name else {}
    fields |= {"matryoshka_widths": [24, 96]} if name.startswith("matryoshka") else {}
    normalize = "none" if scale is None else "expected_average_only_in"
    theirs = sae_class(config_class(normalize_activations=normalize, **fields))
    generator = torch.Generator().manual_seed(0)
    fill_(theirs, generator)
    if "batchtopk" in name:
        theirs.topk_threshold.fill_(0.7)
    scaler = ActivationScaler(scale)
    theirs.save_model(tmp_path / "checkpoint")
    scaler.save(str(tmp_path / "checkpoint" / "activation_scaler.json"))
    ours = ss.SAE.load(tmp_path / "checkpoint")
    if scale is not None:
        theirs.fold_activation_norm_scaling_factor(scale)
    theirs.save_inference_model(tmp_path / "final")
    final, again = SAELensSAE.load_from_disk(str(tmp_path / "final")), ss.SAE.load(tmp_path / "final")
    x = torch.randn(300, 24, generator=generator)
    for sae in (ours, again):
        torch.testing.assert_close(sae.encode(x), final.encode(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sae(x), final(x), rtol=1e-4, atol=1e-4)
        assert sae.cfg.prefixes == ((24, 96) if name.startswith("matryoshka") else ())
    assert final.encode(x).to_dense().count_nonzero() > 0


@torch.no_grad()
@pytest.mark.parametrize("subtracts", [True, False])
@pytest.mark.parametrize("name", ["matryoshka_batchtopk", "jumprelu", "topk", "gated"])
def test_checkpoints_on_whitened_activations(tmp_path, name, subtracts):
    sae_class, config_class = get_sae_training_class(name)
    fields = {
        "d_in": 24,
        "d_sae": 96,
        "apply_b_dec_to_input": subtracts,
        "normalize_activations": "covariance_whitening",
    }
    fields |= {"k": 5} if "topk" in name else {}
    fields |= {"matryoshka_widths": [24, 96]} if name.startswith("matryoshka") else {}
    theirs, generator = sae_class(config_class(**fields)), torch.Generator().manual_seed(0)
    fill_(theirs, generator)
    if "batchtopk" in name:
        theirs.topk_threshold.fill_(0.7)
    matrix = torch.eye(24) + torch.randn(24, 24, generator=generator) / 20
    whitening = ActivationWhitening(torch.randn(24, generator=generator), matrix, torch.linalg.inv(matrix))
    theirs.save_model(tmp_path / "checkpoint")
    ActivationScaler(None, whitening).save(str(tmp_path / "checkpoint" / "activation_scaler.json"))
    ours = ss.SAE.load(tmp_path / "checkpoint")
    theirs.fold_activation_whitening(whitening.mean, whitening.matrix, whitening.inverse_matrix)
    theirs.save_inference_model(tmp_path / "final")
    final, x = SAELensSAE.load_from_disk(str(tmp_path / "final")), torch.randn(300, 24, generator=generator)
    torch.testing.assert_close(ours.encode(x), final.encode(x), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours(x), final(x), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_published_formats_as_saelens_reads_them(tmp_path, monkeypatch):
    """Its loaders, with files of this disk instead of the hub's."""
    monkeypatch.setattr(loaders, "hf_hub_download", lambda repo_id, filename, subfolder="", **_: str(
        tmp_path / repo_id.split("/")[-1] / subfolder / filename))  # fmt: skip
    monkeypatch.setattr(loaders, "get_safetensors_tensor_shapes", lambda repo, file: {
        "w_enc": [24, 96], "w_dec": [96, 24]})  # fmt: skip
    w, x = foreign.weights(24, 96), torch.randn(300, 24, generator=torch.Generator().manual_seed(0))
    gemma = foreign.gemma_scope(tmp_path, w).path
    gemma_2 = foreign.gemma_scope_2(tmp_path / "gemma-scope-2-1b-pt", w).path
    llama = foreign.llama_scope(tmp_path / "Llama3_1-8B-Base-LXR-8x", w, norm=3.0).path
    qwen = foreign.qwen_scope(tmp_path, w).path
    cases = [
        (loaders.gemma_2_sae_huggingface_loader, gemma, "google/gemma-scope-2b-pt-res", 1.0),
        (loaders.gemma_3_sae_huggingface_loader, gemma_2, "google/gemma-scope-2-1b-pt", 1.0),
        (loaders.llama_scope_sae_huggingface_loader, llama, "fnlp/Llama3_1-8B-Base-LXR-8x", 24**0.5 / 3.0),
        (loaders.qwen_scope_sae_huggingface_loader, qwen, f"Qwen/{qwen.parent.name}", 1.0),
    ]
    for load, path, repo, scale in cases:
        folder = str(path.relative_to(tmp_path / repo.split("/")[1]))
        config, state, _ = load(repo, folder, "cpu", False, {"dtype": "float32", "d_in": 24, "d_sae": 96})
        config = loaders.handle_config_defaulting(config)
        sae_class, config_class = get_sae_class(config["architecture"])
        theirs = sae_class(config_class.from_dict(config))
        theirs.load_state_dict(state)
        if scale != 1.0:
            theirs.fold_activation_norm_scaling_factor(scale)
        ours = ss.SAE.load(path)
        torch.testing.assert_close(ours.encode(x), theirs.encode(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
        assert ours.cfg.metadata["hook_name"] == theirs.cfg.metadata.hook_name
        assert (ours.encode(x) > 0).sum() > 0


@torch.no_grad()
@pytest.mark.parametrize("name", ["saelens v5 standard", "saelens v5 jumprelu", "saelens v5 topk"])
def test_folders_of_version_5(tmp_path, name):
    path = foreign.FOREIGN[name](tmp_path / "sae", foreign.weights(24, 96)).path
    theirs, ours = SAELensSAE.load_from_disk(str(path)), ss.SAE.load(path)
    x = torch.randn(300, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours.encode(x), theirs.encode(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    assert ours.cfg.metadata["hook_name"] == theirs.cfg.metadata.hook_name


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in foreign.FOREIGN if "groupmax" not in name])
def test_saelens_loads_every_sae_that_we_convert(tmp_path, name):
    sae = ss.SAE.load(foreign.FOREIGN[name](tmp_path / "sae", foreign.weights(24, 96)).path)
    theirs = SAELensSAE.load_from_disk(str(sae.save(tmp_path / "ours")))
    x = torch.randn(100, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sae.encode(x), theirs.encode(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sae(x), theirs(x), rtol=1e-4, atol=1e-4)
