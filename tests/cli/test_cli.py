"""The command line as a person meets it: its output and its exit code."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import sampled_sae as ss
from sampled_sae import cli
from sampled_sae.cli import experiments
from sampled_sae.training.run import Run


def run(*words):
    """A command in this process: starting one of its own takes longer than most commands."""
    out, error = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(error), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        try:
            cli.main([str(word) for word in words])
            code = 0
        except SystemExit as stop:
            code = stop.code
    return subprocess.CompletedProcess(words, code or 0, out.getvalue(), error.getvalue())


def process(*words):
    """The same in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "sampled_sae", *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        timeout=120,
    )


@pytest.fixture
def acts(tmp_path, activations):
    np.save(tmp_path / "acts.npy", activations.numpy())
    return tmp_path / "acts.npy"


SMALL = ("--steps", 20, "--latents", 48, "--k", 4, "--batch-size", 200)


def refused(done, line: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    assert line in done.stderr
    assert "Traceback" not in done.stderr


def test_train_a_sweep_and_load_it(acts, tmp_path):
    done = process(
        *("train", acts, "--out", tmp_path / "run", *SMALL),
        *("--methods", "batchtopk", "sampled:score=l2/entropy,l=2/4", "released:score=l2/entropy", "--seeds", 0, 1),
    )
    assert done.returncode == 0, done.stderr
    folders = done.stdout.split()
    assert len(folders) == 2 * (1 + 4 + 2)
    assert all(ss.SAE.load(folder).d_sae == 48 for folder in folders)
    assert "memory: about" in done.stderr
    assert "20/20 steps, " in done.stderr and "tokens/s" in done.stderr
    assert "on held-out tokens of the training data" in done.stderr
    again = run("train", acts, "--out", tmp_path / "run", *SMALL)
    refused(again, "holds a run already; resume (--resume, in Python resume=True) to continue it")


def test_other_files_of_activations(activations, tmp_path):
    save_file({"a": activations, "b": activations[:, :8].contiguous()}, tmp_path / "x.safetensors")
    torch.save(activations, tmp_path / "x.pt")
    assert run("train", tmp_path / "x.pt", "--out", tmp_path / "1", *SMALL).returncode == 0
    done = run("train", tmp_path / "x.safetensors", "--out", tmp_path / "2", *SMALL, "--key", "b")
    assert ss.SAE.load(done.stdout.strip()).d_in == 8
    refused(run("train", tmp_path / "x.safetensors", "--out", tmp_path / "3", *SMALL), "holds a, b; name one of them")


def test_configurations_from_a_file(acts, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps([ss.released(32, 2, score="l1", name="mine").to_dict()]))
    words = ("--steps", 20, "--batch-size", 200, "--configs", tmp_path / "c.json")
    done = run("train", acts, "--out", tmp_path / "run", *words)
    assert ss.SAE.load(tmp_path / "run" / "saes" / "mine").cfg.training.pool.score == "l1", done.stderr


def test_a_users_own_score(acts, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from sampled_sae import register_score\n@register_score('biggest')\ndef biggest(Z): return Z.amax(dim=-2)\n"
    )
    words = ("train", acts, *SMALL, "--methods", "sampled:score=biggest")
    done = process(*words, "--out", tmp_path / "run", "--load-scores", script)
    assert done.stdout.strip().endswith("biggest-l5-s0"), done.stderr
    for command in (("resume", tmp_path / "run", "--extend", 5), (*words, "--out", tmp_path / "other")):
        refused(failed := run(*command), "score = 'biggest': unknown; the scores are ")
        assert "; --load-scores FILE.py adds" in failed.stderr
    extended = process("resume", tmp_path / "run", "--extend", 5, "--load-scores", script)
    assert extended.stdout == done.stdout, extended.stderr
    script.write_text("def broken(:\n")
    refused(run(*words, "--out", tmp_path / "other", "--load-scores", script), "SyntaxError")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--k", 99), "k = 99: must be at most d_sae = 48"),
        (("--methods", "sampled:l=0.5"), "l = 0.5: must be"),
        (("--methods", "sampled:score=l9"), "score = 'l9': unknown; the scores are l2"),
        (("--methods", "relu"), "unknown method 'relu'; the methods are batchtopk"),
        (("--k", "x"), "error: --k = 'x': must be an integer"),
        (("--lr", "fast"), "error: --lr = 'fast': must be a number"),
        (("--preset", "large"), "error: --preset = 'large': must be one of paper, paper-50k"),
        (("--nothing", 3), "error: --nothing 3: not known; sampled-sae train --help lists the options"),
        (("--batch-size", 5000), "too few for one batch of batch_size = 5000"),
        (("--latents", 10**9), "GiB on cpu needed"),
        (("--seeds",), "methods and seeds: each must name at least one"),
        (("--steps", 0), "steps = 0: must be at least 1"),
        (("--device", "cuda:99"), "device = 'cuda:99': cannot be used"),
        (("--resume", "--seeds", 5), None),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_2(words, line, acts, tmp_path):
    done = run("train", acts, "--out", tmp_path / "run", *SMALL, *words)
    if line is None:  # resuming where nothing is yet simply starts
        assert done.returncode == 0
        return
    refused(done, line)
    assert len(done.stderr.strip().splitlines()) == 1


def test_bad_files_are_one_line_and_exit_code_2(acts, tmp_path, activations):
    def train(path):
        return run("train", path, "--out", tmp_path / "run", *SMALL)

    refused(train(tmp_path / "absent.npy"), "no such file")
    refused(train(tmp_path), "or a file ending in")
    np.save(tmp_path / "objects.npy", np.array([None, 1]), allow_pickle=True)
    refused(train(tmp_path / "objects.npy"), "cannot be read")
    refused(run("train", acts, "--out", tmp_path / "run", "--steps", 20, "--configs", tmp_path), "cannot be read")
    refused(run("merge", "--out", tmp_path / "m"), "must name at least one folder")
    refused(run("synthetic", "--device", "cuda:7", "--out", tmp_path / "m"), "device = 'cuda:7': cannot be used")
    (tmp_path / "x.csv").write_text("1,2")
    refused(train(tmp_path / "x.csv"), "or a file ending in .npy, .safetensors, .pt")
    (tmp_path / "cut.npy").write_bytes(acts.read_bytes()[:1000])
    refused(train(tmp_path / "cut.npy"), "cannot be read")
    torch.save({"x": print}, tmp_path / "code.pt")
    refused(train(tmp_path / "code.pt"), "cannot be read")
    np.save(tmp_path / "short.npy", activations[:100].numpy())
    refused(train(tmp_path / "short.npy"), "too few for one batch of batch_size = 200")
    bad = activations.clone()
    bad[17, 3] = torch.nan
    torch.save(bad, tmp_path / "nan.pt")
    refused(train(tmp_path / "nan.pt"), "activations: NaN or infinity (first in row 17)")
    assert train(acts).returncode == 0, "a refused run must not block its folder"


def test_a_folder_that_cannot_be_written(acts, tmp_path):
    (tmp_path / "file").write_text("in the way")
    refused(run("train", acts, "--out", tmp_path / "file" / "run", *SMALL), "cannot write there")
    refused(run("train", acts, "--out", "/proc/nothing/here", *SMALL), "/proc/nothing/here")


def test_a_full_disk_keeps_the_last_good_checkpoint(acts, tmp_path):
    """A limit on file sizes stands in for the full disk: writes beyond it fail as they would there."""
    code = (
        "import resource, signal, sys\n"
        "import sampled_sae.training.checkpoint as c\n"
        "from sampled_sae.cli import main\n"
        "save = c.save\n"
        "def save_then_limit(*a):\n"
        "    path = save(*a)\n"
        "    if '000000010' in path.name: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "    return path\n"
        "c.save = save_then_limit\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "main(sys.argv[1:])\n"
    )
    words = ["train", acts, "--out", tmp_path / "run", *SMALL, "--checkpoint-every", 5]
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=120)
    refused(done, "step-000000015: the disk is full")
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-000000005", "step-000000010"]
    assert run(*words, "--resume").returncode == 0


def test_resume_refuses_another_configuration_and_damaged_checkpoints(acts, tmp_path, monkeypatch):
    out = tmp_path / "run"
    words = ["train", acts, "--out", out, *SMALL, "--checkpoint-every", 5]
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", lambda *_: sys.exit(9))
        assert run(*words).returncode == 9
    refused(run(*words, "--resume", "--lr", 0.5), "optimizer.lr was 0.06 and is now 0.5")
    for path in (out / "checkpoints").glob("*/0.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    refused(run(*words, "--resume"), "no good checkpoint is left")


def test_warnings_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_run", lambda arguments: warnings.warn("slower\nhere", stacklevel=1))
    cli.main([])
    assert capsys.readouterr().err == "warning: slower\\nhere\n"


def test_help_tells_what_there_is():
    done = process("--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 40 and max(map(len, done.stdout.splitlines())) <= 80  # one screen
    assert run().stdout == done.stdout
    described = run("train", "--help").stdout
    assert "--load-scores" in described and "participation" in described
    refused(run("tarin"), "command = 'tarin': not known; did you mean train? sampled-sae --help lists the commands")


def test_ctrl_c_is_one_line_and_exit_code_130(acts, tmp_path):
    words = ["train", acts, "--out", tmp_path / "run", *SMALL, "--steps", 100_000, "--checkpoint-every", 10]
    process = subprocess.Popen(
        [sys.executable, "-m", "sampled_sae", *map(str, words)], stderr=subprocess.PIPE, text=True
    )
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert error.strip().splitlines()[-1].startswith("stopped: interrupted at step ")
    assert "Traceback" not in error


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["reproduce", "--help"], 141),  # found while printing
        (["merge", "--help"], 141),  # short: found with what is left in the buffer
        (["reproduce", "--dry-run", "--device", "cpu", "--out", "x"], 1),  # rich's own way
    ],
)
def test_a_reader_that_leaves_is_no_error(words, code, unbuffered, tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "sampled_sae", *words],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        timeout=120,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (code, "")


def test_nobody_reads_errors_either(tmp_path):
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "sampled_sae", "merge", "--out", str(tmp_path)]
    assert subprocess.run(words, stdout=write, stderr=write, timeout=120).returncode == 141
    os.close(write)


def test_another_broken_pipe_stays_an_error(monkeypatch, tmp_path):
    def broken(self):
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr(experiments.Merge, "run", broken)
    with pytest.raises(BrokenPipeError, match="of a worker"):
        cli.main(["merge", "x", "--out", str(tmp_path)])


def test_control_characters_of_names_do_not_reach_the_terminal(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", "no\x1b[31m\nsuch", "--out", str(tmp_path)])
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and printed.count("\n") == 1 and "\x1b" not in printed
