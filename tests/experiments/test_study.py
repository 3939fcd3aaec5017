"""A study on a tiny language model, interrupted and continued; its design, and the project's own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sampled_sae import cli
from sampled_sae.evals.absorption.schema import LetterResult
from sampled_sae.experiments import study
from sampled_sae.experiments.design import load_study, plan, runs_of
from sampled_sae.experiments.study import Material, run_study
from sampled_sae.reporting.study import Run, read_rows
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from tests.models.tiny_models import make_model, save

DESIGN = Path(__file__).parents[2] / "docs" / "results" / "design.json"
WORDS = ("the", "cat", "sat", "on", "a", "mat", "while", "other", "birds", "gathered", "there", "and", "then", "flew")


def documents(seed):
    generator = torch.Generator().manual_seed(seed)
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (40,), generator=generator)) for _ in range(60)]


@pytest.fixture(scope="module")
def design(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    model = save(make_model("llama"), folder / "model")
    plain = {
        "tokens": 1280,
        "batch_size": 128,
        "settings": {"tiny": {"model": str(model), "layer": 1, "d_sae": 48, "k": 4, "context": 32}},
        "methods": {
            "batchtopk": {"spec": "batchtopk", "role": "baseline"},
            "l2-l6": {"spec": "sampled:score=l2,l=6", "role": "paper"},
            "l2-l3": {"spec": "sampled:score=l2,l=3", "role": "paper", "rate_of": "l2-l6"},
        },
        "stages": [
            {
                "name": "rates",
                "settings": ["tiny"],
                "methods": ["batchtopk", "l2-l6"],
                "seeds": [0],
                "factors": [0.5, 1],
            },
            {"name": "seeds", "settings": ["tiny"], "methods": ["batchtopk", "@leaders", "l2-l3"], "seeds": [0, 1]},
        ],
        "claims": [{"name": "H1", "text": "pools are worse", "metric": "fvu", "method": "l2-l6", "expect": "worse"}],
    }
    path = folder / "design.json"
    path.write_text(json.dumps(plain))
    return path


def test_the_whole_study_continues_where_it_stopped(design, tmp_path, monkeypatch):
    declared = load_study(design)
    material = Material(documents(0), documents(1), documents(2), tokens=512, harvest={"buffer_tokens": 512})
    monkeypatch.setattr(study.api, "activations", quiet(study.api.activations))
    out = tmp_path / "out"
    path = run_study(declared, material, out, only=["rates"], device="cpu")
    rows = read_rows(path)
    assert {(row.run.method, row.run.factor, row.measure) for row in rows} == {
        (method, factor, measure)
        for method in ("batchtopk", "l2-l6")
        for factor in (0.5, 1.0)
        for measure in ("select", "core")
    }
    trained = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
    run_study(declared, material, out, device="cpu")
    assert all(file.stat().st_mtime_ns == when for file, when in trained.items()), "trained or calibrated again"
    rows = read_rows(path)
    by_seed = {run.seed: run for run in runs_of(declared, declared.stages[1], rows) if run.method == "l2-l3"}
    best = min(
        (row for row in rows if row.run.method == "l2-l6" and row.measure == "select"), key=lambda r: r.values["fvu"]
    )
    assert by_seed[0].factor == by_seed[1].factor == best.run.factor, "the rate of l2-l6"
    assert not list((out / "seeds").rglob("batchtopk-x*-s0")), "seed 0 is that of the first stage"
    sae = SAE.load(next((out / "seeds").rglob("l2-l3-x*-s1")))
    assert next(row for row in rows if row.run == by_seed[1] and row.measure == "select").values["l0"] == pytest.approx(
        4, abs=0.05
    )
    assert sae.cfg.training.seed == 1
    size = path.stat().st_size
    run_study(declared, material, out, device="cpu")
    assert path.stat().st_size == size
    lines = path.read_text().splitlines(keepends=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "results.jsonl").write_text("".join(lines[:-1]))
    run_study(declared, replace(material, keep=False), other, device="cpu")
    assert (other / "results.jsonl").read_text().splitlines(keepends=True) == lines, (
        "trained again, with the same result"
    )
    assert not list(other.rglob("*.safetensors"))
    page = tmp_path / "results.md"
    page.write_text("# Answer\n\nText.\n")
    study.write_results(declared, out, page)
    text = page.read_text()
    assert text.startswith("# Answer\n\nText.\n") and "| H1 |" in text and "<!-- begin summary-tiny -->" in text
    study.write_results(declared, out, page)
    assert page.read_text() == text


def quiet(function):
    return lambda *args, **settings: function(*args, progress=False, **settings)


def test_the_projects_design_is_that_of_the_protocol(capsys):
    declared = load_study(DESIGN)
    stages = {name: saes for name, saes, _ in plan(declared)}
    protocol = (DESIGN.parents[1] / "protocol.md").read_text()
    assert stages["rates"] == 51 and stages["pools"] == 21 and stages["seeds"] == 50 and stages["finalists"] == 0
    assert sum(stages.values()) == 298 and "core metrics, 298 SAEs" in protocol
    assert all(f"| {claim.name} |" in protocol for claim in declared.claims)
    cli.main(["study", str(DESIGN)])
    assert "298 SAEs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("stages"), "must be an object with tokens, batch_size, settings, methods and stages"),
        (
            lambda d: d["stages"][0].update(methods=["topk"]),
            r"stage 'rates', methods = 'topk': must be among batchtopk, l2",
        ),
        (lambda d: d["stages"][0].update(seeds=[]), "seeds"),
        (lambda d: d["methods"]["l2-l3"].update(spec="none"), "unknown method 'none'"),
        (lambda d: d["methods"]["l2-l3"].update(rate_of="none"), "rate_of = 'none': must be among"),
        (lambda d: d["settings"]["tiny"].update(latents=3), "latents"),
    ],
)
def test_what_is_wrong_with_a_design_is_named(design, tmp_path, change, message):
    plain = json.loads(design.read_text())
    change(plain)
    (tmp_path / "design.json").write_text(json.dumps(plain))
    with pytest.raises(UserError, match=message):
        load_study(tmp_path / "design.json")


def test_texts_and_results_are_needed(design, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["study", str(design), "--do", "run", "--out", str(tmp_path), "--train-text", "stdlib"])
    assert "select_text: must name a text" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["study", str(design), "--do", "tables", "--out", str(tmp_path)])
    assert "holds no results; run the study first" in capsys.readouterr().err


def test_lines_have_single_datasets_and_letters():
    def letter(name, fraction, why=None, main=(5, 7)):
        found = LetterResult(name, why, 9, 3, 0.9, [0.25, 0.5, 0.75], [5, 7, 8], list(main), 3, fraction, 0.0, 0, [], 0)
        return found._asdict()

    letters = [letter("a", 0.125), letter("b", 0.5, main=()), letter("c", None, "too few words")]
    run = Run("tiny", "topk", 2.0, 1)
    made = {"letters": letters, "fraction": {"mean": 0.3125, "std": 0.1}, "main_f1": {"mean": 0.25, "std": None}}
    plain = json.loads(study.line(run, "absorption", made))
    assert plain["values"] == {"absorption": 0.3125, "absorption_f1": 0.25} and plain["factor"] == 2.0
    assert plain["units"] == {
        "a": ["", {"absorption": 0.125, "absorption_f1": 0.5}],
        "b": ["", {"absorption": 0.5, "absorption_f1": 0.0}],
    }
    top = {str(k): {"accuracy": {"mean": 0.5 + k / 10, "std": None}} for k in (1, 2)}
    dataset = {"name": "sae-probes:hist_fig_ismale", "source": "sae-probes:hist", "summary": {"top": top}}
    plain = json.loads(study.line(run, "finalists", {"datasets": [dataset], "summary": {"top": top}}))
    assert plain["units"] == {dataset["name"]: ["sae-probes:hist", {"probing_1": 0.6, "probing_2": 0.7}]}
    assert plain["values"] == {"probing_1": 0.6, "probing_2": 0.7} and plain["measure"] == "finalists"
