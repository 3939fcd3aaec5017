"""The rule for the learning rate, and which rate an SAE has."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sampled_sae as ss
from sampled_sae.method.presets import PAPER_OPTIMIZER
from sampled_sae.method.rate import LEAST, MOST, as_begun, encoder_scale, summary, with_lr

SIZES = st.integers(1, 2**40)
SETTINGS = st.fixed_dictionaries(dict.fromkeys(("d_in", "d_sae", "k", "batch_size", "steps"), SIZES))
USUAL = {"d_in": 576, "d_sae": 65_536, "k": 60, "batch_size": 4096, "steps": 6103}


@pytest.mark.parametrize(
    ("changed", "rate"),
    [
        ({}, 1.29e-3),
        ({"steps": 1220}, 3.38e-3),
        ({"d_sae": 16_384}, 1.95e-3),
        ({"k": 20}, 9.25e-4),
        ({"batch_size": 1024}, 9.1e-4),
        ({"d_in": 2304}, 6.43e-4),
        ({"d_in": 2304, "steps": 120, "d_sae": 4096}, 5e-3),  # the upper bound, at four times the width
    ],
)
def test_values_of_the_rule(changed, rate):
    """Another value here changes every run that names no rate: docs/recipe.md."""
    assert ss.default_lr(**USUAL | changed) == pytest.approx(rate, rel=1e-3)


@given(SETTINGS)
def test_any_setting_has_a_rate_within_bounds(settings):
    rate = ss.default_lr(**settings) * math.sqrt(settings["d_in"] / 576)
    assert 0.99 * LEAST <= rate <= 1.01 * MOST


@given(SETTINGS, st.sampled_from(sorted(USUAL)), SIZES)
def test_monotone_in_every_setting(settings, name, more):
    low, high = (ss.default_lr(**settings | {name: settings[name] + extra}) for extra in (0, more))
    assert low <= high if name in ("k", "batch_size") else low >= high


def test_a_rate_of_its_own_stays():
    assert with_lr(ss.batchtopk(64, 1, lr=0.5), 16, 256, 10).optimizer.lr == 0.5
    assert with_lr(ss.batchtopk(64, 1), 16, 256, 10).optimizer.lr == ss.default_lr(16, 64, 1, 256, 10)
    assert PAPER_OPTIMIZER.lr == ss.paper_recipe()["optimizer"].lr == 3e-4


@pytest.mark.parametrize(("k", "scale"), [(1, 0.7), (20, 0.695), (60, 0.5), (120, 0.406), (4096, 0.4)])
def test_the_encoder_begins_larger_for_a_smaller_k(k, scale):
    """Another value here changes every run that names no scale: docs/recipe.md."""
    config = ss.batchtopk(2**14, k)
    assert encoder_scale(config) == with_lr(config, 16, 256, 10).init.encoder_scale == scale
    own = replace(config, init=ss.InitConfig(encoder_scale=0.3))
    assert encoder_scale(own) == with_lr(own, 16, 256, 10).init.encoder_scale == 0.3


def test_a_run_begun_before_the_rule_goes_on_with_its_scale():
    given = [ss.batchtopk(64, 4)]
    filled = [with_lr(config, 16, 256, 10) for config in given]
    record = [replace(filled[0], init=ss.InitConfig(encoder_scale=0.5)).to_dict()]
    assert as_begun(given, filled, record)[0].init.encoder_scale == 0.5
    own = [replace(given[0], init=ss.InitConfig(encoder_scale=0.3))]
    assert as_begun(own, own, record)[0].init.encoder_scale == 0.3


def test_the_rate_of_the_record_counts_unless_one_is_given():
    configs = [ss.batchtopk(64, 4), ss.topk(64, 4, lr=0.5)]
    filled = [with_lr(config, 16, 256, 10) for config in configs]
    old = [ss.batchtopk(64, 4, lr=0.125).to_dict(), ss.topk(64, 4, lr=0.25).to_dict()]
    assert [config.optimizer.lr for config in as_begun(configs, filled, old)] == [0.125, 0.5]
    for damaged in (None, [], [1, 2, 3], [{"optimizer": 3}], [replace(configs[0]).to_dict()]):
        assert as_begun(configs, filled, damaged) == filled


def test_the_line_says_where_the_rate_comes_from():
    configs = [ss.batchtopk(64, 4), ss.batchtopk(64, 8)]
    filled = [with_lr(config, 576, 4096, 6103) for config in configs]
    low, high = (config.optimizer.lr for config in filled)
    assert summary(configs, filled).startswith(f"learning rates {low:g} to {high:g}, from d_in, d_sae, K,")
    assert summary(filled[:1], filled[:1]) == f"learning rate {low:g}"
