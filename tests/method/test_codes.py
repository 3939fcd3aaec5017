"""Sparse codes against dense ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampled_sae.method.codes import SparseCodes


def sparse_codes(n: int, m: int, generator: torch.Generator, share: float = 0.2) -> torch.Tensor:
    """Some tokens have no active latent."""
    dense = torch.rand(n, m, generator=generator) * (torch.rand(n, m, generator=generator) < share)
    dense[torch.rand(n, generator=generator) < 0.1] = 0
    return dense


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_codes_are_the_dense_ones(seed):
    generator = torch.Generator().manual_seed(seed)
    dense = sparse_codes(13, 17, generator)
    codes = SparseCodes.from_dense(dense)
    assert torch.equal(codes.dense(), dense)
    rows = torch.randperm(13, generator=generator)[:7]
    assert torch.equal(codes.rows(rows).dense(), dense[rows])
    some = torch.randperm(17, generator=generator)[:5]
    assert torch.equal(codes.columns(some), dense[:, some])
    assert torch.equal(codes.columns(some, rows), dense[rows][:, some])
    assert torch.equal(codes.where(codes.value > 0.5).dense(), dense * (dense > 0.5))
    assert torch.equal(codes.starts().diff(), (dense > 0).sum(1))
    active = dense.any(0).nonzero().view(-1)
    assert torch.equal(codes.renumbered(active).dense(), dense[:, active])
    padded = codes.padded(codes.value)
    assert torch.equal(
        padded.sort(1, descending=True).values, dense.sort(1, descending=True).values[:, : padded.shape[1]]
    )


@pytest.mark.parametrize("tokens", [0, 1, 4, 13])
@pytest.mark.parametrize("size", [1, 4, 20])
def test_parts_put_together_are_the_whole(tokens, size):
    dense = sparse_codes(tokens, 17, torch.Generator().manual_seed(0))
    codes = SparseCodes.from_dense(dense)
    parts = list(codes.split(size))
    assert all(torch.equal(a.dense(), b) for a, b in zip(parts, dense.split(size), strict=True))
    whole = SparseCodes.cat(parts)
    assert all(torch.equal(a, b) for a, b in zip(whole[:3], codes[:3], strict=True)) and whole[3:] == codes[3:]
    assert len(codes.rows(torch.arange(0)).value) == 0
