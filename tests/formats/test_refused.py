"""Files of other programs that are damaged, hostile, or no SAEs: one line each, with the file and what is wrong."""

import io
import json
import os
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sampled_sae as ss
from sampled_sae.sae import SAE
from tests.formats import foreign
from tests.formats.foreign import FOREIGN, put, weights

D, M = 12, 40
W = weights(D, M)
KINDS = {
    "saelens jumprelu": "sae_weights.safetensors",
    "dictionary_learning batchtopk": "ae.pt",
    "sparsify topk": "sae.safetensors",
    "gemma_scope": "params.npz",
    "gemma_scope_2": "params.safetensors",
    "llama_scope": "checkpoints/final.safetensors",
    "qwen_scope": "layer1.sae.pt",
}
"""One of each format, with its file of weights."""


def made(name, tmp_path):
    """The SAE's path, and its file of weights."""
    path = FOREIGN[name](tmp_path, W).path
    return path, path if path.is_file() else path / KINDS[name]


def refusal(path, **settings) -> str:
    with pytest.raises(ss.UserError) as error:
        SAE.load(path, **settings)
    line = str(error.value)
    assert "\n" not in line and len(line) < 700
    return line


def edited(file, **changes):
    """Change tensors of a file; None removes one."""
    read = {".npz": lambda: {k: torch.from_numpy(v) for k, v in np.load(file).items()}, ".pt": lambda: torch.load(file)}
    content = read.get(file.suffix, lambda: load_file(file))() | changes
    put(file, {name: value for name, value in content.items() if value is not None})


@pytest.mark.parametrize("name", KINDS)
def test_a_truncated_file(name, tmp_path):
    path, file = made(name, tmp_path)
    whole = file.read_bytes()
    for length in (0, 5, len(whole) // 2, len(whole) - 10):
        file.write_bytes(whole[:length])
        assert f"{file}: missing or damaged" in refusal(path)


FIRST = {"gemma_scope_2": "w_enc", "gemma_scope": "W_enc", "qwen_scope": "W_enc", "saelens jumprelu": "W_enc"}


@pytest.mark.parametrize("name", KINDS)
def test_tensors_that_do_not_fit(name, tmp_path):
    path, file = made(name, tmp_path)
    first, whole = FIRST.get(name, "encoder.weight"), file.read_bytes()
    second = "encoder.bias" if first == "encoder.weight" else "b_enc"
    edited(file, **{second: None})
    assert f"{file}: {second} is missing; there are" in refusal(path)
    file.write_bytes(whole)
    edited(file, **{second: torch.zeros(M - 1)})
    assert f"{file}: {second} has shape (39,): must be (40,)" in refusal(path)
    file.write_bytes(whole)
    edited(file, **{second: torch.zeros(M).index_fill(0, torch.tensor([3]), torch.nan)})
    assert f"{file}: {second} has entries that are nan or infinite" in refusal(path)
    file.write_bytes(whole)
    edited(file, **{second: torch.zeros(M, dtype=torch.int32)})
    assert f"{file}: {second} is not a plain tensor of floats (torch.int32" in refusal(path)
    file.write_bytes(whole)
    edited(file, **{first: torch.zeros(3)})
    assert f"{file}: {first} has shape (3,): must be " in refusal(path)
    edited(file, **{first: None})
    assert first in refusal(path)


class Code:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch was-run",)


@pytest.mark.parametrize("name", ["dictionary_learning batchtopk", "qwen_scope"])
def test_code_in_a_pickle_is_not_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, file = made(name, tmp_path)
    torch.save({"W_enc": Code()}, file)
    assert refusal(path) == f"{file}: holds code or objects; only plain tensors are loaded"
    assert not (tmp_path / "was-run").exists()
    torch.save([torch.zeros(3)], file)
    assert refusal(path) == f"{file}: holds a list: must be a dictionary of tensors"


def test_a_view_that_claims_to_be_larger_than_the_file(tmp_path):
    path, file = made("qwen_scope", tmp_path)
    edited(file, W_enc=torch.zeros(1).expand(10**6, 10**6))
    line = refusal(path)
    assert "W_enc is not a plain tensor of floats" in line or "must be" in line


def test_objects_in_an_npz_archive(tmp_path):
    path, file = made("gemma_scope", tmp_path)
    np.savez(file, W_enc=np.array([Code()], object))
    assert refusal(path) == (
        f"{file}: missing or damaged (W_enc.npy holds Python objects; only plain arrays are loaded)"
    )


def test_an_array_whose_header_lies(tmp_path):
    path, file = made("gemma_scope", tmp_path)
    entry = io.BytesIO()
    np.lib.format.write_array_header_1_0(entry, {"descr": "<f4", "fortran_order": False, "shape": (10**7, 10**7)})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("W_enc.npy", entry.getvalue() + bytes(64))
    assert "its header says 400000000000" in refusal(path)


@pytest.mark.parametrize("name", ["saelens jumprelu", "sparsify topk", "gemma_scope_2", "llama_scope"])
def test_a_safetensors_header_that_lies(name, tmp_path):
    path, file = made(name, tmp_path)
    whole = file.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    for field, value in (("shape", [10**6, 10**6]), ("data_offsets", [0, 10**12]), ("dtype", "F64")):
        header = json.loads(whole[8 : 8 + size])
        header[next(iter(header))][field] = value
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
        assert f"{file}: missing or damaged" in refusal(path)
    file.write_bytes(struct.pack("<Q", 2**62) + whole[8:])
    assert f"{file}: missing or damaged" in refusal(path)


@pytest.mark.parametrize(
    "build, line",
    [
        (lambda root: foreign.sparsify(root, W, transcode=True), "transcode = true: a transcoder; only SAEs"),
        (lambda root: foreign.sparsify(root, W, skip_connection=True), "skip_connection = true: a skip transcoder"),
        (lambda root: foreign.sparsify(root, W, signed=True), "signed = true: an SAE with negative codes"),
        (lambda root: foreign.sparsify(root, W, activation="relu"), "activation = 'relu': unknown"),
        (lambda root: foreign.sparsify(root, W, "groupmax", k=7), "k = 7: must divide the number of latents, 40"),
        (lambda root: foreign.saelens(root, W, "skip_transcoder"), "architecture = 'skip_transcoder': only 'gated'"),
        (lambda root: foreign.saelens(root, W, "crosscoder"), "architecture = 'crosscoder': only 'gated'"),
        (lambda root: foreign.saelens(root, W, "standard", True, activation_fn="tanh-relu"), "fn = 'tanh-relu': only"),
        (lambda root: foreign.gemma_scope_2(root, W, type="transcoder"), "a transcoder; only SAEs can be loaded"),
        (lambda root: foreign.gemma_scope_2(root, W, type="crosscoder"), "a crosscoder; only SAEs can be loaded"),
        (lambda root: foreign.gemma_scope_2(root, W, type="clt"), "a cross-layer transcoder (CLT); only SAEs"),
        (lambda root: foreign.gemma_scope_2(root, W, affine_connection=True), "a skip transcoder; only SAEs"),
        (lambda root: foreign.gemma_scope_2(root, W, hf_hook_point_out="x"), "a transcoder; only SAEs can be loaded"),
        (lambda root: foreign.gemma_scope_2(root, W, architecture="topk"), "'topk': must be 'jump_relu'"),
        (lambda root: foreign.gemma_scope(root / "transcoders", W), "a transcoder; only SAEs can be loaded"),
        (
            lambda root: foreign.llama_scope(root, W, hook_point_out="blocks.1.hook_mlp_out"),
            "'blocks.1.hook_mlp_out': a tr",
        ),
        (lambda root: foreign.llama_scope(root, W, act_fn="gelu"), "act_fn = 'gelu': must be one of"),
        (
            lambda root: foreign.llama_scope(root, W, norm_activation="token-wise"),
            "norm_activation = 'token-wise': must",
        ),
        (lambda root: foreign.llama_scope(root, W, use_glu_encoder=True), "an encoder with gates cannot be loaded"),
        (lambda root: foreign.llama_scope(root, W, dataset_average_activation_norm={}), "{}: must have `in`"),
        (lambda root: foreign.llama_scope(root, W, norm=-1.0), "norm.in = -1.0: must be a positive number"),
    ],
)
def test_other_kinds_are_named(build, line, tmp_path):
    assert line in refusal(build(tmp_path).path)


@pytest.mark.parametrize(
    "fields, line",
    [
        ({"name": "CrossCoder"}, "dict_class = 'CrossCoder': must be one of AutoEncoder, "),
        ({"name": "IdentityDict"}, "dict_class = 'IdentityDict': must be one of AutoEncoder, "),
        ({"name": "AutoEncoderTopK", "k": None}, "k = None: must be a number for 'topk' SAEs"),
        ({"name": "AutoEncoderTopK", "k": -3}, "k = -3: must be at least 1"),
        ({"name": "AutoEncoderTopK", "activation_dim": "12"}, "activation_dim = '12': must be a whole number"),
        ({"name": "AutoEncoderTopK", "dict_size": None}, "dict_size: is missing"),
        ({"name": "AutoEncoderTopK", "dict_size": 41}, "encoder.weight has shape (40, 12): must be (41, 12)"),
        ({"name": "MatryoshkaBatchTopKSAE", "group_sizes": [10, 20]}, "prefixes = (10, 30): must be ascending widths"),
    ],
)
def test_settings_of_dictionary_learning(fields, line, tmp_path):
    state = foreign.linear(W) | {"b_dec": W.c} | foreign.counts(0.5)
    assert line in refusal(foreign.dictionary_learning(tmp_path, W, state=state, **fields))


def test_missing_or_damaged_settings(tmp_path):
    for name, file in (("dictionary_learning topk", "config.json"), ("llama_scope", "hyperparams.json")):
        path = FOREIGN[name](tmp_path / name, W).path
        (path / file).write_text("{")
        assert f"{path / file}: not valid JSON" in refusal(path)
        (path / file).write_text("[1]")
        assert f"{path / file}: holds [1]: must be an object with named fields" in refusal(path)
    path = FOREIGN["dictionary_learning topk"](tmp_path / "x", W).path
    (path / "config.json").unlink()
    assert refusal(path) == f"{path / 'config.json'}: no such file"


def test_formats_that_cannot_be_written(tmp_path):
    sae = SAE.load(FOREIGN["gemma_scope"](tmp_path, W).path)
    with pytest.raises(ss.UserError, match=r"format = 'gemma_scope': can be read, but not written; these can be"):
        sae.save(tmp_path / "other", format="gemma_scope")
    assert not (tmp_path / "other").exists()
