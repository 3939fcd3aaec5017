"""The cuts keep exactly what the plain selection keeps, for the same values, whatever they are."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampled_sae.kernels.select import BINS, Kept, cut_batch, cut_into_blocks, cut_rows
from sampled_sae.method.selection import largest_of_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def values(kind: str, tokens: int, width: int, seed: int) -> torch.Tensor:
    """[tokens, width] bfloat16 of a kind that is hard on a selection."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(tokens, width, generator=generator)
    match kind:
        case "ties":
            z = z.round()
        case "few":
            z = (z > 2).float()
        case "none":
            z = -z.abs()
        case "infinite":
            z[:, 0] = -torch.inf
        case "tiny":
            z = z * 1e-39
    return z.bfloat16().to(DEVICE)


def plain(z: torch.Tensor, rows: int, keep: int) -> torch.Tensor:
    """[tokens, width]: the kept values, zeros elsewhere."""
    flat = z.float().relu().reshape(rows, -1)
    places = largest_of_rows(flat, min(keep, flat.shape[1]))
    out = torch.zeros(z.numel(), device=z.device)
    out[places] = z.float().view(-1)[places]
    return out.view(z.shape)


def spread_out(kept: Kept, z: torch.Tensor) -> torch.Tensor:
    """[tokens, width] from the list, which must be in order and within its tokens' bounds."""
    out = torch.zeros(z.shape, device=z.device)
    there = kept.column < z.shape[1]
    place = kept.token.long() * z.shape[1] + kept.column
    assert bool((place[there].diff() > 0).all())
    for token, (start, stop) in enumerate(zip(kept.start.tolist(), kept.stop.tolist(), strict=True)):
        assert bool((kept.token[start:stop] == token).all())
    assert int((kept.stop - kept.start).sum()) == int(there.sum())
    out.view(-1)[place[there]] = kept.value[there]
    return out


def smallest_kept(wanted: torch.Tensor) -> float:
    """[groups, n] kept values -> the smallest of each group, averaged over the groups that have one."""
    lowest = [row[row > 0].min() for row in wanted if (row > 0).any()]
    return float(torch.stack(lowest).sum() / len(lowest)) if lowest else 0.0


KINDS = st.sampled_from(["plain", "ties", "few", "none", "infinite", "tiny"])


@settings(max_examples=40)
@given(
    kind=KINDS,
    seed=st.integers(0, 10**6),
    width=st.one_of(st.integers(1, 90), st.just(2100)),
    k=st.integers(1, 12),
    group=st.sampled_from([2, 3, 6]),
    last=st.sampled_from([None, 1, 15_000, 16_250, 16_400, BINS]),
)
def test_cut_of_groups_is_the_plain_one(kind, seed, width, k, group, last):
    z = values(kind, 6, width, seed)
    wanted = plain(z, 6 // group, k * group)
    before = None if last is None else torch.full((6 // group,), last, dtype=torch.int32, device=DEVICE)

    cut = cut_batch(cut_into_blocks(z, k), k * group, group, before, dense=False)
    assert torch.equal(spread_out(cut.kept, z), wanted)
    assert float(cut.smallest()) == smallest_kept(wanted.view(6 // group, -1))

    cut_batch(cut_into_blocks(z, k), k * group, group, before, dense=True)
    assert torch.equal(z.float(), wanted)


@settings(max_examples=40)
@given(kind=KINDS, seed=st.integers(0, 10**6), width=st.integers(1, 300), k=st.integers(1, 12))
def test_cut_of_rows_is_the_plain_one(kind, seed, width, k):
    z = values(kind, 3, width, seed)
    wanted = plain(z, 3, k)

    cut = cut_rows(cut_into_blocks(z, k), k, dense=False)
    assert torch.equal(spread_out(cut.kept, z), wanted)
    assert float(cut.smallest()) == smallest_kept(wanted)

    cut_rows(cut_into_blocks(z, k), k, dense=True)
    assert torch.equal(z.float(), wanted)


def test_wide_rows_have_large_blocks():
    z = values("plain", 2, 70_000, 0)
    assert cut_into_blocks(z, 2).size == 64
    assert torch.equal(spread_out(cut_rows(cut_into_blocks(z, 2), 2, dense=False).kept, z), plain(z, 2, 2))
