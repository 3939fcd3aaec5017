"""Latents over ranks: the same selection as on one process exactly, and the same weights up to rounding."""

from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp

import sampled_sae as ss
from sampled_sae.method.latents import Shard, check_divided
from sampled_sae.training.learner import Stats
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.ranks import Group
from tests.training import latents_worker as worker
from tests.training.latents_worker import CASES, OVER, STEPS, batch, of_state, tied, train

RANKS = [(number, name) for number, names in OVER.items() for name in names]


@pytest.fixture(scope="module")
def alone():
    return {name: train(config) for name, config in CASES.items()}


@pytest.fixture(scope="module")
def divided(alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    states = {name: found["state"] for name, found in alone.items()}
    mp.start_processes(worker.run, (3, folder, states), nprocs=3, start_method="fork")  # no imports anew
    return {(number, name): torch.load(folder / f"{number} {name}", weights_only=True) for number, name in RANKS}


@pytest.mark.parametrize("number, name", RANKS)
def test_the_same_latents_are_selected(number, name, alone, divided):
    mine, found = alone[name], divided[number, name]
    assert torch.equal(mine["kept"][0] > 0, found["kept"][0] > 0)
    assert torch.equal(mine["kept"] > 0, found["kept"] > 0)
    config = CASES[name]
    assert torch.equal(of_state(config, mine["state"], batch(STEPS)) > 0, found["again"] > 0)
    if config.jumprelu is None:
        wanted = of_state(config, *tied(config))
        assert torch.equal(wanted, found["tied"])
        values = wanted[wanted > 0]
        assert len(values.unique()) < len(values) / 10  # or there would be no ties to break


@pytest.mark.parametrize("number, name", RANKS)
def test_weights_agree_after_twenty_steps(number, name, alone, divided):
    mine, found = alone[name], divided[number, name]
    assert mine["state"].keys() == found["state"].keys()
    for key, value in mine["state"].items():
        if value.is_floating_point():
            # Relative to the tensor's largest element; the threshold to the activations, of which it is a small one.
            size = mine["kept"].max() if key == "threshold" else value.abs().max()
            torch.testing.assert_close(found["state"][key], value, rtol=0, atol=1e-5 * float(size))
        elif key != "most_dead":  # over ranks, that of the rank with the most
            assert torch.equal(found["state"][key], value), key
    for key, value in mine["sae"].items():
        torch.testing.assert_close(found["sae"][key], value, rtol=1e-5, atol=1e-5, equal_nan=True)
    for index, field in enumerate(Stats._fields):
        torch.testing.assert_close(
            found["stats"][:, index], mine["stats"][:, index], rtol=1e-4, atol=1e-5, equal_nan=True, msg=field
        )
    assert (found["b_dec"] == found["b_dec"][0]).all()  # what all ranks hold is the same bit for bit


def test_the_cases_have_dead_latents(alone):
    dead = Stats._fields.index("dead")
    for name, config in CASES.items():
        assert (alone[name]["stats"][-1, dead] > 0.1) == (config.auxk.dead_after < 10**9)


def test_one_rank_is_one_process(alone):
    found = train(CASES["auxk"], Shard(Group()))
    for key, value in alone["auxk"]["state"].items():
        assert torch.equal(found["state"][key].nan_to_num(-1), value.nan_to_num(-1))


def test_what_cannot_be_divided_is_one_line():
    with pytest.raises(UserError, match=r"^d_sae = 100: must be a multiple of 8"):
        check_divided(ss.batchtopk(100, 4), 8)
    with pytest.raises(UserError, match=r"^pool.score = 'leverage': "):
        check_divided(ss.sampled(96, 4, score="leverage"), 2)
    check_divided(replace(ss.batchtopk(96, 4), pool=replace(ss.batchtopk(96, 4).pool, score="leverage")), 2)
