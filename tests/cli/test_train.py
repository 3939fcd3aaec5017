"""From a model's name and a text to SAEs, by the command line, on a tiny model saved on the spot."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import sampled_sae as ss
from sampled_sae import cli
from sampled_sae.cli import load, parse
from sampled_sae.cli.train import Train
from tests.models.tiny_models import LAYERS, make_model, make_tokenizer, save

SMALL = ["--context", "20", "--buffer-tokens", "800", "--heldout-tokens", "60", "--batch-size", "50", "--latents", "64"]
SMALL += ["--k", "4", "--device", "cpu", "--tokens", "600"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_model("gpt_neox").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [json.dumps({"text": f"{n} " + " ".join(f"the{n * i % 97}" for i in range(30))}) for n in range(60)]
    file.write_text("\n".join(lines))
    return file


def run(*words) -> None:
    cli.main([str(word) for word in words])


def train(*words) -> None:
    run("train", *words)


def test_one_command_from_a_model_and_a_text(model, text, tmp_path, capsys):
    words = ("--model", model, "--text", text, "--layer", 1, "--out", tmp_path / "run", *SMALL)
    train(*words, "--methods", "batchtopk", "sampled:score=l2/uniform")
    printed = capsys.readouterr()
    folders, lines = printed.out.split(), printed.err.splitlines()
    assert any(line.startswith("batchtopk-s0: held-out FVU 0.") for line in lines), lines
    assert [f.rsplit("/", 1)[1] for f in folders] == ["batchtopk-s0", "l2-l5-s0", "uniform-l5-s0"]
    sae = ss.SAE.load(folders[1])
    assert sae.cfg.metadata["hook_module"] == "gpt_neox.layers.1" and sae.cfg.metadata["context_size"] == 20
    train(*words, "--methods", "batchtopk", "sampled:score=l2/uniform", "--resume")
    assert capsys.readouterr().out.split() == folders


def test_several_layers_in_one_run(model, text, tmp_path, capsys):
    common = ("--model", model, "--text", text, *SMALL)
    train(*common, "--layer", 2, 0, "--out", tmp_path / "both")
    folders = capsys.readouterr().out.split()
    assert [Path(f).relative_to(tmp_path / "both").parts[0] for f in folders] == ["layer-2", "layer-0"]
    train(*common, "--layer", 2, "--out", tmp_path / "one")
    alone, together = ss.SAE.load(capsys.readouterr().out.strip()), ss.SAE.load(folders[0])
    assert alone.cfg.metadata["layer"] == together.cfg.metadata["layer"] == 2
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), together.parameters(), strict=True))
    train(*common, "--layer", 2, 0, "--out", tmp_path / "both", "--resume")
    assert capsys.readouterr().out.split() == folders


def test_a_short_run_harvests_no_more_than_it_trains_on(model, text, tmp_path):
    small = ("--context", 20, "--heldout-tokens", 60, "--batch-size", 50, "--latents", 64, "--k", 4, "--device", "cpu")
    words = ("--model", model, "--text", text, "--layer", 1, *small, "--steps", 3)
    train(*words, "--out", tmp_path / "usual")
    train(*words, "--out", tmp_path / "less", "--buffer-tokens", 100)
    sizes = [
        json.loads((tmp_path / name / "run.json").read_text())["source"]["buffer_tokens"] for name in ("usual", "less")
    ]
    assert sizes == [160, 100]  # 8 contexts hold three batches and 2% more; what is asked for is an upper bound


def test_trained_saes_are_evaluated_once(model, text, tmp_path, capsys):
    words = ("--model", model, "--text", text, "--layer", 1, "--out", tmp_path / "run", *SMALL)
    train(*words, "--methods", "batchtopk", "topk")
    capsys.readouterr()
    run("eval", tmp_path / "run", "--text", text, "--contexts", 3, "--device", "cpu")
    table = capsys.readouterr().out
    assert "batchtopk-s0" in table and "topk-s0" in table and "CE recovered" in table
    file = tmp_path / "run" / "saes" / "topk-s0" / "evals" / "core.json"
    content = json.loads(file.read_text())
    assert content["result"]["contexts"] == 3 and content["result"]["layer"] == 1
    assert 0 < content["result"]["measured"]["fvu"]["value"] < 2
    before = file.stat().st_mtime_ns
    run("eval", tmp_path / "run", "--text", text, "--contexts", 3, "--device", "cpu")
    assert file.stat().st_mtime_ns == before
    run("eval", tmp_path / "run", "--text", text, "--contexts", 2, "--device", "cpu")  # another question
    assert json.loads(file.read_text())["result"]["contexts"] == 2
    for line, bad in (
        ("there is no such folder", ("eval", tmp_path / "nothing", "--text", text)),
        (
            "was trained on this text but for its first 3 contexts",
            ("eval", tmp_path / "run", "--text", text, "--contexts", 9999, "--redo"),
        ),
        ("layer = 9", ("eval", tmp_path / "run", "--text", text, "--contexts", 2, "--layer", 9)),
    ):
        with pytest.raises(SystemExit) as stop:
            run(*bad, "--device", "cpu")
        assert stop.value.code == 2 and line in capsys.readouterr().err


def test_a_cache_is_written_continued_and_trained_on(model, text, tmp_path, capsys):
    common = ["--context", "20", "--buffer-tokens", "800", "--heldout-tokens", "60", "--device", "cpu"]
    common += ["--model", model, "--text", text, "--layer", "1", "--shard-tokens", "300"]
    run(*("cache", "--out", tmp_path / "cache", "--tokens", 900, *common, "--only-size"))
    assert "900 tokens of width 16: 0.00 GB" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()
    run("cache", "--out", tmp_path / "cache", "--tokens", 500, *common)
    run("cache", "--out", tmp_path / "cache", "--tokens", 900, *common)
    run("cache", "--out", tmp_path / "whole", "--tokens", 900, *common)
    for file in sorted((tmp_path / "whole").glob("shard-*")):
        assert file.read_bytes() == (tmp_path / "cache" / file.name).read_bytes()
    small = ("--steps", 8, "--batch-size", 50, "--latents", 64, "--k", 4)
    train(tmp_path / "cache", "--out", tmp_path / "run", *small)
    folder = capsys.readouterr().out.split()[-1]
    assert folder.endswith("topk-then-batch-at5-s0") and ss.SAE.load(folder).cfg.metadata["layer"] == 1


def refused(line: str, capsys, *words) -> None:
    with pytest.raises(SystemExit) as stop:
        train(*words)
    error = capsys.readouterr().err
    last = error.splitlines()[-1]
    assert stop.value.code == 2 and last.startswith("error: ") and line in last
    assert "Traceback" not in error and error.count("error: ") == 1


def test_bad_input_is_one_line(model, text, tmp_path, capsys):
    out = ("--out", tmp_path / "run", *SMALL)
    where = ("--model", model, "--text", text, *out)
    refused(f"layer = {LAYERS}", capsys, *where, "--layer", LAYERS)
    refused("layer: is missing", capsys, *where)
    refused("text: is missing", capsys, "--model", model, "--layer", 1, *out)
    refused("model: is missing", capsys, *out)
    refused("no-such-text.txt", capsys, "--model", model, "--text", "no-such-text.txt", "--layer", 1, *out)
    refused("model = './nothing'", capsys, "--model", "./nothing", "--text", text, "--layer", 1, *out)
    refused("give one of the two", capsys, *where, "--layer", 1, "--steps", 5)
    refused("give one of the two", capsys, "acts.npy", *where, "--layer", 1)
    refused("tokens = 600: must be at least batch_size = 700", capsys, *where, "--layer", 1, "--batch-size", 700)
    refused("context", capsys, *where, "--layer", 1, "--context", 100)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    refused("tokens", capsys, "--model", model, "--text", short, "--layer", 1, *out)
    assert not (tmp_path / "run" / "run.json").exists()


def parsed(*words) -> Train:
    return parse(load("train"), ["--out", "x", *map(str, words)], "sampled-sae train")


def test_the_papers_preset_is_its_table():
    command = parsed("--preset", "paper")
    assert (command.tokens, command.steps, command.batch_size) == (25_000_000, None, 4096)
    assert (parsed("--preset=paper-50k").tokens, parsed("--preset=paper-50k").steps) == (None, 50_000)
    for given in (("--steps", 7), ("--steps=7",)):
        assert (parsed("--preset", "paper", *given).tokens, parsed("--preset", "paper", *given).steps) == (None, 7)
    configs = command.sae_configs()
    assert len(configs) == 49 and {(c.d_sae, c.k) for c in configs} == {(65_536, 60)}
    first = configs[0]
    assert (first.optimizer.lr, first.optimizer.beta1, first.optimizer.beta2) == (3e-4, 0.9, 0.999)
    assert (first.optimizer.clip, first.optimizer.warmup_steps, first.auxk.alpha) == (1.0, 1000, 1 / 32)
    assert (first.threshold.start_step, first.threshold.beta) == (1000, 0.999)
    collect = command.collect
    assert (collect.model, collect.layer, collect.source.context) == ("EleutherAI/pythia-160m-deduped", (6,), 1024)
    assert collect.source.high_norm_factor is None


def test_old_flags_mean_the_same():
    old = ("--latents", 64, "--lr", 1e-3, "--dead-after", 5, "--max-norm", 3, "--buffer-tokens", 99, "--bos")
    new = ("--d-sae", 64, "--optimizer.lr", 1e-3, "--auxk.dead-after", 5, "--source.high-norm-factor", 3)
    new += ("--source.buffer-tokens", 99, "--source.bos", "True", "--source.context", 50)
    assert parsed(*old, "--context", 50) == parsed(*new)
    assert parsed(*new).sae_configs()[0].optimizer == ss.OptimizerConfig(lr=1e-3)
    assert [parsed(f"--{word}").input_norm for word in ("normalize", "no-normalize")] == ["one", "none"]


def test_help_shows_groups_and_real_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        run("train", "--help-all")
    shown = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and "None" not in shown
    for text in ("--d-sae INT", "Default: 16384.", "Default: topk_then_batchtopk.", "--optimizer.beta2 FLOAT"):
        assert text in shown
    for text in ("--source.buffer-tokens INT", "2,097,152.", "--lr, --optimizer.lr FLOAT", "sampled:score=,l="):
        assert text in shown


def test_a_dry_run_estimates_without_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(make_model("llama"), tmp_path / "model")
    (tmp_path / "text.txt").write_text("the other thing " * 400)
    np.save(tmp_path / "acts.npy", np.zeros((5000, 24), np.float32))

    def never(*arguments):
        raise AssertionError("the weights are read")

    monkeypatch.setattr("sampled_sae.models.load._read_weights", never)
    words = ["--steps", "300", "--batch-size", "64", "--d-sae", "96", "--k", "4", "--methods", "batchtopk", "topk"]
    words += ["--device", "cpu", "--dry-run", "--out", "new"]
    cli.main(["train", "--model", "model", "--text", "text.txt", "--layer", "0", "2", *words])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["tokens"].startswith("19,200 in 300 steps of 64")
    assert lines["SAEs"] == "2, d_in 16, at 2 hook points"
    # Two hook points, two SAEs: weights in 32 bits, then three checkpoints at most, of which one is written.
    size = 2 * 2 * 4 * (2 * 96 * 16 + 96 + 16)
    assert lines["disk"].startswith(f"{size / 2**20:.1f} MiB in new, and up to {3 * size / 2**20:.1f} MiB")
    assert "language model" in lines["time"] and "free" in lines["memory"] and "matrix product" in lines["based on"]
    cli.main(["train", "acts.npy", *words])
    assert "; 5,000 are there\nSAEs: 2, d_in 24\n" in capsys.readouterr().out
    refused("too few for one batch of batch_size = 4501", capsys, "acts.npy", *words, "--batch-size", "4501")
    assert not (tmp_path / "new").exists()
    for wrong, line in (("9", "layer = 9: model has 3 layers"), (None, "layer: is missing")):
        layer = [] if wrong is None else ["--layer", wrong]
        with pytest.raises(SystemExit):
            cli.main(["train", "--model", "model", "--text", "text.txt", *layer, *words])
        assert line in capsys.readouterr().err
