"""GGUF files: what is read of them, and the copies in the format of transformers."""

import struct
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers

from sampled_sae.models import gguf as gguf_files
from sampled_sae.models.gguf import gguf_bos
from sampled_sae.models.llama import Llama
from sampled_sae.models.load import load_model
from sampled_sae.utils.errors import UserError
from tests.models.tiny_models import LAYERS, WORDS, make_model, make_tokenizer, refused, same, save, save_gguf, truth


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def copies(monkeypatch, tmp_path_factory) -> Path:
    """Where converted GGUF files are kept."""
    folder = tmp_path_factory.mktemp("copies")
    monkeypatch.setattr(gguf_files, "COPIES", folder)
    return folder


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    return save_gguf(make_model("llama"), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, len(WORDS), (4, 12), generator=torch.Generator().manual_seed(1))


def kept(copies: Path) -> list[Path]:
    return [each for each in copies.iterdir() if each.is_dir()]


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


@pytest.mark.parametrize("library", ["gguf", "accelerate"])
def test_a_library_missing_for_gguf_is_named(monkeypatch, gguf, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=rf"^{library} is missing; pip install .*\[lm\]'$"):
        load_model(gguf, "cpu")


def test_a_package_that_cannot_be_imported_is_no_damage_of_the_file(monkeypatch, gguf):
    def lazily(*_, **__):
        try:
            raise ImportError("zstandard was built for another Python")
        except ImportError as error:
            raise ModuleNotFoundError("Could not import module 'LlamaForCausalLM'") from error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lazily)
    with pytest.raises(UserError, match=r"needs cannot be imported \(zstandard was built for another Python\)$"):
        load_model(gguf, "cpu")
