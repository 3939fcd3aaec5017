import numpy as np
import pytest
import torch

from sampled_sae.data.source import open_source
from sampled_sae.data.stream import Endless
from sampled_sae.utils.errors import UserError


def open_stream(activations, batch_size, heldout_tokens, seed, **options):
    [stream] = open_source(activations, **options).open(batch_size, heldout_tokens, seed).values()
    return stream


def rows(n: int) -> torch.Tensor:
    """[n, 2]: row i is (i, -i), so that tokens can be told apart."""
    return torch.stack([torch.arange(n), -torch.arange(n)], dim=1).float()


def ids(batches) -> list[int]:
    return torch.cat(batches)[:, 0].long().tolist()


def test_a_pass_over_a_tensor_sees_each_token_once_and_never_the_held_out():
    stream = open_stream(rows(1000), 90, 100, seed=3)
    held = ids([stream.heldout])
    assert len(held) == 100
    first, second = (ids([stream.batch(i) for i in part]) for part in (range(10), range(10, 20)))
    assert sorted(first + held) == sorted(second + held) == list(range(1000))
    assert first != second
    assert first != sorted(first)


@pytest.mark.parametrize("make", [rows, lambda n: rows(n).numpy(), lambda n: rows(n).view(-1, 5, 2)])
def test_batches_depend_on_seed_and_index_alone(make):
    a, b, c = (open_stream(make(1000), 90, 100, seed) for seed in (1, 1, 2))
    straight = [a.batch(i) for i in range(25)]
    assert torch.equal(b.batch(24), straight[24])
    assert torch.equal(b.batch(3), straight[3])
    assert not torch.equal(c.batch(3), straight[3])


def test_at_most_a_tenth_is_held_out():
    assert len(open_stream(rows(1000), 90, 65_536, 0).heldout) == 100
    own = open_stream(rows(1000), 90, 65_536, 0, heldout=rows(7))
    assert len(own.heldout) == 7
    assert own.batches == 11


def test_memory_maps_are_read_in_order_but_given_shuffled(tmp_path):
    np.save(tmp_path / "x.npy", rows(500).numpy())
    mapped = open_stream(np.load(tmp_path / "x.npy", mmap_mode="r"), 50, 50, 0)
    plain = open_stream(rows(500), 50, 50, 0)
    for i in range(12):
        assert torch.equal(mapped.batch(i), plain.batch(i))


def test_an_iterable_is_cut_anew_and_can_skip():
    pieces = list(rows(1000).split(37))
    stream = open_stream(iter(pieces), 90, 100, 0)
    assert ids([stream.heldout]) == list(range(100))
    assert ids([stream.batch(0), stream.batch(1)]) == list(range(100, 280))
    later = open_stream(iter(pieces), 90, 100, 0)
    assert ids([later.batch(5)]) == list(range(550, 640))
    with pytest.raises(UserError, match="ended after 10 steps of 90 tokens"):
        later.batch(10)


def test_a_list_is_read_again_without_its_held_out_part():
    stream = open_stream(list(rows(1000).split(37)), 90, 100, 0)
    assert ids([stream.batch(i) for i in range(10)]) == list(range(100, 1000))
    assert ids([stream.batch(10)]) == list(range(100, 190))


def test_an_endless_source():
    class Counter(Endless):
        def batch(self, index, size, split="train"):
            return rows(size) + (1000 if split == "heldout" else index)

    stream = open_stream(Counter(), 4, 6, 0)
    assert ids([stream.heldout]) == list(range(1000, 1006))
    assert ids([stream.batch(50)]) == [50, 51, 52, 53]


def broken(at: int, value: float) -> torch.Tensor:
    x = rows(1000)
    x[at, 1] = value
    return x


@pytest.mark.parametrize(
    ("activations", "line"),
    [
        (broken(5, torch.nan), "NaN or infinity"),
        (broken(5, -torch.inf), "NaN or infinity"),
        (
            iter([rows(200), broken(5, torch.inf)]),
            r"item 1 .*: NaN or infinity \(first in its row 5, row 205 of the stream\)",
        ),
        (
            iter([rows(200), torch.zeros(9, 3)]),
            "item 1 of the stream has width 3: .* have width 2",
        ),
        (iter([]), "the stream is empty"),
        (iter([rows(30)]), "ended within its first 100 tokens"),
        (rows(50), "activations hold 50 tokens, 5 of them held out: too few for one batch of batch_size = 90"),
        (torch.zeros(5), r"shape \(5,\): must be \[N, d_in\]"),
        (iter([rows(200).long()]), "torch.int64 .* must be floating point"),
        (iter(["text"]), "is a str: must be a tensor"),
        (7, "activations = int: must be a tensor"),
    ],
)
def test_bad_activations_get_one_clear_line(activations, line):
    with pytest.raises(UserError, match=line) as caught:
        stream = open_stream(activations, 90, 100, 0)
        for i in range(11):
            stream.batch(i)
    assert "\n" not in str(caught.value)


def test_held_out_tokens_of_another_width():
    with pytest.raises(UserError, match="heldout has width 3: the activations have width 2"):
        open_stream(rows(1000), 90, 100, 0, heldout=torch.zeros(5, 3))


def test_a_stream_that_reshuffles_would_train_on_held_out_tokens():
    class Shuffling:
        def __iter__(self):
            return iter(rows(1000)[torch.randperm(1000)].split(100))

    stream = open_stream(Shuffling(), 90, 100, 0)
    with pytest.raises(UserError, match="a new pass over the stream begins with other tokens"):
        for i in range(11):
            stream.batch(i)
    own = open_stream(Shuffling(), 90, 100, 0, heldout=rows(50))
    assert len([own.batch(i) for i in range(30)]) == 30


def test_odd_arrays():
    assert open_stream(rows(1000).numpy().astype(">f4"), 90, 100, 0).batch(0).dtype == torch.float32
    with pytest.raises(UserError, match="beyond the range of float32"):
        open_stream(rows(1000).double() * 1e100, 90, 100, 0)
    with pytest.raises(UserError, match="is a NoneType"):
        open_stream(iter([None]), 90, 100, 0)
