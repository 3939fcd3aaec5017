"""Flags that nothing uses are refused, and what is odd about a run is said."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import sampled_sae as ss
from sampled_sae import cli
from sampled_sae.cli import load, parse
from sampled_sae.method.config import Released

SIZE = ("--latents", 48, "--k", 4)
SHORT = ("--steps", 5, "--batch-size", 200, "--device", "cpu")


@pytest.fixture
def acts(tmp_path, activations) -> Path:
    np.save(tmp_path / "acts.npy", activations.numpy())
    return tmp_path / "acts.npy"


def train(*words) -> None:
    cli.main(["train", *map(str, words)])


def refusal(capsys, *words) -> str:
    with pytest.raises(SystemExit) as stop:
        train(*words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and len(error.splitlines()) == 1
    return error.strip().removeprefix("error: ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--scores", "entropy"), "--scores: is a parameter of the method now; write --methods sampled:score="),
        (("--l", 30), "--l: is a parameter of the method now; write --methods sampled:l="),
        (("--methods", "topk:l=3"), "methods = 'topk:l=3': 'l=3': must be parameter=value"),
        (("--methods", "sampled:fraction=0.2"), "methods = 'sampled:fraction=0.2': 'fraction=0.2': must be"),
        (("--text", "stdlib"), "--text stdlib is not used with the activations in "),
        (("--layer", 3, 4), "--layer 3 4 is not used with the activations in "),
        (("--context", 64), "--source.context 64 is not used with the activations in "),
        (("--buffer-tokens", 4096), "--source.buffer-tokens 4096 is not used with the activations in "),
        (("--bos",), "--source.bos is not used with the activations in "),
        (("--key", "a"), "--key a is not used with "),
        (("--batch-size", 0), "batch_size = 0: must be at least 1"),
    ],
)
def test_a_flag_that_nothing_uses_is_an_error(words, line, acts, tmp_path, capsys):
    assert refusal(capsys, acts, "--out", tmp_path / "run", *SIZE, *SHORT, *words).startswith(line)
    assert not (tmp_path / "run").exists()


def test_a_file_of_configurations_leaves_nothing_to_flags(acts, tmp_path, capsys):
    file = tmp_path / "c.json"
    file.write_text(json.dumps([ss.sampled(32, 2).to_dict()]))
    words = (acts, "--out", tmp_path / "run", *SHORT, "--configs", file)
    for flag, value in (
        ("--d-sae", 64),
        ("--k", 3),
        ("--optimizer.lr", 2e-3),
        ("--methods", "topk"),
        ("--auxk.dead-after", 5),
        ("--threshold.beta", 0.5),
    ):
        assert refusal(capsys, *words, flag, value).startswith(f"{flag} {value} is not used with --configs {file}")
    assert refusal(capsys, *words, "--seeds", 1, 2).startswith(f"--seeds 1 2 is not used with --configs {file}")
    train(*words, "--seeds", 3)
    assert capsys.readouterr().out.strip().endswith("l2-l5-s3")


def test_a_models_run_has_no_key(tmp_path, capsys):
    words = ("--model", "m", "--text", "t", "--layer", 1, "--out", tmp_path / "run", *SHORT, "--key", "a")
    assert refusal(capsys, *words) == "--key a is not used with --model: it is for a file of activations"


def test_settings_of_an_evaluation_that_is_not_asked_for(tmp_path, capsys):
    for words, line in (
        (("--probing.k", 1), "probing.k: is not used, because probing is not among --evals core"),
        (
            ("--evals", "probing", "--contexts", 3),
            "core.contexts: is not used, because core is not among --evals probing",
        ),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(["eval", str(tmp_path), "--text", "stdlib", *map(str, words)])
        assert stop.value.code == 2 and capsys.readouterr().err == f"error: {line}\n"


def test_a_method_carries_its_own_settings(acts, tmp_path, capsys, activations):
    save_file({"a": activations.numpy(), "b": activations.numpy()}, tmp_path / "x.safetensors")
    methods = ("--methods", "batchtopk", "sampled:l=2,score=l2", "annealed:score=l2,fraction=0.5,until=0.5")
    source = (tmp_path / "x.safetensors", "--key", "a", "--heldout-tokens", 100)
    train(*source, "--out", tmp_path / "run", *SIZE, *SHORT, *methods)
    assert len(capsys.readouterr().out.split()) == 3


def test_presets_go_on_with_what_is_overridden(acts, tmp_path):
    for overrides in (("--methods", "batchtopk"), ("--methods", "sampled:l=5"), ("--latents", 4096, "--lr", 1e-3)):
        words = ("--out", tmp_path, "--preset", "paper", *overrides)
        command = parse(load("train"), [*map(str, words)], "sampled-sae train")
        command.refuse_unused()
        assert command.sae_configs()
    words = [str(acts), "--out", str(tmp_path), "--preset", "paper"]  # the file replaces the preset's model
    parse(load("train"), words, "sampled-sae train").refuse_unused()


def test_a_pool_of_all_latents_is_told(acts, tmp_path, capsys):
    words = ("--methods", "sampled:l=2/12/1000", "--seeds", 0, 1)
    train(acts, "--out", tmp_path / "run", *SIZE, *SHORT, *words)
    said = [line for line in capsys.readouterr().err.splitlines() if "pool holds all latents" in line]
    assert said == [f"l2-{l}: its pool holds all latents, so it is BatchTopK" for l in ("l12", "l1000")]


def test_settings_of_a_pool_without_a_size_are_told(activations, capsys):
    configs = [
        ss.SAEConfig(48, 4, pool=ss.PoolConfig("entropy", memory=0.9)),
        ss.SAEConfig(48, 4, pool=ss.PoolConfig(schedule=Released(0.5))),
        *(ss.batchtopk(48, 4), ss.topk(48, 4), ss.sampled(48, 4, "entropy"), ss.jumprelu(48, 4)),
    ]
    ss.train(activations, configs, steps=1, batch_size=200, device="cpu")
    said = [line for line in capsys.readouterr().err.splitlines() if "effect" in line]
    assert said == [
        "batchtopk-memory0.9: without pool.size, pool.score and pool.memory cannot have an effect",
        "batchtopk-released50: without pool.size, pool.schedule cannot have an effect",
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--log-to", "wandb"), "log_to = 'wandb': there is no API key; run wandb login, or set WANDB_MODE=offline"),
        (("--methods", "topk:k=99"), "k = 99: must be at most d_sae = 48"),
        (("--tokens", 5), "steps = 5, tokens = 5: give one of the two"),
        (("--checkpoint-every", 0), "checkpoint_every = 0: must be at least 1"),
        ((), "holds a run already; resume"),
    ],
)
def test_errors_that_need_no_model_come_before_it_is_loaded(words, line, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # without a login
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run").mkdir()
    if not words:
        (tmp_path / "run" / "run.json").write_text("{}")
    source = ("--model", "no/such-model", "--text", "stdlib", "--layer", 1)  # loading it would be another error
    assert line in refusal(capsys, *source, "--out", tmp_path / "run", *SIZE, *SHORT, *words)


def test_version(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"sampled-sae {ss.__version__}\n"
    assert ss.__version__
