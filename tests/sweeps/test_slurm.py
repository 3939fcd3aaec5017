"""What is read of Slurm, and errors without one; tests/cluster runs sweeps on a real one."""

import subprocess
import sys

import pytest

from sampled_sae.config import write_file
from sampled_sae.sweeps import launch, look, slurm
from sampled_sae.sweeps.store import Sweep
from sampled_sae.utils.errors import UserError
from tests.sweeps.conftest import make_cached_spec

# Lines of `scontrol show job -o` of Slurm 22.05, shortened.
RUNNING = "JobId=3 ArrayJobId=2 ArrayTaskId=0 ArrayTaskThrottle=2 JobName=s JobState=RUNNING Reason=None Restarts=1"
PENDING = "JobId=2 ArrayJobId=2 ArrayTaskId=3-5,8%4 JobName=s JobState=PENDING Reason=JobArrayTaskLimit"
SINGLE = "JobId=7 JobName=wrap JobState=COMPLETED Reason=None Requeue=1 ExitCode=0:0"


def test_states_of_arrays_and_single_jobs():
    assert dict(slurm.parsed(RUNNING)) == {"2_0": ("RUNNING", "None")}
    assert list(dict(slurm.parsed(PENDING))) == ["2_3", "2_4", "2_5", "2_8"]
    assert dict(slurm.parsed(SINGLE)) == {"7": ("COMPLETED", "None")}


@pytest.fixture
def scontrol(monkeypatch):
    """Sets what `scontrol` answers."""

    def answer(text: str, code: int = 0, error: str = ""):
        made = subprocess.CompletedProcess([], code, text, error)
        monkeypatch.setattr(slurm.subprocess, "run", lambda *a, **k: made)

    return answer


@pytest.mark.parametrize(
    ("own", "line", "status", "error"),
    [
        ("pending", SINGLE.replace("COMPLETED", "PENDING").replace("None", "Resources"), "queued", "Resources"),
        ("running", SINGLE.replace("COMPLETED", "RUNNING"), "running", ""),
        ("interrupted", SINGLE.replace("COMPLETED", "PENDING"), "queued", ""),
        ("running", SINGLE.replace("COMPLETED", "OUT_OF_MEMORY"), "failed", "Slurm: OUT_OF_MEMORY (the last line)"),
        ("pending", SINGLE.replace("COMPLETED", "CANCELLED"), "cancelled", ""),
        ("running", "", "interrupted", "its worker is gone"),  # Slurm has forgotten it
        ("pending", "", "pending", ""),
        ("finished", SINGLE, "finished", ""),
    ],
)
def test_a_job_by_its_record_and_slurm(tmp_path, make_spec, scontrol, own, line, status, error):
    sweep = Sweep.start(tmp_path / "s", make_spec())
    sweep.update("a", status=own)
    write_file(sweep.folder / slurm.RECORD, "sweep_slurm", {"ids": {"a": "7"}})
    (sweep.folder / "slurm").mkdir()
    (sweep.folder / "slurm" / "7_0_log.err").write_text("first\nthe last line\n\n")
    scontrol(line, 0 if line else 1, "" if line else "slurm_load_jobs error: Invalid job id specified")
    [seen] = look(sweep)
    assert (seen.status, seen.error) == (status, error)


def test_without_an_answer_of_slurm_the_records_are_shown(tmp_path, make_spec, scontrol, capsys):
    sweep = Sweep.start(tmp_path / "s", make_spec())
    sweep.update("a", status="running")
    write_file(sweep.folder / slurm.RECORD, "sweep_slurm", {"ids": {"a": "7"}})
    scontrol("", 1, "slurm_load_jobs error: Unable to contact slurm controller")
    assert [each.status for each in look(sweep)] == ["running"]
    assert "scontrol: does not answer" in capsys.readouterr().err


def test_a_job_is_cancelled_where_one_that_it_needs_ended_unfinished(tmp_path):
    sweep = Sweep.start(tmp_path / "s", make_cached_spec(tmp_path))
    *writers, reader, _ = sweep.names
    sweep.update(writers[0], status="finished")
    with pytest.raises(SystemExit):
        slurm.Task(str(sweep.folder), reader, 1)()
    state = sweep.entry(reader).state
    assert (state.status, state.attempts) == ("cancelled", 0)
    assert state.error == f"not started, because {writers[1]} is not finished"
    sweep.update(writers[1], status="failed")
    assert [group for _, group in slurm._arrays(sweep, [reader]) if group] == []
    assert sweep.entry(reader).state.error == f"not submitted, because {writers[1]} is failed"


def test_without_submitit_or_slurm_nothing_is_written(tmp_path, make_spec, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="launcher = 'slurm': sbatch is missing; run this on a machine of the cluster"):
        launch(make_spec(), tmp_path / "s", "slurm")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"launcher = 'slurm': submitit is missing; pip install .*\[cluster\]'"):
        launch(make_spec(), tmp_path / "s", "slurm")
    assert not (tmp_path / "s").exists()
