"""Stages: what is finished is not done again, what is interrupted goes on, what cannot be done is one line."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from sampled_sae.config import plain
from sampled_sae.experiments import stages as reproduce
from sampled_sae.experiments.reproduce import Paper
from sampled_sae.experiments.scales import SCALES
from sampled_sae.experiments.stages import RECORD, Record, Stage, check_disk, chosen, run_stages
from sampled_sae.utils.errors import Interrupted, UserError


class Work:
    """Stages a -> b -> c that write a file each and keep count of their runs."""

    def __init__(self, out: Path):
        self.out, self.ran = out, []

    def stage(self, name: str, settings=None, needs=(), reads=(), keeps=False, act=None) -> Stage:
        def run() -> None:
            self.ran.append(name)
            if act is not None:
                act()
            (self.out / name).write_text("made")

        return Stage(name, settings or {}, run, (self.out / name,), needs, reads, keeps, (f"do {name}",))

    def stages(self, **settings) -> list[Stage]:
        return [
            self.stage("a", settings.get("a"), keeps=True),
            self.stage("b", settings.get("b"), needs=("a",)),
            self.stage("c", settings.get("c"), reads=("b",)),
        ]

    def go(self, stages, scale="tiny") -> list[str]:
        self.ran.clear()
        run_stages(stages, self.out, scale, {"settings": {"x": 1}})
        return list(self.ran)

    def record(self) -> dict:
        return json.loads((self.out / RECORD).read_text())


@pytest.fixture
def work(tmp_path):
    return Work(tmp_path)


def test_each_stage_runs_once(work, capsys):
    assert work.go(work.stages()) == ["a", "b", "c"]
    assert work.go(work.stages()) == []
    assert "[2/3] b: finished before" in capsys.readouterr().err.splitlines()[-2]
    record = work.record()
    assert record["scale"] == "tiny" and record["settings"] == {"x": 1}
    for name in "abc":
        entry = record["stages"][name]
        assert entry["started"] <= entry["finished"] and entry["seconds"] >= 0
        assert entry["commands"] == [f"do {name}"] and entry["versions"]["torch"]


def test_other_settings_and_what_depends_on_them(work):
    work.go(work.stages())
    assert work.go(work.stages(b={"n": (1, 2)})) == ["b", "c"]
    assert work.go(work.stages(b={"n": [1, 2]})) == []  # as JSON gives it back
    assert work.go(work.stages(b={"n": [1, 2]}, c={"m": 1})) == ["c"]


def test_a_stage_whose_files_are_gone_is_made_again(work):
    work.go(work.stages())
    (work.out / "b").unlink()
    assert work.go(work.stages()) == ["b", "c"]


def test_a_folder_that_is_kept_refuses_other_settings(work):
    work.go(work.stages(a={"text": "one"}))
    with pytest.raises(UserError, match=r"a was started with other settings: .*text.*choose another folder"):
        work.go(work.stages(a={"text": "two"}))
    assert work.ran == []
    with pytest.raises(UserError, match=r"scale = 'paper': .* holds scale 'tiny'; choose another folder"):
        work.go(work.stages(), scale="paper")


def test_a_stage_that_needs_another(work):
    stages = work.stages()
    with pytest.raises(UserError, match="b: needs a, which is not finished"):
        work.go(stages[1:])
    assert work.go(stages[:1]) == ["a"] and work.go(stages[1:]) == ["b", "c"]


@pytest.mark.parametrize("how", ["ctrl-c", "kill", "trainer"])
def test_interrupted_stages_go_on(work, how):
    def stop() -> None:
        if how == "ctrl-c":
            raise KeyboardInterrupt
        if how == "trainer":
            raise Interrupted("interrupted at step 3; saved in out, go on with resume")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    a, b, c = work.stages()
    with pytest.raises(Interrupted, match=r"^in stage b; the same command continues from there$"):
        work.go([a, work.stage("b", act=stop, needs=("a",)), c])
    assert work.ran == ["a", "b"]
    entry = work.record()["stages"]["b"]
    assert entry["finished"] is None and "c" not in work.record()["stages"]
    before = entry["seconds"]
    assert work.go([a, b, c]) == ["b", "c"]
    assert work.record()["stages"]["b"]["seconds"] >= before  # both sittings count
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_bug_keeps_its_traceback_and_is_recorded(work):
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work.go([work.stage("a", act=fail)])
    assert work.record()["stages"]["a"]["finished"] is None


def test_two_at_once_are_refused(work):
    def again() -> None:
        with pytest.raises(UserError, match="another process is at work there"):
            run_stages(work.stages(), work.out, "tiny", {})

    assert work.go([work.stage("a", act=again)]) == ["a"]


def test_a_record_that_is_not_one(work):
    (work.out / RECORD).write_text('{"stages": 3}')
    with pytest.raises(UserError, match="not a record of this program"):
        work.go(work.stages())


def test_choosing_stages(work):
    stages = work.stages()
    assert [s.name for s in chosen(stages, ("c", "a"), ())] == ["a", "c"]
    assert [s.name for s in chosen(stages, None, ("b",))] == ["a", "c"]
    for only, skip, line in (
        (("d",), (), "only = 'd': must be among a, b, c"),
        (None, ("d",), "skip = 'd': must be among a, b, c"),
        (("a",), ("a",), "must leave at least one stage"),
    ):
        with pytest.raises(UserError, match=line):
            chosen(stages, only, skip)


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    check_disk(tmp_path / "not" / "yet", 1)
    free = type("Usage", (), {"free": 5 * 10**9})
    monkeypatch.setattr(reproduce.shutil, "disk_usage", lambda path: free if Path(path).exists() else 1 / 0)
    check_disk(tmp_path / "not" / "yet", 5 * 10**9)
    with pytest.raises(UserError, match=r"6\.0 GB are needed there at the peak, 5\.0 GB are free"):
        check_disk(tmp_path / "not" / "yet", 6 * 10**9)


def test_a_record_of_version_0_is_upgraded(tmp_path):
    """Names as they were, and settings that stages did not list."""
    scale = SCALES["tiny"]
    paper = {stage.name: stage for stage in Paper(scale, tmp_path).stages()}
    autointerp = {name: value for name, value in scale.autointerp.to_dict().items() if name != "tokens"}
    train = paper["train"].settings
    names = {"d_sae": "latents", "saes_per_run": "saes_a_run", "high_norm_factor": "max_norm"}
    old = {
        "train": {names.get(name, name): value for name, value in train.items()},
        "core": {"text": scale.text, "contexts": scale.core.contexts},
        "autointerp": {"text": scale.text, "interp_tokens": scale.autointerp.tokens, **autointerp},
    }
    entries = {name: {"settings": settings, "finished": "2026", "seconds": 1.0} for name, settings in old.items()}
    (tmp_path / RECORD).write_text(json.dumps({"scale": "tiny", "stages": plain(entries)}))
    for name in ("train/all/run.json", "evals/table.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    record = Record(tmp_path, "tiny")
    assert all(record.is_done(paper[name]) for name in old)
    record.write()
    content = json.loads((tmp_path / RECORD).read_text())
    assert content["format_version"] == 2
    assert all(Record(tmp_path, "tiny").is_done(paper[name]) for name in old)
    for name in ("core", "autointerp"):  # what was the default in version 1
        content["stages"][name]["settings"] |= {"skip_first": 0, "left_out": []}
    (tmp_path / RECORD).write_text(json.dumps(content | {"format_version": 1}))
    assert all(Record(tmp_path, "tiny").is_done(paper[name]) for name in old)
