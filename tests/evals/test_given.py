import pytest
import torch

from sampled_sae.evals.reading import check_contexts, checked
from sampled_sae.hooks import saved_hook
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from tests.models.tiny_models import make_model, make_tokenizer


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(make_model("llama"), make_tokenizer(), "tiny")


def test_saes_have_names_where_there_are_several(model):
    one = SAE(InferenceConfig(model.width, 4))
    assert [name for name, _ in checked([one], model, 0)] == ["sae"]
    assert [name for name, _ in checked([one, one], model, 0)] == ["saes[0]", "saes[1]"]
    with pytest.raises(UserError, match=r"saes = \[\]"):
        list(checked([], model, 0))


@pytest.mark.parametrize("name", ["W_enc", "b_enc", "W_dec", "b_dec", "threshold"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers(model, name, wrong):
    """A latent whose encoder is nan never fires, and would pass for a dead one."""
    good, bad = SAE(InferenceConfig(model.width, 4)), SAE(InferenceConfig(model.width, 4))
    with torch.no_grad():
        getattr(bad, name)[(0,) * getattr(bad, name).ndim] = wrong
    shown = name.removesuffix("_rows")
    with pytest.raises(UserError, match=rf"saes\[1\] has entries of {shown} that are nan or infinite"):
        list(checked([good, bad], model, 0))


@pytest.mark.parametrize(
    ("said", "layer", "at"),
    [
        ({"layer": 1}, 1, 1),
        ({"layer": 1, "hook_name": "blocks.1.hook_resid_post"}, 1, 1),
        ({"hook_name": "blocks.0.hook_resid_post"}, 0, 0),
        ({"hook_name": "blocks.1.hook_resid_pre"}, 0, 0),
        ({"hook_name": "blocks.0.hook_resid_pre"}, "blocks.0.hook_resid_pre", "model.layers.0.input"),
        ({"hook_name": "model.layers.1"}, "model.layers.1", 1),
        ({"hook_name": "blocks.0.hook_mlp_out"}, "blocks.0.hook_mlp_out", "model.layers.0.mlp"),
        ({"hook_name": "blocks.0.hook_attn_out"}, "blocks.0.hook_attn_out", "model.layers.0.self_attn"),
        ({"hook_name": "blocks.0.attn.hook_z"}, "blocks.0.attn.hook_z", "model.layers.0.self_attn.o_proj.input"),
        ({"hook_name": "x", "hook_point": "model.layers.0.mlp"}, "model.layers.0.mlp", "model.layers.0.mlp"),
    ],
)
def test_the_hook_point_of_an_sae(model, said, layer, at):
    sae = SAE(InferenceConfig(model.width, 4))
    sae.cfg.metadata.update(said)
    assert saved_hook(said) == layer and model.where(layer) == at
    for asked in (0, 1, "model.layers.0.mlp", "model.layers.0.input"):
        if asked == at:
            assert len(list(checked([sae], model, asked))) == 1
            continue
        place = f"layer {layer}" if "layer" in said else said.get("hook_name")
        with pytest.raises(UserError, match=f"^layer = {asked}: sae was trained on {place}; measure it there$"):
            list(checked([sae], model, asked))


def test_an_sae_without_a_hook_point_that_the_model_knows(model):
    """It is measured where the user says."""
    assert saved_hook({}) is None
    for said in ({}, {"hook_name": "unknown.0"}):
        sae = SAE(InferenceConfig(model.width, 4, metadata=said))
        assert len(list(checked([sae], model, 1))) == 1
    for name in ("blocks.0.ln1.hook_normalized", "blocks.0.hook_resid_mid"):
        with pytest.raises(UserError, match=f"hook = '{name}': not known in tiny; name a module, such as"):
            model.where(name)
    with pytest.raises(UserError, match="layer = 'x': must be a whole number, in an SAE's metadata"):
        saved_hook({"layer": "x"})


@pytest.mark.parametrize("wrong", [torch.zeros(3, 4), torch.zeros(4, dtype=torch.long), torch.zeros(0, 4).long()])
def test_contexts_that_are_none(wrong):
    with pytest.raises(UserError, match=r"must be token ids \[n, L\], at least one context of at least 1 token$"):
        check_contexts(wrong)
    with pytest.raises(UserError, match=r"context of at least 2 tokens$"):
        check_contexts(torch.zeros(3, 1, dtype=torch.long), tokens=2)
    check_contexts(torch.zeros(3, 2, dtype=torch.int32), tokens=2)
