"""Latents over ranks on the GPU path: selections equal to one process exactly, weights up to rounding."""

import pytest
import torch
import torch.multiprocessing as mp

from tests.kernels import ranks_worker as worker


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    # A fork need not import torch anew; but it cannot use a GPU that this process uses.
    mp.start_processes(worker.run, (2, folder), nprocs=2, start_method="spawn" if torch.cuda.is_available() else "fork")
    return {name: torch.load(folder / name, weights_only=True) for name in worker.CONFIGS}


@pytest.mark.parametrize("name", worker.CONFIGS)
def test_two_ranks_are_one_process(name, divided):
    alone, found = worker.steps(worker.CONFIGS[name]), divided[name]
    # Exact products: the same values on both, most of them tied.
    assert torch.equal(alone["kept True"], found["kept True"])
    assert alone["kept True"].count_nonzero() > 0
    assert torch.equal(alone["counted True"], found["counted True"])
    differ = (alone["kept False"] > 0) != (found["kept False"] > 0)
    assert not differ[0].any()
    assert differ.sum() <= 0.02 * (alone["kept False"] > 0).sum()  # later steps: weights moved apart by rounding
    # Loss, error, AuxK and norm; products of 16-bit values that are rounded in other places.
    torch.testing.assert_close(found["moved"], alone["moved"], rtol=0.01, atol=1e-4)
    assert alone["state"].keys() == found["state"].keys()
    for key, value in alone["state"].items():
        assert float((value - found["state"][key]).norm()) <= 0.02 * float(value.norm()), key
