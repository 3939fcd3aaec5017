"""Hook points by SAELens's names, in the common families."""

import pytest
import torch

from sampled_sae.hooks import Decoder
from sampled_sae.models.language_model import LanguageModel
from tests.models.tiny_models import WORDS, make_model

NAMES = ("blocks.1.hook_attn_out", "blocks.1.hook_mlp_out")


@pytest.mark.parametrize(
    ("family", "added", "z"),
    [
        ("llama", ("model.layers.1.self_attn", "model.layers.1.mlp"), "model.layers.1.self_attn.o_proj"),
        ("gpt2", ("transformer.h.1.attn", "transformer.h.1.mlp"), "transformer.h.1.attn.c_proj"),
        ("gpt_neox", ("gpt_neox.layers.1.attention", "gpt_neox.layers.1.mlp"), "gpt_neox.layers.1.attention.dense"),
        (
            "gemma2",
            ("model.layers.1.post_attention_layernorm", "model.layers.1.post_feedforward_layernorm"),
            "model.layers.1.self_attn.o_proj",
        ),
    ],
)
@torch.no_grad()
def test_what_a_block_adds(family, added, z):
    """The residual stream after a block is the one before it, and what attention and MLP add."""
    lm = LanguageModel(make_model(family).double(), None, "tiny")
    assert tuple(lm.hook_point(name).name for name in NAMES) == added
    assert lm.hook_point("blocks.1.attn.hook_z").name == f"{z}.input"
    tokens = torch.randint(0, len(WORDS), (2, 6), generator=torch.Generator().manual_seed(0))
    before, after = "blocks.1.hook_resid_pre", "blocks.1.hook_resid_post"
    found = lm.activations(tokens, [before, after, *NAMES])
    torch.testing.assert_close(found[before] + found[NAMES[0]] + found[NAMES[1]], found[after])
    assert all(lm.writes_to_residual(at) for at in (before, after, *NAMES))
    assert not lm.writes_to_residual("blocks.1.attn.hook_z")


def test_a_model_of_transformers_as_it_is():
    model = make_model("llama")
    assert Decoder.of(model).where("model.layers.2") == 2
    assert Decoder.of(model).where("layer-1") == 1
