"""One job: idempotent, resumable after signals, and honest about what went wrong."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
import transformers

from sampled_sae import SAE, SCORES
from sampled_sae.evals import EVALUATIONS
from sampled_sae.formats import saes_in
from sampled_sae.sweeps import cancel, launch, look, worker
from sampled_sae.sweeps.spec import SweepConfig, completed
from sampled_sae.sweeps.store import Sweep
from sampled_sae.utils.errors import Interrupted, UserError
from tests.models.tiny_models import SHAPE, make_tokenizer
from tests.small_runs import same_weights

EVALUATION = """
from dataclasses import dataclass
from sampled_sae.config import Config
from sampled_sae.evals import Evaluation, register_evaluation

@dataclass(frozen=True, slots=True)
class WidthConfig(Config):
    pass

@register_evaluation
class Width(Evaluation):
    name, title, config = "width_of_sweeps", "Width", WidthConfig

    def run(self, job, config):
        return ({"width": sae.d_in} for sae in job.saes)
"""
CPU = {"device": "cpu"}


def weights(sweep: Sweep, name: str) -> list[SAE]:
    return [SAE.load(folder) for folder in saes_in(sweep.path(name))]


def files(folder) -> dict:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_finished_job_is_not_done_again(tmp_path, make_spec):
    sweep = Sweep.start(tmp_path / "s", make_spec())
    assert [each.status for each in look(sweep)] == ["pending"]
    worker.work(sweep.folder, "a", **CPU)
    state = sweep.entry("a").state
    assert (state.status, state.step, state.trained, state.attempts) == ("finished", 60, True, 1)
    assert len(weights(sweep, "a")) == 2
    before = files(sweep.folder)
    worker.work(sweep.folder, "a", **CPU)
    assert files(sweep.folder) == before


@pytest.mark.parametrize("signals", [("SIGUSR2",), ("SIGTERM",), ("SIGUSR2", "SIGTERM", "SIGTERM")])
def test_signals_lead_to_a_checkpoint_and_the_same_weights(tmp_path, make_spec, monkeypatch, signals):
    """Slurm sends its signal and SIGTERM, and SIGTERM more than once."""
    whole, stopped = (Sweep.start(tmp_path / name, make_spec()) for name in ("whole", "stopped"))
    worker.work(whole.folder, "a", **CPU)
    sent = worker.Notes.on_batch

    def on_batch(self, run, step, x):
        if step == 33:
            for name in signals:
                os.kill(os.getpid(), getattr(signal, name))
        sent(self, run, step, x)

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)]
    with monkeypatch.context() as patch:
        patch.setattr(worker.Notes, "on_batch", on_batch)
        with pytest.raises(Interrupted):
            worker.work(stopped.folder, "a", **CPU)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)] == handlers
    state = stopped.entry("a").state
    assert (state.status, state.step, state.attempts, state.error) == ("interrupted", 34, 1, None)
    worker.work(stopped.folder, "a", **CPU)
    assert stopped.entry("a").state.attempts == 2
    for one, other in zip(weights(whole, "a"), weights(stopped, "a"), strict=True):
        assert same_weights(one, other)


def test_a_signal_outside_of_training_stops_the_job_too(tmp_path, make_spec, monkeypatch):
    sweep = Sweep.start(tmp_path / "s", make_spec())
    monkeypatch.setattr(worker.api, "train", lambda *a, **k: os.kill(os.getpid(), signal.SIGUSR2))
    with pytest.raises(Interrupted):
        worker.work(sweep.folder, "a", **CPU)
    assert sweep.entry("a").state.status == "interrupted"


def test_a_signal_to_a_job_that_is_finished_changes_nothing(tmp_path, make_spec, monkeypatch):
    sweep, update = Sweep.start(tmp_path / "s", make_spec()), Sweep.update
    monkeypatch.setattr(worker, "_run", lambda *a: None)

    def with_signal(*of, **changes):
        if changes.get("status") == "finished":
            os.kill(os.getpid(), signal.SIGUSR2)
        return update(*of, **changes)

    monkeypatch.setattr(Sweep, "update", with_signal)
    worker.work(sweep.folder, "a", device="cpu")
    assert sweep.entry("a").state.status == "finished"


def test_an_error_is_kept_in_one_line(tmp_path, make_spec, monkeypatch):
    sweep = Sweep.start(tmp_path / "s", make_spec("missing"))
    with pytest.raises(UserError):
        worker.work(sweep.folder, "missing", **CPU)
    [seen] = look(sweep)
    assert seen.status == "failed" and "missing.npy" in seen.error and "\n" not in seen.error
    monkeypatch.setattr(worker.api, "train", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.work(sweep.folder, "missing", **CPU)
    assert look(sweep)[0].error == "ZeroDivisionError: division by zero"


def test_a_job_has_one_worker(tmp_path, make_spec, monkeypatch):
    sweep = Sweep.start(tmp_path / "s", make_spec())
    monkeypatch.setattr("sampled_sae.sweeps.store.WAIT", 0.1)
    with sweep.locked("a"):
        assert sweep.is_held("a")
        with pytest.raises(UserError, match="another process is at work there"):
            worker.work(sweep.folder, "a", **CPU)
    assert sweep.entry("a").state.attempts == 0


def test_cancel_marks_what_has_not_begun(tmp_path, make_spec):
    sweep = Sweep.start(tmp_path / "s", make_spec("a", "b"))
    worker.work(sweep.folder, "a", **CPU)
    assert [each.status for each in cancel(sweep.folder)] == ["finished", "cancelled"]


def test_a_folder_that_became_read_only_is_one_line(tmp_path, make_spec, monkeypatch):
    Sweep.start(tmp_path / "s", make_spec())

    def refuse(path, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match="cannot write there"):
        launch(make_spec(), tmp_path / "s", workers=1, device="cpu")


def test_another_spec_in_the_same_folder_is_refused(tmp_path, make_spec):
    Sweep.start(tmp_path / "s", make_spec())
    Sweep.start(tmp_path / "s", make_spec(checkpoint_every=7, slurm={"partition": "other"}))
    assert Sweep(tmp_path / "s").spec.checkpoint_every == 7
    with pytest.raises(
        UserError, match=r"sweep.json: the sweep there has another spec: k\[0\] was 4 and is now 5; cho"
    ):
        Sweep.start(tmp_path / "s", make_spec(k=5))


def test_changed_files_are_noticed(tmp_path, make_spec):
    sweep = Sweep.start(tmp_path / "s", make_spec())
    path = sweep.path("a") / "job.json"
    content = json.loads(path.read_text())
    assert content["format_version"] == 1
    content["state"]["status"] = "finished"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="changed since it was written"):
        look(sweep)


def test_a_language_model_at_two_hook_points_with_evaluations(tmp_path):
    config = transformers.GPTNeoXConfig(**SHAPE)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    lines = [json.dumps({"text": f"{n} " + " ".join(f"the{n * i % 97}" for i in range(60))}) for n in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    spec = {
        **{
            "models": str(tmp_path / "model"),
            "layers": [0, 1],
            "hooks_per_job": 2,
            "text": str(tmp_path / "text.jsonl"),
        },
        **{"source": {"context": 20, "buffer_tokens": 800}, "steps": 20, "batch_size": 50, "heldout_tokens": 60},
        **{"d_sae": 32, "k": 4, "evaluations": {"core": {"contexts": 3}}},
    }
    sweep = Sweep.start(tmp_path / "s", SweepConfig.from_dict(completed(spec)))
    worker.work(sweep.folder, "model-layer-0-to-layer-1", **CPU)
    saes = saes_in(sweep.path("model-layer-0-to-layer-1"))
    assert [folder.parent.parent.name for folder in saes] == ["layer-0", "layer-1"]
    assert all((folder / "evals" / "core.json").exists() for folder in saes)
    # Evaluations that were interrupted are all that is left.
    sweep.update("model-layer-0-to-layer-1", status="interrupted")
    (saes[0] / "evals" / "core.json").unlink()
    before = files(saes[1])
    worker.work(sweep.folder, "model-layer-0-to-layer-1", **CPU)
    assert (saes[0] / "evals" / "core.json").exists() and files(saes[1]) == before


def test_custom_scores_and_evaluations_from_any_directory(tmp_path, make_spec, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    Path("score.py").write_text(
        "import sampled_sae as ss\n@ss.register_score('flipped')\ndef flipped(codes):\n    return -codes.sum(0)\n"
    )
    Path("width.py").write_text(EVALUATION)
    try:
        spec = make_spec(*("a",), methods="sampled:score=flipped", scores="score.py", evaluations=["width.py"])
        sweep = Sweep.start(tmp_path / "s", spec)
        monkeypatch.chdir(tmp_path)
        assert [each.status for each in look(tmp_path / "s")] == ["pending"]
        assert sweep.spec == Sweep(tmp_path / "s").spec
    finally:
        del SCORES["flipped"], EVALUATIONS["width_of_sweeps"]
