"""A training that was stopped on four ranks goes on, on one, two or four of them, to the same files."""

import shutil

import pytest

from tests.training import ranks


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return ranks.on_one_process(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The jobs on four ranks."""
    folder = tmp_path_factory.mktemp("four")
    jobs = [f"{job}:{how}" for how in ("saes", "latents") for job in ("stopped", "tensors")]
    ranks.run_jobs(4, folder, *jobs, "tensors:2x2", "harvest:saes", "harvest:2x2")
    return folder


def test_four_ranks_write_the_same_files_as_one_process(alone, four):
    assert {name: ranks.content(four / f"{name}-saes") for name in alone} == alone


@pytest.mark.parametrize("how", ["latents", "2x2"])
def test_divided_latents_give_almost_the_same_files(how, alone, four):
    ranks.assert_close(ranks.content(four / f"tensors-{how}"), alone["tensors"])
    if how == "2x2":
        ranks.assert_close(ranks.content(four / "harvest-2x2"), alone["harvest"])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stopped_on_four_ranks_it_goes_on(count, alone, four, tmp_path):
    shutil.copytree(four / "stopped-saes", tmp_path / "tensors-saes")
    ranks.run_jobs(count, tmp_path, "tensors:saes")
    assert ranks.content(tmp_path / "tensors-saes") == alone["tensors"]


@pytest.mark.parametrize("count, how", [(1, "auto"), (2, "latents"), (2, "saes"), (4, "latents"), (4, "2x2")])
def test_divided_latents_go_on_in_other_parts(count, how, alone, four, tmp_path):
    """Exactly, if the parts are the same."""
    shutil.copytree(four / "stopped-latents", tmp_path / f"tensors-{how}")
    ranks.run_jobs(count, tmp_path, f"tensors:{how}")
    found = ranks.content(tmp_path / f"tensors-{how}")
    ranks.assert_close(found, alone["tensors"])
    if (count, how) == (4, "latents"):
        assert found == ranks.content(four / "tensors-latents")
