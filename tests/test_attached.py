"""A model that runs with an SAE in place: at any hook point, with changed latents, while it generates."""

import pytest
import torch

import sampled_sae as ss
from sampled_sae.browser.collect import unembedding
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from tests.models.tiny_models import WIDTH, WORDS, make_model, make_tokenizer

M = 24
HOOKS = [1, "model.layers.1.mlp", "model.layers.1.self_attn", "model.layers.1.input", "blocks.1.hook_mlp_out"]


def make_sae(architecture: str = "jumprelu", **metadata) -> SAE:
    generator = torch.Generator().manual_seed(0)
    sae = SAE(InferenceConfig(WIDTH, M, architecture, k=3, metadata=metadata))
    for tensor in (sae.W_enc, sae.W_dec, sae.b_enc, sae.b_dec):
        tensor.data = torch.randn(tensor.shape, generator=generator)
    return sae


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return ss.load_model((make_model("llama"), make_tokenizer()), "cpu")


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, len(WORDS), (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("hook", HOOKS)
@torch.no_grad()
def test_changed_codes_at_any_hook_point(lm, tokens, hook):
    sae, before = make_sae(hook_name=hook) if isinstance(hook, str) else make_sae(layer=hook), lm.logits(tokens)

    def edited(x, keep_error):
        codes = sae.encode(x)
        new = codes.clone()
        new[..., 17], new[..., 3] = 0, 2.5
        new[..., 4] += 5.0
        return sae.decode(new) + (x - sae.decode(codes) if keep_error else 0)

    for keep_error in (True, False):
        wanted = lm.logits_with(tokens, hook, lambda x, keep=keep_error: edited(x, keep))
        with sae.attached(lm, ablate=[17], steer={4: 5.0}, clamp={3: 2.5}, keep_error=keep_error):
            torch.testing.assert_close(lm.logits(tokens), wanted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(wanted, before, atol=1e-2)
    assert torch.equal(lm.logits(tokens), before)
    with sae.attached(lm):
        assert torch.equal(lm.logits(tokens), before)
    wanted = lm.logits_with(tokens, hook, sae)
    with sae.attached(lm, keep_error=False):
        torch.testing.assert_close(lm.logits(tokens), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_architectures_whose_codes_depend_on_each_other(lm, tokens):
    sae = make_sae("topk", layer=1)

    def edited(x):
        codes = sae.encode(x)
        return x - codes[..., 17:18] * sae.W_dec[17]

    wanted = lm.logits_with(tokens, 1, edited)
    with sae.attached(lm, ablate=[17]):
        torch.testing.assert_close(lm.logits(tokens), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_generating_with_a_cache(tokens):
    model, sae = make_model("llama"), make_sae(layer=1)
    lengths: list[int] = []
    model.model.layers[1].register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(tokens)}
    plain = model.generate(tokens, use_cache=True, **settings)
    with sae.attached(model, steer={4: 50.0}, ablate=[2]) as same:
        assert same is model
        slow = model.generate(tokens, use_cache=False, **settings)
        lengths.clear()
        fast = model.generate(tokens, use_cache=True, **settings)
    assert torch.equal(fast, slow) and not torch.equal(fast, plain)
    assert lengths == [9, 1, 1, 1, 1, 1]


def test_text_generated_by_a_loaded_model(lm):
    sae = make_sae(layer=1)
    plain = lm.generate("the sea", max_new_tokens=5)
    with sae.attached(lm, steer={4: 50.0}):
        steered = lm.generate("the sea", max_new_tokens=5)
    assert steered != plain == lm.generate("the sea", max_new_tokens=5)


def test_the_model_stays_as_the_user_has_it():
    model = make_model("llama")
    assert model.config.use_cache
    ss.load_model((model, make_tokenizer()))
    assert model.config.use_cache


@torch.no_grad()
def test_a_model_spread_over_memory_and_disk(tokens, tmp_path):
    """As accelerate spreads it: weights of some blocks are loaded when they run."""
    accelerate = pytest.importorskip("accelerate")
    whole, model, sae = make_model("llama"), make_model("llama"), make_sae(layer=1)
    places = {"model.embed_tokens": "disk", "model.layers.0": "disk", "model.layers.1": "cpu", "model.layers.2": "disk"}
    places |= {"model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}
    spread = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    assert any(weight.is_meta for weight in spread.parameters())
    lm, reference = (ss.load_model((one, make_tokenizer())) for one in (spread, whole))
    assert lm.device == torch.device("cpu")
    assert torch.equal(lm.activations(tokens, [0, 2])[2], reference.activations(tokens, [0, 2])[2])
    with sae.attached(lm, ablate=[2], keep_error=False), sae.attached(reference, ablate=[2], keep_error=False):
        assert torch.equal(lm.logits(tokens), reference.logits(tokens))
        made, wanted = (one.generate("the sea", max_new_tokens=3) for one in (lm, reference))
    assert made == wanted
    with pytest.raises(UserError, match=r"the last weights of .* are not in memory"):
        unembedding(lm)
    for moved in ({"device": "cpu"}, {"dtype": torch.bfloat16}):
        with pytest.raises(UserError, match="cannot be moved or converted"):
            ss.load_model((spread, make_tokenizer()), **moved)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"ablate": [M]}, f"latent {M}: the SAE has {M} latents, 0 to {M - 1}"),
        ({"ablate": [3], "steer": {3: 1.0}}, "latent 3: must be in one of ablate, steer and clamp"),
        ({"ablate": torch.tensor([3]), "steer": {3: 1.0}}, "latent 3: must be in one of ablate, steer and clamp"),
        ({"ablate": 3}, r"ablate = 3: must be a list of latents, such as \[17\]"),
        ({"ablate": [1.5]}, "ablate: latent 1.5, value 0.0: latents must be whole numbers"),
        ({"steer": [3]}, r"steer = \[3\]: must give values by latent"),
        ({"steer": {3: "a"}}, "steer: latent 3, value 'a': latents must be whole numbers, and their values numbers"),
        ({"clamp": {3: float("nan")}}, "clamp: value of latent 3 = nan: must be finite"),
        ({"hook": "model.layers.1.mpl"}, "has no such module; the nearest are model.layers.1.mlp"),
        ({"hook": "model.layers.1.mlp.gate_proj"}, "has width 24 there; the SAE has width 16"),
        ({"hook": 7}, "layer = 7: tiny has 3 layers, 0 to 2"),
        ({"hook": "blocks.1.hook_resid_mid"}, "hook = 'blocks.1.hook_resid_mid': not known in tiny; name a module"),
    ],
)
def test_errors_are_one_line(tokens, changes, line):
    lm = LanguageModel(make_model("llama"), make_tokenizer(), "tiny")
    with pytest.raises(UserError, match=line), make_sae(layer=1).attached(lm, **changes):
        lm.logits(tokens)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in lm.model.modules())


def test_no_hook_point_another_width_no_model(lm):
    with pytest.raises(UserError, match="hook: is missing, and the SAE does not name its own"), make_sae().attached(lm):
        pass
    wide = SAE(InferenceConfig(8, 4, metadata={"layer": 1}))
    with pytest.raises(UserError, match="the SAE has width 8: must be 16, the width of"), wide.attached(lm):
        pass
    with pytest.raises(UserError, match="model = str: must be a model of"):
        make_sae(layer=1).attached("gpt2").__enter__()


@pytest.mark.parametrize("how", ["layer_norm", "constant_norm_rescale"])
@torch.no_grad()
def test_saes_that_normalize_each_token(lm, tokens, how):
    sae, generator = SAE(InferenceConfig(WIDTH, M, normalize_activations=how)), torch.Generator().manual_seed(0)
    for tensor in sae.parameters():
        tensor.data = torch.randn(tensor.shape, generator=generator)

    def edited(x, keep_error):
        codes = sae.encode(x)
        new = codes.clone()
        new[..., 17], new[..., 4] = 0, new[..., 4] + 5.0
        return sae.decode(new, x) + (x - sae.decode(codes, x) if keep_error else 0)

    for keep_error in (True, False):
        wanted = lm.logits_with(tokens, 1, lambda x, keep=keep_error: edited(x, keep))
        with sae.attached(lm, 1, ablate=[17], steer={4: 5.0}, keep_error=keep_error):
            torch.testing.assert_close(lm.logits(tokens), wanted, rtol=1e-4, atol=1e-4)
