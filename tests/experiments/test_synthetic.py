"""The whole experiment at the smallest size that still says something, and its command."""

import json
from dataclasses import replace

import pytest
import torch

from sampled_sae import SAE, cli, sampled
from sampled_sae.data.synth_sae_bench import SynthSAEBenchConfig
from sampled_sae.data.synthetic import BUCKETS, SyntheticConfig
from sampled_sae.evals.similarity.detection import Detection
from sampled_sae.experiments import synthetic
from sampled_sae.experiments.synthetic import EXPERIMENTS, Experiment, grid, merge, open_data, run
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.method.config import OptimizerConfig
from sampled_sae.training.heldout import training_time_codes
from sampled_sae.utils.errors import UserError

TINY = Experiment(
    data=SyntheticConfig(d=16, features=16, p_high=0.1),
    d_sae=48,
    k=2,
    steps=300,
    batch_size=256,
    multipliers=(1, 8),
    heldout=2048,
    optimizer=OptimizerConfig(lr=5e-3, warmup_steps=20),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run("tiny", TINY, tmp_path_factory.mktemp("tiny") / "run", device="cpu", progress=False)


def test_every_sae_has_every_number(results):
    assert len(results["saes"]) == len(grid(TINY)) == 4 + 4 * 2 + 5
    wanted = {"fve_train", "fve_heldout", "fve_heldout_threshold", "l0_threshold", "dead", "recovery", "fidelity"}
    for sae in results["saes"]:
        assert wanted <= set(sae)
        assert set(sae["recovery"]) == set(BUCKETS)
        assert sae["config"]["d_sae"] == 48
    json.dumps(results, allow_nan=False)


def test_batchtopk_finds_the_strong_features_and_a_tiny_pool_does_not(results):
    by_label = {sae["label"]: sae for sae in results["saes"]}
    good, small = by_label["batchtopk"], by_label["sampled:score=l2,l=1"]
    assert good["fve_heldout_threshold"] > 0.75
    assert good["recovery"]["HF+HA"] == 1
    assert small["recovery"]["HF+HA"] < 1
    assert small["dead"] > good["dead"]
    assert small["fve_heldout"] < good["fve_heldout"] - 0.2
    assert abs(good["l0_threshold"] - 2) < 0.2
    alike = [by_label[f"sampled:score={score},l=8"]["fve_heldout"] for score in ("l2", "squared_l2")]
    assert alike[0] == pytest.approx(alike[1], abs=0.02)


def test_presets_of_the_protocol():
    labels = {cell.label for cell in grid(EXPERIMENTS["paper-table"])}
    scored = {f"sampled:score={score},l=20" for score in ("prefix", "l2")}
    assert {*scored, "entropy-l20-released70", "topk_then_batchtopk:until=0.7", "released:fraction=0.75"} <= labels
    assert {cell.label for cell in grid(EXPERIMENTS["paper-table-p20"])} == labels
    assert EXPERIMENTS["paper-table-p20"].data.p_high == 0.2
    finite = EXPERIMENTS["paper-finite"]
    assert (finite.samples, finite.d_sae, len(finite.seeds)) == (10_000, 65_536, 3)


@pytest.mark.parametrize("changes", [{"data": "p-20"}, {"buckets": "random"}, {"coefficients": "signed"}])
def test_settings_of_the_papers_data_are_refused_with_other_data(changes):
    [(name, value)] = changes.items()
    with pytest.raises(UserError, match=f"{name} = '{value}': is for the paper's data; preset 'synthsaebench'"):
        synthetic.experiment("synthsaebench", **changes)


def test_the_benchmarks_data_in_the_experiment(tmp_path):
    data = SynthSAEBenchConfig(d=16, features=60, roots=3, branching=2, depth=2, orthogonalization=5, rank=2)
    tiny = replace(TINY, data=data, steps=60, only=("batchtopk",))
    found = run("tiny", tiny, tmp_path / "run", device="cpu", progress=False)
    (sae,) = found["saes"]
    assert set(sae["recovery"]) == {"roots", "depth 1", "depth 2", "outside"} and 0 < sae["mcc"] <= 1
    assert 0 < sae["f1"] < max(sae["precision"], sae["recall"]) <= 1 and 0 < sae["uniqueness"] <= 1
    assert found["data"]["config"]["roots"] == 3
    synthetic.show(found, tmp_path / "run")
    assert "depth 2" in (tmp_path / "run" / "index.html").read_text()
    preset = EXPERIMENTS["synthsaebench"]
    assert preset.data == SynthSAEBenchConfig()
    assert {cell.config.optimizer.lr for cell in grid(preset)} == {3e-4}, "one recipe for all methods"
    assert {cell.config.auxk.dead_after for cell in grid(preset)} == {1000 * preset.batch_size}


def test_detection_selects_over_whole_batches():
    """They may be larger than the parts in which samples are made."""
    data = SynthSAEBenchConfig(d=16, features=60, roots=3, branching=2, depth=2, orthogonalization=5, rank=2)
    settings = replace(TINY, data=data, batch_size=1024, heldout=2048)
    measure = synthetic.Measurement(open_data(data, torch.device("cpu")), settings)
    config = sampled(d_sae=32, k=3, score="l2", l=2)
    sae = SAE(InferenceConfig(16, 32, k=3, training=config))
    with torch.no_grad():
        sae.W_dec.copy_(measure.dictionary[:32])
        sae.W_enc.copy_(sae.W_dec.T)
    generator, expected = torch.Generator(), Detection(sae.W_dec, measure.dictionary)
    codes = [part.dense() for _, part in measure.data.parts(1, 2048, "heldout")]
    for x, active in zip(measure.heldout.split(1024), (torch.cat(codes) > 0).split(1024), strict=True):
        expected.add(training_time_codes(sae, x, config, generator), active)
    assert measure._detection(sae) == expected.result()


def test_a_finite_sample_is_memorized(tmp_path):
    small = replace(TINY, samples=128, batch_size=128, d_sae=1024, only=("batchtopk",))
    (sae,) = run("tiny", small, tmp_path / "run", device="cpu", progress=False)["saes"]
    assert sae["fve_train"] > sae["fve_heldout"] + 0.05


def test_one_member_alone_and_merged_is_the_same(results, tmp_path):
    parts = []
    for label in ("batchtopk", "sampled:score=uniform,l=8"):
        parts.append(tmp_path / label.replace(":", "-"))
        run("tiny", replace(TINY, only=(label,)), parts[-1], device="cpu", progress=False)
    merged = merge(parts, tmp_path / "merged")
    for sae in merged["saes"]:
        [other] = [s for s in results["saes"] if s["name"] == sae["name"]]
        assert {k: v for k, v in sae.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}
    assert [origin["device"] for origin in merged["origins"]] == ["cpu"]
    assert len((tmp_path / "merged" / "log.jsonl").read_text().splitlines()) == 2 * 101
    with pytest.raises(UserError, match="is in more than one of the runs"):
        merge([parts[0], parts[0]], tmp_path / "twice")
    run("tiny", replace(TINY, only=("topk",), steps=20), tmp_path / "short", device="cpu", progress=False)
    with pytest.raises(UserError, match=r"not the same experiment: train\.steps was 300 and is now 20"):
        merge([parts[0], tmp_path / "short"], tmp_path / "mixed")


def test_presets_say_what_the_documents_say():
    paper, table = EXPERIMENTS["paper"], EXPERIMENTS["paper-table"]
    assert (paper.data.d, paper.data.features, paper.samples, paper.d_sae, paper.k) == (256, 1024, 10_000, 65_536, 60)
    assert paper.steps == 50_000
    assert (table.d_sae, table.k, table.steps, table.samples, len(table.seeds)) == (4096, 60, 5000, None, 3)
    assert "batchtopk lr=0.003 dead_after=400000" in [cell.label for cell in grid(table)]
    with pytest.raises(UserError, match="only = 'Top': not in this grid; its SAEs are batchtopk, topk"):
        grid(replace(table, only=("Top",)))


def test_the_command_prints_a_table_and_writes_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(synthetic.EXPERIMENTS, "demo", TINY)
    words = ["synthetic", "--preset", "demo", "--steps", "10", "--device", "cpu", "--seeds", "0", "1"]
    cli.main([*words, "--only", "batchtopk", "topk", "--out", str(tmp_path / "run")])
    printed = capsys.readouterr().out
    assert "batchtopk" in printed
    assert "LF+" in printed
    assert str(tmp_path / "run" / "index.html") in printed
    assert (tmp_path / "run" / "index.html").stat().st_size > 10**6
    cli.main([*words, "--only", "batchtopk", "topk", "--out", str(tmp_path / "run"), "--resume"])
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--scores", "nothing", "--out", str(tmp_path / "other")])
    assert stop.value.code == 2
    assert "score = 'nothing': unknown" in capsys.readouterr().err


def test_the_other_reading_of_the_papers_numbers(tmp_path, monkeypatch):
    monkeypatch.setitem(synthetic.EXPERIMENTS, "demo", TINY)
    words = ["synthetic", "--steps", "3", "--device", "cpu", "--only", "topk", "--data", "p-20", "--buckets", "random"]
    cli.main([*words, "--coefficients", "non_negative", "--samples", "500", "--out", str(tmp_path / "run")])
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    wanted = {"p_high": 0.2, "buckets": "random", "coefficients": "non_negative", "d": 16}
    assert wanted.items() <= results["data"]["config"].items()
    assert results["train"]["samples"] == 500
