"""A training that was stopped on four ranks goes on, on one, two or four of them, to the same files."""

import shutil

import pytest

from tests.training import ranks


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    ranks.tensors(folder / "tensors")
    ranks.harvest(folder / "harvest")
    return {name: ranks.content(folder / name) for name in ("tensors", "harvest")}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The jobs on four ranks."""
    folder = tmp_path_factory.mktemp("four")
    ranks.run_jobs(4, folder, "stopped:saes", "tensors:saes", "harvest:saes")
    return folder


def test_four_ranks_write_the_same_files_as_one_process(alone, four):
    assert {name: ranks.content(four / f"{name}-saes") for name in alone} == alone


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stopped_on_four_ranks_it_goes_on(count, alone, four, tmp_path):
    shutil.copytree(four / "stopped-saes", tmp_path / "tensors-saes")
    ranks.run_jobs(count, tmp_path, "tensors:saes")
    assert ranks.content(tmp_path / "tensors-saes") == alone["tensors"]
