"""All evaluations by the command line, on SAEs of a tiny model; what each measures is tested beside its code."""

import csv
import json
import shutil
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from sampled_sae import cli
from sampled_sae.config import Config
from sampled_sae.evals import EVALUATIONS, Evaluation
from sampled_sae.evals.absorption import evaluate
from sampled_sae.evals.results import load_live
from sampled_sae.utils.measures import Metric
from tests.models.tiny_models import make_model, make_tokenizer

SMALL = ["--context", "20", "--buffer-tokens", "800", "--heldout-tokens", "60", "--batch-size", "50", "--latents", "64"]
SMALL += ["--k", "4", "--device", "cpu", "--tokens", "600", "--methods", "batchtopk", "topk"]


def run(*words) -> None:
    cli.main([str(word) for word in words])


def refused(line, capsys, *words) -> None:
    with pytest.raises(SystemExit) as stop:
        run(*words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and line in error and "Traceback" not in error


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, a text, labelled texts and a run of two SAEs."""
    place = tmp_path_factory.mktemp("place")
    make_model("gpt_neox").save_pretrained(place / "model")
    make_tokenizer().save_pretrained(place / "model")
    lines = [json.dumps({"text": f"{n} " + " ".join(f"the{n * i % 97}" for i in range(30))}) for n in range(60)]
    (place / "text.jsonl").write_text("\n".join(lines))
    labelled = [{"text": f"{n} the " + ("a " if n % 2 else "b ") * 8, "label": "ab"[n % 2]} for n in range(200)]
    (place / "labels.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    source = ("--model", place / "model", "--text", place / "text.jsonl", "--layer", 1)
    run("train", *source, "--out", place / "run", *SMALL)
    return place


def test_several_evaluations_in_one_command(place, capsys):
    words = ("eval", place / "run", "--evals", "core,probing", "--text", place / "text.jsonl", "--contexts", 3)
    words += (
        "--probing.datasets",
        place / "labels.jsonl",
        "--probing.k",
        1,
        2,
        "--probing.tokens",
        30,
        "--device",
        "cpu",
    )
    capsys.readouterr()
    run(*words)
    shown = capsys.readouterr().out
    assert "CE recovered" in shown and "residual stream" in shown and shown.count("batchtopk-s0") == 2
    evals = place / "run" / "saes" / "topk-s0" / "evals"
    probing = json.loads((evals / "probing.json").read_text())
    assert probing["saebench"]["eval_type_id"] == "sparse_probing" and probing["sae"]["seed"] == 0
    assert load_live(evals.parent, 64).mask is not None
    table = list(csv.DictReader((place / "run" / "evals" / "table.csv").open()))
    assert {row["evaluation"] for row in table} == {"core", "probing"} and {row["layer"] for row in table} == {"1"}
    top = [row for row in table if row["sae"] == "topk-s0" and row["metric"] == "probing_2"]
    assert float(top[0]["value"]) == probing["result"]["summary"]["top"]["2"]["accuracy"]["mean"]
    files = {path.parent.name for path in (place / "run" / "evals" / "saebench").rglob("*_eval_results.json")}
    assert files == {"core", "sparse_probing"}

    before = (evals / "probing.json").stat().st_mtime_ns, (evals / "core.json").stat().st_mtime_ns
    run(*words, "--probing.contexts-at-once", 3)  # what decides no number
    assert before == ((evals / "probing.json").stat().st_mtime_ns, (evals / "core.json").stat().st_mtime_ns)
    run(*words, "--probing.seeds", 1)
    assert before[1] == (evals / "core.json").stat().st_mtime_ns != (evals / "probing.json").stat().st_mtime_ns


def test_a_model_that_cannot_spell(place, capsys):
    words = ("eval", place / "run", "--evals", "absorption", "--device", "cpu", "--out", place / "out")
    refused("reads at most 64 tokens at once", capsys, *words)
    run(*words, "--absorption.lines", 1)
    assert "Not evaluable" in capsys.readouterr().out
    table = list(csv.DictReader((place / "out" / "table.csv").open()))
    assert {row["metric"] for row in table if row["evaluation"] == "absorption"} == {"absorption_letters"}


def test_bad_input_is_one_line(place, capsys):
    refused("evals = 'prob': must be among core, probing", capsys, "eval", place / "run", "--evals", "core", "prob")
    refused("evals: must name at least one", capsys, "eval", place / "run", "--evals", ",")
    refused("text: is missing; core reads one", capsys, "eval", place / "run")
    refused("text: is missing; autointerp reads one", capsys, "eval", place / "run", "--evals", "autointerp")
    missing = (
        "eval",
        place / "run",
        "--evals",
        "probing",
        "--probing.datasets",
        place / "none.jsonl",
        "--probing.tokens",
        9,
    )
    refused("none.jsonl", capsys, *missing, "--device", "cpu")
    text = ("--text", place / "text.jsonl", "--device", "cpu")
    refused("contexts = 0: must be at least 1", capsys, "eval", place / "run", *text, "--contexts", 0)
    refused("layer = 0: ", capsys, "eval", place / "run", *text, "--contexts", 2, "--layer", 0)
    longer = ("--contexts", 3, "--context", 60)
    refused("but for its first 3 contexts of 20 tokens; give 1", capsys, "eval", place / "run", *text, *longer)
    other = place / "run" / ".." / "text.jsonl"  # the same file by another name
    refused("was trained on this text", capsys, "eval", place / "run", "--text", other, "--contexts", 30)


def test_other_content_is_another_question(place, tmp_path):
    labels = tmp_path / "labels.jsonl"
    labels.write_text((place / "labels.jsonl").read_text())
    words = ("eval", place / "run", "--evals", "probing", "--probing.datasets", labels, "--probing.tokens", 30)
    run(*words, "--device", "cpu", "--out", tmp_path)
    file = place / "run" / "saes" / "topk-s0" / "evals" / "probing.json"
    before = json.loads(file.read_text())["result"]["summary"]["top"]["10"]["accuracy"]["mean"]
    lines = [json.loads(line) for line in labels.read_text().splitlines()]
    mixed = [line | {"label": "ab"[(n // 2) % 2]} for n, line in enumerate(lines)]
    labels.write_text("\n".join(map(json.dumps, mixed)))
    run(*words, "--device", "cpu", "--out", tmp_path)
    assert json.loads(file.read_text())["result"]["summary"]["top"]["10"]["accuracy"]["mean"] < before


def test_an_interrupted_evaluation_keeps_what_is_finished(place, monkeypatch, tmp_path):
    measure, calls = evaluate.measure_sae, []

    def once(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    words = ("eval", place / "run", "--evals", "absorption", "--absorption.lines", 1, "--absorption.seed", 7)
    monkeypatch.setattr(evaluate, "measure_sae", once)
    with pytest.raises(SystemExit) as stop:
        run(*words, "--device", "cpu", "--out", tmp_path)
    assert stop.value.code == 130
    run(*words, "--device", "cpu", "--out", tmp_path)
    assert len(calls) == 3  # one of the two SAEs was left


def test_a_damaged_result_and_what_a_killed_save_leaves(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    saes = tmp_path / "run" / "saes"
    shutil.copytree(saes / "topk-s0", saes / ".topk-s0.x.tmp")
    (saes / ".topk-s0.x.tmp" / "cfg.json").unlink()
    (saes / "topk-s0" / "evals").mkdir(exist_ok=True)
    (saes / "topk-s0" / "evals" / "core.json").write_text("[]")
    run("eval", tmp_path / "run", "--text", place / "text.jsonl", "--contexts", 2, "--device", "cpu")
    assert json.loads((saes / "topk-s0" / "evals" / "core.json").read_text())["result"]["contexts"] == 2


def test_other_weights_are_measured_anew(place, tmp_path):
    shutil.copytree(place / "run" / "saes", tmp_path / "saes", ignore=shutil.ignore_patterns("evals"))
    words = ("eval", tmp_path / "saes", "--text", place / "text.jsonl", "--contexts", 2, "--device", "cpu", "--no-loss")
    run(*words)
    one, two = (tmp_path / "saes" / name for name in ("batchtopk-s0", "topk-s0"))
    before = [(sae / "evals" / "core.json").read_text() for sae in (one, two)]
    for name in ("sae_weights.safetensors", "sampled_sae.json"):  # the second holds a checksum of the first
        shutil.copy(two / name, one)
    run(*words)
    after = [json.loads((sae / "evals" / "core.json").read_text()) for sae in (one, two)]
    assert after[0]["result"]["normal"] != json.loads(before[0])["result"]["normal"]
    assert after[0]["weights"] == after[1]["weights"]
    assert (two / "evals" / "core.json").read_text() == before[1]


def test_by_default_no_more_than_was_held_out(place, tmp_path):
    shutil.copytree(place / "run" / "saes" / "topk-s0", tmp_path / "sae", ignore=shutil.ignore_patterns("evals"))
    run("eval", tmp_path / "sae", "--text", place / "text.jsonl", "--device", "cpu", "--no-loss")
    assert json.loads((tmp_path / "sae" / "evals" / "core.json").read_text())["result"]["contexts"] == 3


def test_the_table_of_several_saes_lies_where_they_lie(place, tmp_path):
    shutil.copytree(place / "run" / "saes", tmp_path / "saes", ignore=shutil.ignore_patterns("evals"))
    folders = sorted((tmp_path / "saes").iterdir())
    run("eval", *folders, "--text", place / "text.jsonl", "--contexts", 2, "--device", "cpu", "--no-loss")
    assert (tmp_path / "saes" / "evals" / "table.csv").exists()
    assert not (folders[0] / "evals" / "table.csv").exists()

    apart = shutil.copytree(folders[1], tmp_path / "elsewhere" / "sae")
    run("eval", folders[0], apart, "--text", place / "text.jsonl", "--contexts", 2, "--device", "cpu", "--no-loss")
    assert (folders[0] / "evals" / "table.csv").exists()


class Norms(NamedTuple):
    decoder: float


@dataclass(frozen=True)
class NormsConfig(Config):
    factor: float = 1.0


class MeasureNorms(Evaluation):
    name, title, config = "norms", "Norms", NormsConfig
    metrics = (Metric("decoder_norm", "Decoder norm", "Norm of the decoder.", None, ("decoder",)),)

    def run(self, job, config):
        job.progress(1, 1)
        yield from [Norms(config.factor * float(sae.W_dec.detach().norm())) for sae in job.saes]


def test_a_new_evaluation_is_one_class(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(EVALUATIONS, "norms", MeasureNorms())
    shutil.copytree(place / "run" / "saes", tmp_path / "saes", ignore=shutil.ignore_patterns("evals"))
    run("eval", tmp_path / "saes", "--evals", "norms", "--device", "cpu")
    found = json.loads((tmp_path / "saes" / "topk-s0" / "evals" / "norms.json").read_text())
    assert found["result"]["decoder"] == pytest.approx(8, rel=1e-3)  # the root of 64 unit rows
    assert "Decoder norm" in capsys.readouterr().out
    table = list(csv.DictReader((tmp_path / "saes" / "evals" / "table.csv").open()))
    assert [row["metric"] for row in table] == ["decoder_norm"] * 2
