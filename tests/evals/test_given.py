import pytest
import torch

from sampled_sae.evals.reading import check_contexts, checked, own_layer
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
    ("said", "layer"),
    [
        ({"layer": 1}, 1),
        ({"layer": 1, "hook_name": "blocks.1.hook_resid_post"}, 1),
        ({"hook_name": "blocks.0.hook_resid_post"}, 0),
        ({"hook_name": "blocks.1.hook_resid_pre"}, 0),
        ({"hook_name": "blocks.0.hook_resid_pre"}, -1),
        ({"hook_name": "model.layers.3"}, None),
        ({}, None),
    ],
)
def test_the_layer_by_its_number_or_the_hook(model, said, layer):
    sae = SAE(InferenceConfig(model.width, 4))
    sae.cfg.metadata.update(said)
    assert own_layer(said, "sae") == layer
    for asked in (0, 1):
        if layer in (None, asked):
            assert len(list(checked([sae], model, asked))) == 1
            continue
        place = f"layer {layer}" if "layer" in said else said["hook_name"]
        with pytest.raises(UserError, match=f"^layer = {asked}: sae was trained on {place}; measure it there$"):
            list(checked([sae], model, asked))


@pytest.mark.parametrize("hook", ["blocks.0.hook_mlp_out", "blocks.0.attn.hook_z", "blocks.0.ln1.hook_normalized"])
def test_saes_of_other_places(model, hook):
    sae = SAE(InferenceConfig(model.width, 4))
    sae.cfg.metadata.update({"hook_name": hook})
    with pytest.raises(UserError, match=f"sae was trained on {hook}: only SAEs of the residual stream"):
        list(checked([sae], model, 0))
    with pytest.raises(UserError, match=r"sae was trained on model\.layers\.0\.mlp: only SAEs of the residual stream"):
        own_layer({"hook_name": "model.layers.0.mlp", "hook_point": "model.layers.0.mlp"}, "sae")


def test_an_sae_of_another_hook_point_of_ours():
    with pytest.raises(UserError, match=r"sae was trained on model\.layers\.0\.mlp: only SAEs of the residual stream"):
        own_layer({"hook_point": "model.layers.0.mlp", "hook_name": "blocks.0.hook_mlp_out"}, "sae")


@pytest.mark.parametrize("wrong", [torch.zeros(3, 4), torch.zeros(4, dtype=torch.long), torch.zeros(0, 4).long()])
def test_contexts_that_are_none(wrong):
    with pytest.raises(UserError, match=r"must be token ids \[n, L\], at least one context of at least 1 token$"):
        check_contexts(wrong)
    with pytest.raises(UserError, match=r"context of at least 2 tokens$"):
        check_contexts(torch.zeros(3, 1, dtype=torch.long), tokens=2)
    check_contexts(torch.zeros(3, 2, dtype=torch.int32), tokens=2)
