import inspect

import pytest

import sampled_sae as ss
from sampled_sae.method import presets
from sampled_sae.method.config import Annealed, Fraction, PoolConfig, SAEConfig, Scope
from sampled_sae.method.presets import PRESETS, label, named, parameters, parse_methods


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_a_learning_rate(name):
    config = PRESETS[name](d_sae=48, k=4, lr=1e-3)
    assert config == PRESETS[name](48, 4, optimizer=ss.OptimizerConfig(lr=1e-3))
    assert PRESETS[name](48, 4).optimizer == ss.OptimizerConfig()
    with pytest.raises(ss.UserError, match=r"lr = 0.1 and optimizer = .*: set only one of the two"):
        PRESETS[name](48, 4, lr=0.1, optimizer=ss.OptimizerConfig())
    with pytest.raises(ss.UserError, match=r"lr = 0.0: must be a positive number"):
        PRESETS[name](48, 4, lr=0.0)


def test_specs_are_presets_with_grids_of_parameters():
    auxk = ss.AuxKConfig(dead_after=1000)
    made = parse_methods(["batchtopk", "sampled:score=l2/entropy,l=5/30"], d_sae=480, k=4, auxk=auxk)
    assert made == [
        ss.batchtopk(480, 4, auxk=auxk),
        *(ss.sampled(480, 4, score, l, auxk=auxk) for score in ("l2", "entropy") for l in (5, 30)),
    ]
    assert parse_methods(["released:fraction=0.4,at=0.5"], d_sae=48, k=4) == [ss.released(48, 4, fraction=0.4, at=0.5)]
    assert parse_methods(["sampled:pick=sample"], d_sae=48, k=4, seeds=(1, 2)) == [
        ss.sampled(48, 4, pick="sample", seed=seed) for seed in (1, 2)
    ]
    assert set(parameters("sampled")) == {
        *("d_sae", "k", "score", "l", "pick", "memory", "inference_size", "lr", "prefixes")
    }


def test_nested_prefixes_are_shares_or_widths_of_any_preset():
    assert ss.matryoshka(64, 4).prefixes == (2, 6, 14, 30, 64)
    assert ss.matryoshka(64, 4, (0.25, 48)).prefixes == ss.matryoshka(64, 4, (16, 48, 64)).prefixes == (16, 48, 64)
    made = parse_methods(["matryoshka:prefixes=0.25+48/8,k=2", "sampled:l=3,prefixes=0.5+1"], d_sae=64, k=4)
    assert [config.prefixes for config in made] == [(16, 48, 64), (8, 64), (32, 64)]
    assert [label(config) for config in made] == ["matryoshka-16-48", "matryoshka-8", "matryoshka-32-l2-l3"]
    assert label(ss.matryoshka(64, 4)) == "matryoshka"
    assert label(ss.topk(64, 4, prefixes=ss.matryoshka(64, 4).prefixes)) == "matryoshka-topk"
    for bad in ((48, 16), (0.5, 0.5), (65,)):
        with pytest.raises(ss.UserError, match=r"^prefixes = .*: must be ascending widths that end with d_sae = 64$"):
            ss.matryoshka(64, 4, bad)


@pytest.mark.parametrize(
    "d_sae, prefixes, line",
    [
        (16, {}, "d_sae = 16: must be at least 32, so that the prefix 0.03125 has a latent"),
        (64, {"prefixes": (0.01, 8)}, "d_sae = 64: must be at least 100, so that the prefix 0.01 has a latent"),
        (64, {"prefixes": (0, 8)}, "prefixes[0] = 0: must be at least 1"),
        (64, {"prefixes": 8}, "prefixes = 8: must be a list"),
        (64, {"prefixes": "8"}, "prefixes = '8': must be a list"),
        (64, {"prefixes": ["8"]}, "prefixes[0] = '8': must be a whole number"),
        (0, {}, "d_sae = 0: must be at least 1"),
        ("64", {}, "d_sae = '64': must be a whole number"),
        (None, {}, "d_sae = None: must be a whole number"),
    ],
)
def test_wrong_prefixes_are_one_line(d_sae, prefixes, line):
    with pytest.raises(ss.UserError) as error:
        ss.matryoshka(d_sae, 4, **prefixes)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_scores_with_a_memory_and_learned_gates_are_methods():
    made = parse_methods(["sampled:score=l2/entropy,memory=0.9/0.99", "sampled:score=gate,pick=sample"], d_sae=64, k=4)
    assert [label(config) for config in made][1:] == [
        "l2-l5-memory0.99",
        "entropy-l5-memory0.9",
        "entropy-l5-memory0.99",
        "gate-l5-sampled",
    ]
    assert [config.pool.memory for config in made] == [0.9, 0.99, 0.9, 0.99, None]


def test_a_spec_has_precedence_over_shared_settings():
    optimizer = ss.OptimizerConfig(lr=1e-3, eps=1e-6)
    (made,) = parse_methods(["topk:lr=0.01,k=8"], d_sae=48, k=4, optimizer=optimizer)
    assert made == ss.topk(48, 8, optimizer=ss.OptimizerConfig(lr=0.01, eps=1e-6))
    assert parse_methods(["topk:lr=0.01"], d_sae=48, k=4, lr=0.1) == [ss.topk(48, 4, lr=0.01)]


def test_names_tell_a_grid_of_sizes_and_rates_apart():
    made = parse_methods(["topk:k=4/8,lr=0.001/0.01", "batchtopk"], d_sae=48, k=4, seeds=(0, 1))
    names = [config.name for config in named(made, seed=0)]
    assert names[:3] == ["topk-k4-lr0.001-s0", "topk-k4-lr0.001-s1", "topk-k4-lr0.01-s0"]
    assert names[-2:] == ["batchtopk-s0", "batchtopk-s1"]
    assert len(set(names)) == len(made) == 10
    assert label(made[0]) == "topk"


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("gated", "unknown method 'gated'; the methods are batchtopk, topk, topk_then_batchtopk, matryoshka,"),
        ("", "unknown method ''"),
        ("topk:l=5", "'l=5': must be parameter=value, each parameter once; the parameters are d_sae, k, lr"),
        ("sampled:l", "'l': must be parameter=value"),
        ("sampled:l=1,l=2", "'l=2': must be parameter=value, each parameter once"),
        ("sampled:l=five", "l = 'five': must be a number"),
        ("sampled:l=5/", "l = '': must be a number"),
        ("topk:k=2.5", "k = '2.5': must be a whole number"),
        ("topk:prefixes=8+half", "prefixes = '8+half': must be a number"),
        ("matryoshka:prefixes=0", "prefixes[0] = 0: must be at least 1"),
        ("sampled:l=0.5", "l = 0.5: must be a number of at least 1"),
        ("sampled:pick=best", "pick = 'best': must be 'top' or 'sample'"),
        ("topk:k=64", "k = 64: must be at most d_sae = 48"),
    ],
)
def test_invalid_specs_get_one_line(spec, line):
    with pytest.raises(ss.UserError) as caught:
        parse_methods([spec], d_sae=48, k=4)
    assert str(caught.value).startswith(f"methods = {spec!r}: {line}")
    assert "\n" not in str(caught.value)


def test_the_help_of_the_command_line_names_every_method():
    from sampled_sae.cli import train

    assert all(name in inspect.getsource(train.Train) for name in PRESETS)


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ("batchtopk", "batchtopk"),
        ("topk_then_batchtopk:until=0.5", "topk_then_batchtopk:until=0.5"),
        ("topk_then_batchtopk", "topk_then_batchtopk"),
        ("sampled", "sampled:score=l2,l=5"),
        ("sampled:score=entropy,l=2.5,pick=sample,memory=0.9", "sampled:score=entropy,l=2.5,pick=sample,memory=0.9"),
        ("sampled:inference_size=1.5", "sampled:score=l2,l=5,inference_size=1.5"),
        ("released:score=uniform,fraction=0.75", "released:fraction=0.75"),
        ("annealed:until=0.5", "annealed:until=0.5"),
        ("jumprelu:bandwidth=2", "jumprelu:bandwidth=2"),
        ("matryoshka", "matryoshka"),
        ("matryoshka:prefixes=8+16", "matryoshka:prefixes=8+16+64"),
        ("topk:prefixes=16", "topk:prefixes=16+64"),
    ],
)
def test_a_configuration_as_its_spec(given: str, short: str) -> None:
    (config,) = presets.parse_methods([given], d_sae=64, k=4)
    assert presets.spec(config) == short
    assert presets.parse_methods([short], d_sae=64, k=4) == [config]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SAEConfig(64, 4, pool=PoolConfig("uniform", Fraction(0.5))), "uniform-50pct"),
        # A prefix of 1 would be a share in a spec, and the scope's until no valid one of the schedule.
        (SAEConfig(64, 4, prefixes=(1, 64)), "matryoshka-1"),
        (
            SAEConfig(64, 4, pool=PoolConfig(schedule=Annealed(), scope=Scope(tokens=1, until=0))),
            "topk-annealed100-then-batch-at0",
        ),
    ],
)
def test_what_no_spec_gives_has_its_label(config: SAEConfig, expected: str) -> None:
    assert presets.spec(config) == presets.label(config) == expected
