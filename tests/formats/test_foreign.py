"""SAEs of other programs: the same codes and reconstructions as the peers' definitions, in every use."""

import json

import pytest
import torch
from safetensors.torch import load_file

import sampled_sae as ss
from sampled_sae.formats import FORMATS, describe, recognize, saes_in
from sampled_sae.sae import SAE
from tests.formats import foreign
from tests.formats.foreign import FOREIGN, Foreign, K, weights

D, M = 12, 40
W = weights(D, M)
PRECISE = foreign.Weights(*(part.double() for part in W))  # the definitions are computed in float64
X = 2 * torch.randn(64, D, generator=torch.Generator().manual_seed(1))


def near_threshold(found: Foreign) -> torch.Tensor:
    """For each latent two inputs [2 m, d] at which it is just above and just below the threshold."""
    rows = []
    for latent in range(M):
        x, step = X[latent].double(), W.E[latent].double()
        low, high = (float(found.pre(point[None])[0, latent]) for point in (x, x + step))
        for factor in (1 + 1e-4, 1 - 1e-4):
            rows.append(x + (float(found.cut[latent]) * factor - low) / (high - low) * step)
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("name", FOREIGN)
def test_codes_and_reconstructions_are_the_peers(name, tmp_path):
    path, found = FOREIGN[name](tmp_path / "sae", W).path, FOREIGN[name](tmp_path / "double", PRECISE)
    sae = SAE.load(path)
    assert saes_in(tmp_path / "sae") == [path]
    assert recognize(path) is FORMATS[name.split()[0]] and sae.folder == path
    assert describe(path) == sae.cfg and (sae.d_in, sae.d_sae) == (D, M)
    x = X.double()
    codes = found.code(found.pre(x))
    assert 0 < (codes > 0).double().mean() < 1
    torch.testing.assert_close(sae.encode(X).double(), codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sae.encode_sparse(X).dense().double(), codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sae(X).double(), found.decode(codes), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sae.decode(sae.encode_sparse(X)).double(), found.decode(codes), rtol=1e-4, atol=1e-4)
    some = torch.tensor([3, 30, 7])
    torch.testing.assert_close(
        sae.encode_sparse(X, some).dense()[:, some].double(), codes[:, some], rtol=1e-4, atol=1e-5
    )
    if found.cut is not None:
        close = near_threshold(found)
        fires = found.code(found.pre(close)) > 0
        own = torch.arange(M).repeat_interleave(2)
        assert torch.equal(fires[range(2 * M), own], torch.arange(2 * M) % 2 == 0), "the first of each two fires"
        ours = SAE.load(path, dtype=torch.float64).encode(close) > 0
        assert torch.equal(ours[range(2 * M), own], fires[range(2 * M), own])
    back = SAE.load(sae.save(tmp_path / "ours"))  # the native format holds all of them
    assert torch.equal(back(X), sae(X))
    assert back.cfg == sae.cfg and sae.is_saved_in(tmp_path / "ours")


def test_metadata_name_model_and_hook_point(tmp_path):
    wanted = {
        "saelens jumprelu": "tiny",
        "saelens v5 topk": "tiny",
        "dictionary_learning topk": "tiny",
        "sparsify topk": "tiny",
        "gemma_scope": "google/gemma-2-2b",
        "gemma_scope_2": "google/gemma-3-1b-pt",
        "llama_scope": "meta-llama/Llama-3.1-8B",
        "qwen_scope": "Qwen/Qwen3-1.7B-Base",
    }
    for name, model in wanted.items():
        cfg = describe(FOREIGN[name](tmp_path / name, W).path)
        assert (cfg.metadata["model_name"], cfg.metadata["hook_name"]) == (model, "blocks.1.hook_resid_post"), name
    assert describe(tmp_path / "dictionary_learning topk").metadata["context_size"] == 16


def test_prefixes_of_matryoshka_saes(tmp_path):
    for name in ("dictionary_learning matryoshka", "saelens checkpoint"):
        sae = SAE.load(FOREIGN[name](tmp_path / name, W).path)
        assert sae.cfg.prefixes == (10, 40) and sae.cfg.architecture == "jumprelu"


def test_the_number_of_active_latents_of_qwen_scope(tmp_path):
    path = FOREIGN["qwen_scope"](tmp_path, W).path
    assert SAE.load(path).cfg.k == K
    other = path.parent.parent / "layer1.sae.pt"
    path.rename(other)
    with pytest.raises(ss.UserError, match=r"layer1\.sae\.pt: does not name the number of active latents; SAE\.load"):
        SAE.load(other)
    sae = SAE.load(other, k=7)
    assert sae.cfg.k == 7 and int((sae.encode(X) > 0).sum(1).max()) <= 7
    assert sae.cfg.metadata["hook_name"] == "blocks.1.hook_resid_post"
    with pytest.raises(ss.UserError, match="k = 0: must be at least 1"):
        SAE.load(other, k=0)
    with pytest.raises(ss.UserError, match=r"k = 7: .*has its own number of active latents; leave k out"):
        SAE.load(FOREIGN["sparsify topk"](tmp_path, W).path, k=7)


def test_the_file_of_weights_stands_for_its_folder(tmp_path):
    for name in ("gemma_scope", "gemma_scope_2", "dictionary_learning topk", "saelens topk", "sparsify topk"):
        path = FOREIGN[name](tmp_path / name, W).path
        [file] = [each for each in path.iterdir() if each.suffix != ".json"]
        assert SAE.load(file).folder == path
        assert saes_in(file) == [path]


@torch.no_grad()
@pytest.mark.parametrize("how", ["layer_norm", "constant_norm_rescale"])
def test_normalization_of_each_token(how, tmp_path):
    folder = foreign.saelens(tmp_path / "sae", W, "jumprelu", normalize_activations=how).path
    w, x, sae = W, X, SAE.load(folder)
    if how == "layer_norm":
        shift, scale = x.mean(1, keepdim=True), x.std(1, keepdim=True)
        normal = (x - shift) / (scale + 1e-5)
    else:
        shift, scale = 0, x.norm(dim=1, keepdim=True) / D**0.5
        normal = x / scale
    codes = foreign.jump(w.cut)((normal - w.c) @ w.E.T + w.b)
    expected = (codes @ w.D + w.c) * scale + shift
    torch.testing.assert_close(sae.encode(x), codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sae(x.view(8, 8, D)).view(-1, D), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sae.decode(sae.encode_sparse(x), x), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ss.UserError, match=f"x = None: this SAE has normalize_activations = '{how}'"):
        sae.decode(codes)
    assert sae.encode(torch.zeros(1, D)).isfinite().all()
    back = SAE.load(sae.save(tmp_path / "ours"))
    assert torch.equal(back(x), sae(x))


def test_a_factor_of_the_activations_that_is_not_there(tmp_path):
    path = foreign.saelens_checkpoint(tmp_path, W).path
    (path / "activation_scaler.json").unlink()
    with pytest.warns(UserWarning, match=r"no activation_scaler\.json with the factor of the activations"):
        SAE.load(path)


@torch.no_grad()
def test_llama_scope_with_decoder_norms_and_folded_weights(tmp_path):
    """The threshold is for pre-activations times the norms; `inference` has the norm of the activations folded in."""
    w = W
    path = foreign.llama_scope(tmp_path, w).path
    file = path / "checkpoints" / "final.safetensors"
    foreign.put(file, load_file(file) | {"decoder.weight": w.D.T})
    scale, norms = D**0.5 / 3.0, w.D.norm(dim=1)
    pre = (X * scale) @ w.E.T + w.b
    torch.testing.assert_close(SAE.load(path).encode(X), pre * (pre * norms > 0.25 * scale) * (pre > 0))
    foreign.put(file, load_file(file) | {"decoder.weight": (w.D * (torch.arange(M) > 0)[:, None]).T})
    sae = SAE.load(path)
    assert not sae.encode(100 * X)[:, 0].any() and SAE.load(sae.save(tmp_path / "ours")).threshold.isfinite().all()
    foreign.llama_scope(tmp_path, w, act_fn="topk")
    foreign.put(file, load_file(file) | {"decoder.weight": w.D.T})
    codes = foreign.top(pre * norms)
    torch.testing.assert_close(SAE.load(path).encode(X), codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(SAE.load(path)(X), ((codes / norms) @ w.D + w.c) / scale, rtol=1e-4, atol=1e-4)
    foreign.llama_scope(tmp_path, w, norm_activation="inference", act_fn="topk", use_decoder_bias=False)
    sae = SAE.load(path)
    torch.testing.assert_close(sae.encode(X), foreign.top(X @ w.E.T + w.b))
    assert sae.cfg.k == K and not sae.b_dec.any()


@torch.no_grad()
def test_embeddings_of_gemma_scope(tmp_path):
    w, found = W, foreign.gemma_scope(tmp_path, W)
    path = tmp_path / "gemma-scope-2b-pt-res" / "embedding" / "width_4k" / "average_l0_5"
    path.parent.mkdir(parents=True)
    found.path.rename(path)
    sae = SAE.load(path)
    torch.testing.assert_close(sae.encode(X * D**0.5), found.code(found.pre(X)))
    torch.testing.assert_close(sae(X * D**0.5) - w.c, D**0.5 * (found.code(found.pre(X)) @ w.D), rtol=1e-4, atol=1e-4)
    assert sae.cfg.metadata["hook_name"] == "hook_embed"


@torch.no_grad()
def test_factors_add_no_rounding_to_weights_of_16_bits(tmp_path):
    w = foreign.Weights(*(part.bfloat16() for part in W))
    found = foreign.llama_scope(tmp_path / "double", foreign.Weights(*(part.double() for part in w)))
    path = foreign.llama_scope(tmp_path / "sae", w).path
    file = path / "checkpoints" / "final.safetensors"
    unit = load_file(file)["decoder.weight"].double().T
    sae, x = SAE.load(path), X.double()
    assert sae.dtype == torch.float32 and SAE.load(path, dtype=torch.bfloat16).dtype == torch.bfloat16
    codes = sae.encode(X).double()
    torch.testing.assert_close(codes, found.pre(x) * (codes > 0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sae(X).double(), (codes @ unit + w.c.double()) / (D**0.5 / 3.0), rtol=1e-4, atol=1e-4)


def test_settings_in_both_files_of_dictionary_learning(tmp_path):
    path = FOREIGN["dictionary_learning matryoshka"](tmp_path, W).path
    config = json.loads((path / "config.json").read_text())
    del config["trainer"]["group_sizes"]
    (path / "config.json").write_text(json.dumps(config))
    assert SAE.load(path).cfg.prefixes == (10, 40)
    config["trainer"]["k"] = 9
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ss.UserError, match=r"ae\.pt: k = 4, but .*config\.json has k = 9: must be the same"):
        SAE.load(path)
