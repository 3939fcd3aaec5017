import json

import numpy as np
import pytest

import sampled_sae as ss
from sampled_sae.method.config import (
    Annealed,
    Constant,
    Everything,
    Fraction,
    InitConfig,
    Multiplier,
    OptimizerConfig,
    PoolConfig,
    Rates,
    SAEConfig,
    Scope,
    Size,
)
from sampled_sae.method.presets import label, named
from sampled_sae.training.settings import TrainConfig
from sampled_sae.utils.errors import UserError

ALL = [
    ss.batchtopk(64, 4),
    ss.topk(64, 4, seed=3),
    ss.topk_then_batchtopk(64, 4, until=0.5),
    ss.sampled(64, 4, "entropy", l=2.5, pick="sample"),
    ss.released(64, 4, name="mine"),
    ss.annealed(64, 4, until=0.5),
    SAEConfig(64, 4, pool=PoolConfig("l1", Size(9), scope=Scope(tokens=8)), cut="token"),
    ss.batchtopk(np.int64(64), 4, optimizer=OptimizerConfig(lr=np.float32(0.5), gradient="clip", clip=float("inf"))),
]


@pytest.mark.parametrize("config", ALL, ids=label)
def test_configurations_survive_json(config):
    assert SAEConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config


def test_labels_and_names_are_unique():
    assert [label(c) for c in ALL[:4]] == ["batchtopk", "topk", "topk-then-batch-at50", "entropy-l2.5-sampled"]
    names = [c.name for c in named([*ALL, *ALL], seed=7)]
    assert len(set(names)) == len(names)
    assert names[0] == "batchtopk-s7"
    assert names[1] == "topk-s3"


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Multiplier(0.5), "l = 0.5: must be a number of at least 1"),
        (lambda: Multiplier(float("nan")), "l = nan: must be"),
        (lambda: ss.sampled(64, 4, l=0), "l = 0.0: must be"),
        (lambda: SAEConfig(64, 65), "k = 65: must be at most d_sae = 64"),
        (lambda: SAEConfig(64, 0), "k = 0: must be at least 1"),
        (lambda: SAEConfig(64, 8, pool=PoolConfig(size=Size(7))), "pool.size.size = 7: must be at least k = 8"),
        (lambda: Fraction(1.5), "fraction = 1.5: must be a share in (0, 1]"),
        (lambda: PoolConfig(pick="best"), "pick = 'best': must be 'top' or 'sample'"),
        (lambda: PoolConfig(size=Size(9), refresh=3, scope=Scope(tokens=2)), "refresh = 3: a pool can only be kept"),
        (lambda: OptimizerConfig(lr=-1), "lr = -1: must be a positive number, or none"),
        (lambda: SAEConfig(64, 2.5), "k = 2.5: must be a whole number"),
        (lambda: SAEConfig("64", 4), "d_sae = '64': must be a whole number"),
        (lambda: OptimizerConfig(lr="fast"), "lr = 'fast': must be a number"),
        (lambda: SAEConfig(64, 4, seed=2**64), "seed = 18446744073709551616: must fit into 64 bits"),
        (lambda: PoolConfig(size=5), "size = 5: must be Multiplier, Size, Fraction or Everything"),
        (lambda: SAEConfig(64, 4, pool="l2"), "pool = 'l2': must be a PoolConfig"),
        (lambda: SAEConfig(64, 4, name="x" * 300), "at most 200 bytes"),
        (lambda: SAEConfig(64, 4, name="ä" * 101), "at most 200 bytes"),
        (lambda: SAEConfig(64, 4, name="a\nb"), "name = 'a\\nb': must be usable as a folder's name"),
        (lambda: SAEConfig.from_dict({"k": 4}), "d_sae: is missing"),
        (lambda: SAEConfig.from_dict([1]), "SAEConfig = [1]: must be an object with named fields"),
        (lambda: TrainConfig(steps=0), "steps = 0: must be at least 1"),
        (lambda: SAEConfig(64, 4, name="a/b"), "name = 'a/b': must be usable as a folder's name"),
        (lambda: SAEConfig.from_dict({"d_sae": 64, "k": 4, "lr": 1}), "lr = 1: no such field; SAEConfig has d_sae, k,"),
        (
            lambda: SAEConfig.from_dict({"d_sae": 64, "k": 4, "pool": {"size": {"kind": "huge"}}}, "a.json"),
            "a.json: pool.size.kind = 'huge': must be one of multiplier, size, fraction, everything",
        ),
    ],
)
def test_bad_settings_name_field_value_and_what_is_right(make, line):
    with pytest.raises(UserError) as caught:
        make()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_defaults_are_batchtopk_and_the_recipe():
    """docs/recipe.md; a change here changes every run that names no settings."""
    config = SAEConfig(65_536, 60)
    assert config.optimizer == OptimizerConfig(
        lr=None,
        gradient="normalize",
        cautious=True,
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
        rates=Rates(W_enc=0.67, b_enc=10, W_dec=2, b_dec=0.1),
        warmup_steps=200,
        decay=0.8,
    )
    assert config.init == InitConfig(decoder="random", encoder_scale=None)
    assert config.pool == PoolConfig("l2", Everything(), "top", Scope(), Constant(), 1)
    assert (config.auxk.alpha, config.threshold.beta, config.threshold.start_step) == (1 / 32, 0.999, 1000)
    assert Annealed().until == 1
