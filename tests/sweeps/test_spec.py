"""A declarative file -> a checked spec -> jobs that share streams of activations."""

import json
import sys

import pytest

from sampled_sae.sweeps.spec import SweepConfig, completed, read_spec
from sampled_sae.sweeps.store import jobs_of
from sampled_sae.utils.errors import UserError

SPEC = {"models": "tiny", "layers": [1, 3], "text": "stdlib", "steps": 10, "d_sae": 64, "k": 4}


def spec(**changes) -> SweepConfig:
    return SweepConfig.from_dict(completed({**SPEC, **changes}))


def test_one_job_per_hook_point_with_all_methods_sizes_and_seeds():
    jobs = jobs_of(spec(methods=["batchtopk", "sampled:l=2/3"], k=[4, 8], d_sae=[32, 64], seeds=[0, 1]))
    assert [(job.name, job.hooks) for job in jobs] == [("tiny-layer-1", (1,)), ("tiny-layer-3", (3,))]
    names = [sae.name for sae in jobs[0].saes]
    assert len(set(names)) == 2 * 2 * 2 + 2 * 2 * 2 * 2
    assert names[0] == "batchtopk-d_sae32-k4-s0" and "l2-l3-d_sae64-k8-s1" in names
    assert jobs[0].saes == jobs[1].saes
    assert {(sae.d_sae, sae.k, sae.seed) for sae in jobs[0].saes} == {
        (d_sae, k, seed) for d_sae in (32, 64) for k in (4, 8) for seed in (0, 1)
    }


def test_the_same_spec_gives_the_same_jobs():
    assert jobs_of(spec(seeds=[3, 1])) == jobs_of(spec(seeds=[3, 1]))


def test_a_method_keeps_its_own_size():
    [job, _] = jobs_of(spec(methods=["topk:k=2", "batchtopk"], k=[4, 8]))
    assert [sae.k for sae in job.saes] == [2, 4, 8]


def test_hook_points_and_saes_per_job():
    jobs = jobs_of(spec(layers=[0, 1, 2], hooks=["model.norm"], hooks_per_job=2, seeds=[0, 1, 2], saes_per_job=2))
    assert [job.name for job in jobs] == [
        "tiny-layer-0-to-layer-1-part-1",
        "tiny-layer-0-to-layer-1-part-2",
        "tiny-layer-2-to-model.norm-part-1",
        "tiny-layer-2-to-model.norm-part-2",
    ]
    assert [len(job.saes) for job in jobs] == [2, 1, 2, 1]
    assert jobs[2].hooks == (2, "model.norm")
    assert len({sae.name for job in jobs[:2] for sae in job.saes}) == 3


def test_models_with_their_own_layers_and_equal_last_parts():
    models = ["a/tiny", {"name": "b/tiny", "layers": [7], "dtype": "bfloat16"}]
    jobs = jobs_of(spec(models=models, layers=7))
    assert [(job.name, job.model, job.hooks, job.dtype) for job in jobs] == [
        ("tiny-layer-7", "a/tiny", (7,), None),
        ("tiny-layer-7-2", "b/tiny", (7,), "bfloat16"),
    ]


def test_a_cache_is_written_by_jobs_that_the_others_need():
    jobs = jobs_of(spec(methods=["batchtopk", "topk"], saes_per_job=1, cache={"parts": 2}))
    names = ["cache-1", "cache-2", "part-1", "part-2"]
    assert [job.name for job in jobs] == [f"tiny-layer-{layer}-{name}" for layer in (1, 3) for name in names]
    assert [(len(job.saes), str(job.part), job.needs) for job in jobs[:2]] == [(0, "1/2", ()), (0, "2/2", ())]
    assert [(len(job.saes), job.part, job.needs) for job in jobs[2:4]] == [(1, None, (jobs[0].name, jobs[1].name))] * 2
    assert {job.cache for job in jobs[:4]} == {"caches/tiny-layer-1-cache-1"}
    assert [job.name for job in jobs_of(spec(layers=1, cache={}))] == ["tiny-layer-1-cache", "tiny-layer-1"]
    assert spec(cache={}, batch_size=32, heldout_tokens=7).cached_tokens() == 327
    assert spec(cache={"tokens": 55}).cached_tokens() == 55


def test_files_of_activations_instead_of_models():
    given = {"activations": ["runs/a.npy", "b"], "steps": 5, "key": "x"}
    jobs = jobs_of(SweepConfig.from_dict(completed(given)))
    assert [(job.name, job.activations) for job in jobs] == [("a", "runs/a.npy"), ("b", "b")]


def test_yaml_and_json_give_the_same(tmp_path):
    settings = {**SPEC, "optimizer": {"lr": 3e-4}, "evaluations": ["core"], "slurm": {"partition": "gpu"}}
    (tmp_path / "a.json").write_text(json.dumps(settings))
    (tmp_path / "a.yaml").write_text(
        "models: tiny\nlayers: [1, 3]\ntext: stdlib\nsteps: 10\nd_sae: 64\nk: 4\n"
        "optimizer: {lr: 3e-4}  # a text in YAML 1.1\nevaluations:\n  core:\nslurm:\n  partition: gpu\n"
    )
    assert read_spec(tmp_path / "a.yaml") == read_spec(tmp_path / "a.json")
    assert read_spec(tmp_path / "a.yaml").optimizer.lr == 3e-4
    assert SweepConfig.from_dict(read_spec(tmp_path / "a.json").to_dict()) == read_spec(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"layer": [1]}, "layer = [1]: no such field; did you mean layers? SweepConfig has models, layers,"),
        ({"methods": ["batchtopc"]}, "methods = 'batchtopc': unknown method 'batchtopc'; the methods are batchtopk,"),
        ({"methods": ["sampled:score=l3"]}, "score = 'l3': "),
        ({"k": [0]}, "k[0] = 0: must be at least 1"),
        ({"k": [4, 4]}, "k = (4, 4): must name each one once"),
        ({"seeds": []}, "seeds = (): must name at least one"),
        ({"tokens": 100}, "steps = 10, tokens = 100: give one of the two"),
        ({"text": None}, "text = None: models need a text"),
        ({"layers": []}, "layers: are missing for tiny; give layers, or hooks"),
        ({"activations": "a.npy"}, "models and activations: give one of the two"),
        ({"evaluations": ["cor"]}, "evals = 'cor': must be among core,"),
        (
            {"evaluations": {"core": {"contexs": 3}}},
            "evaluations.core: contexs = 3: no such field; did you mean contexts?",
        ),
        ({"cache": {}, "hooks_per_job": 2}, "hooks_per_job = 2: must be 1 with a cache, which holds one hook point"),
        ({"cache": {"parts": 0}}, "cache.parts = 0: must be at least 1"),
        ({"source": {"hooks": [1]}}, "source.hooks = (1,): set layers or hooks of the sweep instead"),
        ({"slurm": {"gpus_per_job": -1}}, "slurm.gpus_per_job = -1: must not be negative"),
        ({"methods": ["batchtopk"] * 2}, "methods = ('batchtopk', 'batchtopk'): must name each one once"),
    ],
)
def test_a_mistake_is_one_line(changes, line):
    with pytest.raises(UserError) as caught:
        spec(**changes)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.yaml", "k: 4\nk: 8\n", "k: is given twice"),
        ("a.yaml", "k: [4\n", "not valid YAML"),
        ("a.yaml", "- 1\n", "must hold named fields"),
        ("a.yaml", "a: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("a.json", "{", "not valid JSON"),
        ("a.toml", "", "must be a file that ends in .yaml, .yml, .json"),
        ("missing.yaml", None, "no such file"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, name, text, line):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        read_spec(tmp_path / name)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_yaml_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("k: 4\n")
    with pytest.raises(UserError, match=r"yaml is missing; pip install .*\[cluster\]'"):
        read_spec(tmp_path / "a.yaml")
