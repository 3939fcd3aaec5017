"""`sampled-sae sweep`, `sweep status` and `sweep cancel`."""

import json

import numpy as np
import pytest

from sampled_sae.cli import main, parse
from sampled_sae.cli.sweep import Sweep
from sampled_sae.sweeps import worker


@pytest.fixture
def spec(tmp_path, activations):
    """The path of a spec whose sweep has two jobs, one of which cannot be run."""
    np.save(tmp_path / "a.npy", activations.numpy())
    settings = {
        "activations": [str(tmp_path / "a.npy"), str(tmp_path / "missing.npy")],
        **{"d_sae": 32, "k": [2, 4], "steps": 20, "batch_size": 64, "heldout_tokens": 200},
        "slurm": {"partition": "gpu", "minutes": 7},
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(settings))
    return path


@pytest.fixture
def inside(monkeypatch):
    """Workers as calls in this process."""

    def run(sweep, names, places, say):
        for name in names:
            try:
                worker.work(sweep.folder, name, device="cpu")
            except Exception as error:
                say(str(error))

    monkeypatch.setattr("sampled_sae.sweeps.local.run", run)


def fails(capsys, *words: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, words)))
    assert caught.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_jobs_status_and_failures(spec, inside, capsys):
    main(["sweep", str(spec), "--dry-run"])
    assert capsys.readouterr().out.splitlines() == [
        "a: topk-then-batch-at5-k2-s0, topk-then-batch-at5-k4-s0",
        "missing: topk-then-batch-at5-k2-s0, topk-then-batch-at5-k4-s0",
    ]
    last = fails(capsys, "sweep", spec, "--device", "cpu")
    assert last == "error: 1 of 2 jobs failed; --retry-failed runs them again"
    for folder in (spec, spec.with_suffix("")):
        main(["sweep", "status", str(folder), "--watch"])
        table = capsys.readouterr().out
        rows = [line.split() for line in table.splitlines() if line.startswith(("a ", "missing "))]
        assert [row[:4] for row in rows] == [["a", "finished", "2", "20/20"], ["missing", "failed", "2", "0/20"]]
        assert "missing.npy" in table and table.splitlines()[-1] == "1 finished, 1 failed"
    main(["sweep", "cancel", str(spec)])
    assert capsys.readouterr().out == "1 finished, 1 failed\n"


def test_flags_replace_the_settings_for_slurm(spec):
    given = parse(Sweep, [str(spec), "--slurm.minutes", "9"], "sampled-sae sweep")
    assert (given.slurm.partition, given.slurm.minutes) == ("gpu", 9)


def test_mistakes_are_one_line(spec, tmp_path, inside, capsys):
    assert fails(capsys, "sweep", tmp_path / "none.yaml").endswith("none.yaml': no such file")
    assert fails(capsys, "sweep", "status", tmp_path / "none").endswith("sampled-sae sweep SPEC.yaml starts one")
    used = "error: --workers, --device and --gpus-per-job are not used with --launcher slurm: set --slurm.gpus-per-job"
    assert fails(capsys, "sweep", spec, "--launcher", "slurm", "--workers", 2) == used
    fails(capsys, "sweep", spec, "--device", "cpu")
    spec.write_text(spec.read_text().replace("[2, 4]", "[2, 3]"))
    for flag in (["--device", "cpu"], ["--dry-run"]):
        assert "has another spec: k[1] was 4 and is now 3" in fails(capsys, "sweep", spec, *flag)


def test_a_dry_run_fails_where_the_folder_cannot_be_used_and_writes_nothing(spec, tmp_path, inside, capsys):
    (tmp_path / "file").write_text("taken")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        for flag in (["--device", "cpu"], ["--dry-run"]):
            assert f"{out}: cannot write there (" in fails(capsys, "sweep", spec, "--out", out, *flag)
    main(["sweep", str(spec), "--out", str(tmp_path / "new"), "--dry-run"])
    assert not (tmp_path / "new").exists()
