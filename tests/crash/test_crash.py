"""A short run of `make crash-test`, and what longer ones have found."""

import pytest

from tests.crash.jobs import JOBS, contents, model, spec, text
from tests.crash.run import SUCCESS, WAYS, attempt, disturb, run


@pytest.mark.parametrize("job, kills, others", [("cache", 8, 2), ("parts", 8, 2), ("train", 8, 2), ("sweep", 3, 0)])
def test_disturbed_jobs_end_in_one_line_and_continue_to_the_same_files(job, kills, others, capsys):
    assert run(kills, others, [job]) == 0, capsys.readouterr().out


CASES = [("cache", "kill", 7), ("cache", "read-only", 8), ("eval", "vanish", 124)]
CASES += [("browse", "kill", 130)]
CASES += [("sweep", "read-only", at) for at in (59, 152)]
CASES += [("train", "read-only", 114)]
CASES += [("eval", "kill", at) for at in (136, 154, 168)]


@pytest.mark.parametrize("job, way, at", CASES)
def test_past_failures(tmp_path, job, way, at):
    """A killed writer left its temporary file for good; an SAE that was removed while it was evaluated, and a folder of
    a sweep that became read-only, ended in a traceback."""
    model(), text(), spec()  # the same in each process
    assert way in WAYS and attempt(job, tmp_path / "out")[0] == SUCCESS and job in JOBS
    assert disturb(job, way, at, contents(tmp_path / "out"))[1] == ""
