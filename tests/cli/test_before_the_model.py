"""Errors that need no language model come before its weights are read."""

import io

import pytest
import torch

import sampled_sae as ss
from sampled_sae import cli
from sampled_sae.models import load
from tests.models.tiny_models import make_model, save


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, a text, and an SAE of layer 1."""
    place = tmp_path_factory.mktemp("place")
    save(make_model("llama"), place / "model")
    (place / "text.txt").write_text("the other thing " * 200)
    (place / "file").touch()
    for name, layer in (("sae", 1), ("deep", 9)):
        metadata = {"model_name": str(place / "model"), "layer": layer, "context_size": 16}
        sae = ss.SAE(ss.InferenceConfig(16, 32, k=4, metadata=metadata), torch.float32)
        sae.save(place / name)
    return place


@pytest.fixture(autouse=True)
def never_loaded(monkeypatch):
    def read(*arguments):
        raise AssertionError("the weights are read")

    monkeypatch.setattr(load, "_read_weights", read)


TRAIN = [
    "train",
    "--model",
    "model",
    "--layer",
    "1",
    "--context",
    "16",
    "--steps",
    "4",
    "--batch-size",
    "32",
    "--d-sae",
]
TRAIN += ["32", "--k", "4", "--device", "cpu", "--heldout-tokens", "32"]
CACHE = ["cache", "--model", "model", "--layer", "1", "--context", "16", "--text", "text.txt", "--device", "cpu"]
EVAL, BROWSE = ["eval", "--device", "cpu"], ["browse", "sae", "--text", "text.txt", "--device", "cpu"]
CASES = [
    ([*TRAIN, "--text", "none.txt", "--out", "new"], "text = 'none.txt': no such file or folder"),
    ([*TRAIN, "--text", "text.txt", "--out", "file/new"], "file/new: cannot write there (Not a directory)"),
    ([*TRAIN, "--text", "text.txt", "--out", "new", "--layer", "3"], "layer = 3: model has 3 layers, 0 to 2"),
    ([*TRAIN, "--text", "text.txt", "--out", "new", "--methods", "x"], "methods = 'x'"),
    ([*TRAIN, "--text", "text.txt", "--out", "new", "--context", "0"], "context = 0: a context must have at least 2"),
    ([*TRAIN, "--text", "text.txt", "--out", "new", "--device", "cuda:7"], "device = 'cuda:7': cannot be used"),
    ([*TRAIN, "--text", "text.txt", "--out", "new", "--log-to", "wandb"], "log_to = 'wandb': "),
    (["train", "--steps", "4", "--out", "new"], "model: is missing; give a file of"),
    (["cache", "--tokens", "9", "--out", "new"], "model: is missing; give model, text and layer"),
    ([*CACHE, "--tokens", "0", "--out", "new"], "tokens = 0: must be at least 1"),
    ([*CACHE, "--tokens", "9", "--out", "new", "--shard-tokens", "0"], "shard_tokens = 0: must be at least 1"),
    ([*CACHE, "--tokens", "9", "--out", "new", "--heldout-tokens", "0"], "heldout_tokens = 0: must be at least 1"),
    ([*CACHE, "--tokens", "9", "--out", "file/new"], "file/new: cannot write there (Not a directory)"),
    ([*EVAL, "sae"], "text: is missing; core reads one"),
    ([*EVAL, "sae", "--text", "none.txt"], "text = 'none.txt': no such file or folder"),
    ([*EVAL, "sae", "--evals", "x", "--text", "text.txt"], "evals = 'x': must be among core"),
    ([*EVAL, "deep", "--text", "text.txt"], "layer = 9: "),
    ([*EVAL, "sae", "--text", "text.txt", "--out", "file/new"], "file/new: cannot write there (Not a directory)"),
    (
        [*EVAL, "sae", "--evals", "absorption", "--absorption.max-words", "40"],
        "max_words = 40: gives 32 to train and 8",
    ),
    ([*EVAL, "sae", "--evals", "probing", "--probing.datasets", "n.csv"], "datasets = 'n.csv': no such file"),
    (
        [*EVAL, "sae", "--evals", "autointerp", "--text", "text.txt", "--autointerp.judge", "chat"],
        "OPENAI_API_KEY is not set",
    ),
    ([*BROWSE, "--out", "file/new"], "file/new: cannot write there (Not a directory)"),
    ([*BROWSE, "--out", "new", "--compare", "none"], "none"),
    ([*BROWSE, "--out", "new", "--serve", "--port", "99999"], "port = 99999: cannot be used ("),
    ([*BROWSE, "--out", "new", "--port", "8009"], "port = 8009: has no effect without --serve"),
    (["browse", "deep", "--text", "text.txt", "--out", "new", "--device", "cpu"], "layer = 9: "),
]


@pytest.mark.parametrize("words, line", CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_errors_before_the_model(words, line, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for name in ("OPENAI_API_KEY", "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setattr("sys.stdin", io.StringIO())  # no terminal to ask for a key
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    error = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and error[-1].startswith(f"error: {line}"), error
    assert not (place / "new").exists()
