from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sampled_sae.hooks import find_blocks
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.errors import UserError
from tests.models.tiny_models import CONTEXT, WIDTH, WORDS, make_model, make_tokenizer


@pytest.fixture
def lm() -> LanguageModel:
    return LanguageModel(make_model("llama"), None, "tiny")


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, len(WORDS), (4, 12), generator=torch.Generator().manual_seed(1))


def test_nothing_behind_the_last_layer_is_computed(lm, tokens):
    called = []
    for name, module in [*enumerate(lm.blocks), ("head", lm.model.lm_head), ("norm", lm.model.model.norm)]:
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    lm.activations(tokens, [1, 0])
    assert called == [0, 1]


def test_results_are_plain_tensors_without_gradients(lm, tokens):
    stream = lm.activations(tokens, [1])[1]
    assert not stream.requires_grad
    assert not stream.is_inference()
    weight = torch.ones(WIDTH, requires_grad=True)
    (stream @ weight).sum().backward()
    assert weight.grad is not None


def test_a_failed_pass_leaves_no_hook_behind(lm, tokens):
    before = lm.logits(tokens)

    def fail(stream: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        lm.logits_with(tokens, 1, fail)
    assert torch.equal(lm.logits(tokens), before)
    assert not any(block._forward_hooks for block in lm.blocks)


class Tuples(nn.Module):
    """A model whose blocks give tuples, change the stream in place and hold lists of their own."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, stream):
            return stream.add_(1), "attention"

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(text_config=SimpleNamespace(num_hidden_layers=2, hidden_size=4))
        self.embedding = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList([self.Block(), self.Block()])
        self.eyes = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])

    def get_decoder(self):
        return None

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        stream = self.embedding(input_ids)
        for block in self.blocks:
            stream, attention = block(stream)
            assert attention == "attention"
        return SimpleNamespace(logits=stream)


def test_blocks_that_give_tuples_and_work_in_place(tokens):
    lm = LanguageModel(Tuples(), None, "tuples")
    tokens = tokens % 9
    found = lm.activations(tokens, [0, 1])
    embedded = lm.model.embedding(tokens)
    assert torch.equal(found[0], embedded + 1)
    assert torch.equal(found[1], embedded + 1 + 1)
    assert torch.equal(lm.logits_with(tokens, 0, torch.zeros_like), torch.ones_like(embedded))
    assert lm.hook_point(0).module == "blocks.0"


@pytest.mark.parametrize(
    ("layer", "message"),
    [(3, "has 3 layers, 0 to 2"), (-1, "layer = -1: .* has 3 layers"), (1.5, "layer = 1.5: must be a whole number")],
)
def test_a_layer_out_of_range(lm, tokens, layer, message):
    for use in (lm.hook_point, lm.saelens_hook_name, lambda layer: lm.activations(tokens, [0, layer])):
        with pytest.raises(UserError, match=message):
            use(layer)
    with pytest.raises(UserError, match=message):
        lm.logits_with(tokens, layer, torch.clone)


@pytest.mark.parametrize("bos", [False, True])
def test_activations_of_a_text(bos):
    lm = LanguageModel(make_model("llama"), make_tokenizer(), "tiny", bos=bos)
    ids = lm.tokenizer("the cat", add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([[lm.tokenizer.bos_token_id] * bos + ids])
    assert torch.equal(lm.activations("the cat", [1])[1], lm.activations(tokens, [1])[1])


def test_calls_that_make_no_sense(lm, tokens):
    cases = [
        (lambda: lm.activations(tokens, []), "must name at least one layer"),
        (lambda: lm.activations(tokens, 0), "hooks = 0: must be a list, such as [0]"),
        (lambda: lm.activations(tokens[0], [0]), "must be whole numbers [n, L]"),
        (lambda: lm.activations(tokens.float(), [0]), "must be whole numbers [n, L]"),
        (lambda: lm.activations(tokens + len(WORDS), [0]), "another model's tokenizer"),
        (lambda: lm.logits(tokens.repeat(1, 6)), f"context = 72: {lm.name} reads at most {CONTEXT} tokens"),
        (lambda: lm.logits_with(tokens, 0, lambda h: h[0]), "replace gave (12, 16): must keep"),
    ]
    for call, message in cases:
        with pytest.raises(UserError) as caught:
            call()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_out_of_memory_says_what_to_lower(lm, tokens, monkeypatch):
    def full(**_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmuch")

    monkeypatch.setattr(lm.model, "forward", full)
    with pytest.raises(UserError, match="out of memory on cpu with 4 sequences of 12 tokens at once: lower the number"):
        lm.activations(tokens, [0])


def test_blocks_that_cannot_be_told():
    model = Tuples()
    model.eyes = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    with pytest.raises(UserError, match="exactly one list of 2 modules was expected, found: blocks, eyes"):
        find_blocks(model, "two")
    model.config.text_config.num_hidden_layers = 5
    with pytest.raises(UserError, match="exactly one list of 5 modules was expected, found: none"):
        find_blocks(model, "none")


def test_passes_of_two_threads_do_not_see_each_other(lm, tokens):
    """As when a harvest reads ahead while an evaluation begins."""
    plain = lm.activations(tokens, [1])[1]
    changed = lm.logits_with(tokens, 0, lambda stream: stream + 1)
    with ThreadPoolExecutor(2) as threads:
        read = [threads.submit(lm.activations, tokens, [1]) for _ in range(40)]
        put_in = [threads.submit(lm.logits_with, tokens, 0, lambda stream: stream + 1) for _ in range(40)]
    assert all(torch.equal(done.result()[1], plain) for done in read)
    assert all(torch.equal(done.result(), changed) for done in put_in)


# ---- hook points ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "module", "side", "layer", "name"),
    [
        (1, "model.layers.1", "output", 1, "layer-1"),
        ("model.layers.1", "model.layers.1", "output", 1, "layer-1"),
        ("layer-1", "model.layers.1", "output", 1, "layer-1"),
        ("blocks.1.hook_resid_post", "model.layers.1", "output", 1, "layer-1"),
        ("blocks.1.hook_resid_pre", "model.layers.1", "input", None, "model.layers.1.input"),
        ("model.layers.1.input", "model.layers.1", "input", None, "model.layers.1.input"),
        ("model.layers.1.mlp", "model.layers.1.mlp", "output", None, "model.layers.1.mlp"),
        ("model.layers.1.mlp.output", "model.layers.1.mlp", "output", None, "model.layers.1.mlp"),
        ("model.layers.1.self_attn.input", "model.layers.1.self_attn", "input", None, "model.layers.1.self_attn.input"),
    ],
)
def test_names_of_hook_points(lm, at, module, side, layer, name):
    point = lm.hook_point(at)
    assert (point.module, point.side, point.layer, point.name) == (module, side, layer, name)
    assert lm.hook_point(point) == lm.hook_point(point.name) == point


def test_saelens_names(lm):
    names = [lm.saelens_hook_name(at) for at in (1, "model.layers.1.input", "model.layers.1.mlp")]
    assert names == ["blocks.1.hook_resid_post", "blocks.1.hook_resid_pre", "model.layers.1.mlp"]


def test_a_hook_that_does_not_exist_lists_the_nearest(lm):
    for name in ("model.layers.1.mpl", "model.layer.1.mlp", "model.layers.1.mlp.inputs"):
        with pytest.raises(
            UserError, match=rf"hook = '{name}': tiny has no such module; the nearest are .*1\.mlp"
        ) as e:
            lm.hook_point(name)
        assert "\n" not in str(e.value)


def test_inputs_and_outputs_of_modules_are_captured_together(lm, tokens):
    hooks = ["model.layers.1.input", "model.layers.1.self_attn", "model.layers.1.mlp.input", "model.layers.1.mlp", 0, 1]
    found = lm.activations(tokens, hooks)
    before, attention, into, out, zero, one = (found[hook] for hook in hooks)
    assert torch.equal(before, zero)
    block = lm.blocks[1]
    assert torch.allclose(into, block.post_attention_layernorm(before + attention), atol=1e-6)
    assert torch.allclose(out, block.mlp(into), atol=1e-6)
    assert torch.allclose(one, before + attention + out, atol=1e-6)
    inner = lm.activations(tokens, ["model.layers.1.mlp.down_proj.input"])["model.layers.1.mlp.down_proj.input"]
    assert lm.width_at("model.layers.1.mlp.down_proj.input") == inner.shape[-1] != WIDTH


@pytest.mark.parametrize("at", ["model.layers.1.input", "model.layers.1.self_attn", "model.layers.1.self_attn.input"])
def test_replacing_at_any_hook_point(lm, tokens, at):
    plain = lm.logits(tokens)
    assert torch.equal(lm.logits_with(tokens, at, torch.clone), plain)
    assert not torch.allclose(lm.logits_with(tokens, at, torch.zeros_like), plain)


def test_replacing_the_input_of_a_block_is_replacing_the_output_of_the_one_before(lm, tokens):
    a, b = (lm.logits_with(tokens, at, lambda h: 2 * h) for at in ("model.layers.1.input", 0))
    assert torch.equal(a, b)


def test_a_module_that_gives_no_activations(lm, tokens):
    with pytest.raises(UserError, match=r"model\.rotary_emb does not give activations of shape"):
        lm.activations(tokens, ["model.rotary_emb"])
    lm.model.spare = nn.Linear(2, 2)
    with pytest.raises(UserError, match="hook = 'spare': tiny does not run this module"):
        lm.activations(tokens, ["spare"])
