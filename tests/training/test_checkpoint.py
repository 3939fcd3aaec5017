import json
import threading

import pytest
import torch
from safetensors.torch import load_file

import sampled_sae as ss
from sampled_sae.config import first_difference
from sampled_sae.migrations import OLD_INIT, OLD_OPTIMIZER
from sampled_sae.training import checkpoint
from sampled_sae.training.checkpoint import Checkpoint
from sampled_sae.training.run import Callback
from sampled_sae.utils.errors import Interrupted, UserError


def at(step: int) -> Checkpoint:
    return Checkpoint(step, {"steps": 10}, {"a": {"w": torch.full((3,), float(step))}}, {"scale": 1.5})


def test_a_file_is_as_the_library_writes_it(tmp_path):
    state = {
        "w": torch.randn(3, 5).T,
        "step": torch.tensor(7.0),
        "count": torch.tensor([2**40, 1]),
        "pool": torch.tensor([True, False, True]),
        "half": torch.randn(7).bfloat16(),
        "generator": torch.Generator().get_state(),
        "none": torch.zeros(0, 4),
    }
    found = load_file(checkpoint.save(tmp_path, Checkpoint(1, {}, {"a": state}, {})) / "0.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_one_is_written_beside_the_steps_from_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.Writer, "_beside", lambda self, checkpoint: True)
    given, begin = checkpoint.save, threading.Event()
    monkeypatch.setattr(checkpoint, "save", lambda *arguments: begin.wait(20) and given(*arguments))
    writer, now = checkpoint.Writer(tmp_path, torch.device("cpu")), at(4)
    future = writer.write(now)
    now.states["a"]["w"].zero_()  # the next step
    assert not future.done()
    begin.set()
    assert future.result() == tmp_path / "step-000000004"
    assert checkpoint.load(future.result()).states["a"]["w"].tolist() == [4, 4, 4]
    begin.clear()
    future = writer.write(at(5))
    threading.Timer(0.2, begin.set).start()
    writer.close(give_up=True)
    assert isinstance(future.exception(), Interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000004"]


def test_a_run_that_writes_beside_its_steps_ends_and_resumes_as_others(tmp_path, monkeypatch):
    x = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
    common = {"steps": 40, "batch_size": 100, "device": "cpu", "progress": False, "heldout_tokens": 100}
    whole = ss.train(x, ss.batchtopk(48, 4), **common)
    monkeypatch.setattr(checkpoint.Writer, "_beside", lambda self, checkpoint: True)
    seen = []

    class Stop(Callback):
        def on_checkpoint(self, run, step, folder):
            seen.append((step, folder.name))

        def on_step(self, run, learner, step, stats):
            if step == 25 and not seen[3:]:
                raise RuntimeError("power cut")

    common |= {"out": tmp_path / "run", "checkpoint_every": 10, "callbacks": [Stop()]}
    with pytest.raises(RuntimeError):
        ss.train(x, ss.batchtopk(48, 4), **common)
    assert seen == [(10, "step-000000010"), (20, "step-000000020")]
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 2
    seen += [(0, "")] * 2
    resumed = ss.train(x, ss.batchtopk(48, 4), resume=True, **common)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_newest_is_loaded_and_old_ones_go(tmp_path):
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, at(step))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000000003", "step-000000004"]
    found = checkpoint.load_latest(tmp_path, {"steps": 10}, print)
    assert found.step == 4
    assert found.extra == {"scale": 1.5}
    assert found.states["a"]["w"].tolist() == [4, 4, 4]
    assert checkpoint.load_latest(tmp_path / "none", {}, print) is None


@pytest.mark.parametrize("file", ["0.safetensors", "checkpoint.json"])
def test_one_cut_short_is_passed_over_for_the_one_before(file, tmp_path):
    checkpoint.save(tmp_path, at(1))
    path = checkpoint.save(tmp_path, at(2)) / file
    path.write_bytes(path.read_bytes()[:-5])
    said = []
    assert checkpoint.load_latest(tmp_path, {"steps": 10}, said.append).step == 1
    assert len(said) == 1
    assert file in said[0]
    assert "step 1" in said[0]


def flip_a_bit(folder):
    path = folder / "0.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)


def swap_files(folder):
    (folder / "0.safetensors").rename(folder / "x")
    (folder / "1.safetensors").rename(folder / "0.safetensors")
    (folder / "x").rename(folder / "1.safetensors")


def edit(**changes):
    def change(folder):
        content = json.loads((folder / "checkpoint.json").read_text())
        (folder / "checkpoint.json").write_text(json.dumps(content | changes))

    return change


@pytest.mark.parametrize(
    "damage", [flip_a_bit, swap_files, edit(names=["b", "a"]), edit(step=3), edit(extra={}), edit(checksums={})]
)
def test_any_change_is_found_and_the_one_before_is_taken(damage, tmp_path):
    for step in (1, 2):
        states = {name: {"w": torch.full((3,), step + shift)} for name, shift in (("a", 0.0), ("b", 0.5))}
        folder = checkpoint.save(tmp_path, Checkpoint(step, {"steps": 10}, states, {"scale": 1.5}))
    damage(folder)
    said = []
    found = checkpoint.load_latest(tmp_path, {"steps": 10}, said.append)
    assert found.step == 1
    assert [found.states[name]["w"][0].item() for name in "ab"] == [1.0, 1.5]
    assert len(said) == 1
    assert "resuming from the checkpoint before it, step 1" in said[0]


def test_a_checkpoint_without_checksums_has_its_step_and_names_checked(tmp_path):
    """Version 0 had no checksums: what can be checked is."""
    run = {"saes": [{"name": name, "optimizer": OLD_OPTIMIZER, "init": OLD_INIT} for name in "ab"]}
    for step in (1, 2):
        states = {name: {"w": torch.zeros(3)} for name in "ab"}
        folder = checkpoint.save(tmp_path, Checkpoint(step, run, states, {}))
    old = {k: v for k, v in json.loads((folder / "checkpoint.json").read_text()).items() if "check" not in k}
    del old["format_version"]
    (folder / "checkpoint.json").write_text(json.dumps(old))
    assert checkpoint.load_latest(tmp_path, run, print).step == 2
    for change in ({"step": 1}, {"names": ["b", "a"]}, {"names": None}, {"sizes": []}, {"run": [1]}):
        (folder / "checkpoint.json").write_text(json.dumps(old | change))
        assert checkpoint.load_latest(tmp_path, run, lambda line: None).step == 1, change


def test_leftovers_of_a_kill_are_removed(tmp_path):
    checkpoint.save(tmp_path, at(1))
    (tmp_path / ".step-000000002.abc.tmp").mkdir()
    (tmp_path / ".step-000000002.abc.tmp" / "0.safetensors").write_text("half")
    assert checkpoint.load_latest(tmp_path, {"steps": 10}, print).step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_no_good_one_left_is_an_error(tmp_path):
    path = checkpoint.save(tmp_path, at(1)) / "0.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(UserError, match="cut short; no good checkpoint is left"):
        checkpoint.load_latest(tmp_path, {"steps": 10}, print)
    path.unlink()
    with pytest.raises(UserError, match=r"0\.safetensors: damaged or missing"):
        checkpoint.load_latest(tmp_path, {"steps": 10}, print)


def test_another_configuration_is_refused_by_name(tmp_path):
    checkpoint.save(tmp_path, at(1))
    with pytest.raises(UserError, match="another configuration: steps was 10 and is now 20"):
        checkpoint.load_latest(tmp_path, {"steps": 20}, print)


def test_first_difference_names_the_path():
    old = {"saes": [{"k": 4, "pool": {"score": "l2"}}], "seed": 0}
    new = json.loads(json.dumps(old))
    assert first_difference(old, new) is None
    new["saes"][0]["pool"]["score"] = "l1"
    assert first_difference(old, new) == "saes[0].pool.score was 'l2' and is now 'l1'"
    assert first_difference(old, {"saes": old["saes"]}) == "seed was 0 and is now None"
    assert first_difference(old, {"saes": [], "seed": 0}) == "saes had 1 entries and now has 0"
    assert first_difference({"prefixes": [2, 4]}, {"prefixes": [4]}) == "prefixes was [2, 4] and is now [4]"


def test_a_write_that_fails_leaves_the_last_one_and_no_rubbish(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, at(1))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(UserError, match="the disk is full"):
        checkpoint.save(tmp_path, at(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
