"""One training over several processes: the same files as from one process. More of it is in `make test-ranks`."""

import pytest
import torch

import sampled_sae as ss
from sampled_sae.data.source import open_source
from sampled_sae.training import division
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.ranks import Ranks
from tests.training import ranks


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The files of each job on one process."""
    return ranks.on_one_process(tmp_path_factory.mktemp("alone"))


def test_two_ranks_write_the_same_files_as_one_process(alone, tmp_path):
    jobs = ("tensors", "harvest", "signaled", "stopped", "different")
    ranks.run_jobs(2, tmp_path, *(f"{name}:saes" for name in jobs), "stopped:latents")
    for name, wanted in (*alone.items(), ("signaled", alone["harvest"])):
        assert ranks.content(tmp_path / f"{name}-saes") == wanted
    stopped = tmp_path / "stopped-saes"
    assert [path.name for path in sorted((stopped / "checkpoints").iterdir())] == ["step-000000010", "step-000000020"]
    ranks.tensors(stopped)
    assert ranks.content(stopped) == alone["tensors"]
    latents = tmp_path / "stopped-latents"
    assert len(list((latents / "checkpoints" / "step-000000020").glob("*.safetensors"))) == 2 * len(ranks.configs())
    ranks.tensors(latents)
    ranks.assert_close(ranks.content(latents), alone["tensors"])


def test_one_process_behaves_as_before_under_torchrun(alone, tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    ranks.tensors(tmp_path / "run")
    assert ranks.content(tmp_path / "run") == alone["tensors"]


def test_saes_are_shared_out_by_their_size():
    assert division.shares([5.0, 1.0, 1.0, 3.0], 2) == [[0], [1, 2, 3]]
    assert division.shares([1.0] * 5, 3) == [[0, 3], [1, 4], [2]]
    assert division.shares([1.0], 3) == [[0], [], []]
    configs = [ss.batchtopk(size, 4) for size in (64, 32)]
    parts = [division.own_saes(configs, 2, Ranks(rank, 2, rank, 2)) for rank in range(2)]
    assert parts == [[configs, []], [[], configs]]  # a stream each


@pytest.mark.parametrize(
    "how, line",
    [
        ("2x3", r"divide = '2x3': is for 6 ranks, but there are 4"),
        ("rows", "must be auto, saes, latents, or groups"),
        ("latents", "d_sae = 66: must be a multiple of 4"),
    ],
)
def test_a_wrong_division_is_one_line(how, line):
    with pytest.raises(UserError, match=line):
        division._candidates(how, [ss.batchtopk(66, 4)], 4)


def test_memory_of_a_part_of_the_latents_is_that_part():
    from sampled_sae.training.estimate import memory_needed

    whole, part = (memory_needed([ss.batchtopk(65_536, 32)], 768, 4096, torch.float32, shards=n) for n in (1, 8))
    assert whole / 9 < part < whole / 6


@pytest.mark.parametrize(
    "sizes, shape",
    [
        ([65_536], (1, 4)),
        ([65_536] * 2, (2, 2)),
        ([65_536] * 3, (4, 1)),
        ([65_536] * 8, (4, 1)),
        ([64], (4, 1)),  # exchanges would take longer than the step
        ([65_537], (4, 1)),  # cannot be divided
    ],
)
def test_auto_divides_what_is_large_where_saes_are_few(sizes, shape, tmp_path):
    stream = next(iter(open_source(torch.zeros(100, 16)).open(64, 0, 0).values()))
    configs = [ss.batchtopk(size, 4) for size in sizes]
    found = division.divide("auto", configs, [stream], 64, Ranks(world=4), tmp_path)
    assert found == division.Division([configs], *shape)
