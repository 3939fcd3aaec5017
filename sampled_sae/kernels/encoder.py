"""Encoding in products of 16-bit matrices, summed in 32 bits; the sums over Z that scores take; the highest scores."""

from __future__ import annotations

from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor

from sampled_sae.method.latents import WHOLE, Shard
from sampled_sae.method.parameters import Weights
from sampled_sae.method.pools import draw_members
from sampled_sae.method.scores import Score, Sums, token_sums


def padded_width(d: int) -> int:
    """The width of 16-bit copies: a multiple of 16, so that every row starts where wide loads can."""
    return -(-d // 16) * 16


def padded_copy(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """rows [n, d] -> [n, padded width] in `dtype`, zeros behind."""
    n, d = rows.shape
    copy = torch.zeros(n, padded_width(d), dtype=dtype, device=rows.device)
    copy[:, :d] = rows
    return copy


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] @ b [k, m] -> [n, m] in float32, whatever the type of a and b."""
    if a.is_cuda and a.dtype != torch.float32 and OUT_DTYPE:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


OUT_DTYPE = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 8)
"""Whether torch can leave a 16-bit product in 32 bits."""


class FastEncoder:
    """x [B, d] and the weights; `W_enc` [m, stride] is the encoder's 16-bit copy.

    Activations below 0 are left as they are: a search for the largest ones never reaches them.
    """

    def __init__(self, x: Tensor, weights: Weights, W_enc: Tensor, shard: Shard = WHOLE):
        self.x16 = padded_copy(x - weights.b_dec, W_enc.dtype)
        self.weights, self.W_enc = weights, W_enc
        self.b_enc = weights.b_enc.to(W_enc.dtype)
        self.tokens, self.shard = len(x), shard

    def encode(self, latents: Tensor | None) -> Tensor:
        if latents is None:
            return torch.addmm(self.b_enc, self.x16, self.W_enc.T)
        return encode_some(self.x16, self.W_enc, self.b_enc, padded(latents, len(self.W_enc)))

    def scores(self, score: Score, group: int, generator: torch.Generator, state: Tensor) -> Tensor:
        if score.reads == "nothing":
            shape = (self.tokens // group, group, len(self.W_enc) * self.shard.number)
            return score(self.weights.b_enc.new_empty(()).expand(shape), generator, state)
        whole = group == self.tokens
        if whole and score.name == "preactivation_l2":
            return self.shard.gather(self._preactivation_l2()[None])
        if score.reads == "input":
            d = len(self.weights.b_dec)
            x = self.x16.float()[:, :d].view(-1, group, d)
            return self.shard.gather(score.from_input(x, self.weights.W_enc, self.weights.b_enc))
        if whole and score.reads == "sums":
            return score.from_sums(statistics(self.encode(None), score.sums).map(self.shard.gather))[None]
        # Any other score gets all activations at once, as on the plain path.
        Z = self.encode(None).float().relu_().view(self.tokens // group, group, -1)
        if self.shard.number > 1:
            return score.from_sums(token_sums(Z, score.sums).map(self.shard.gather))
        return score(Z, generator, state)

    def draw(self, q: Tensor, size: int, pick: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if pick == "top" and q.dtype == torch.float32:
            return highest(q[0], size)
        return draw_members(q, size, pick, generator)

    def _preactivation_l2(self) -> Tensor:
        """`scores.preactivation_l2` with products of 16-bit matrices."""
        gram = product(self.x16.T, self.x16).to(self.W_enc.dtype)
        along = ((self.W_enc @ gram) * self.W_enc).sum(1, dtype=torch.float32)
        mean = product(self.x16.sum(0, dtype=torch.float32).to(self.W_enc.dtype)[None], self.W_enc.T)[0]
        b_enc = self.weights.b_enc
        return (along + 2 * b_enc * mean + self.tokens * b_enc.square()).clamp_min(0).sqrt()


def padded(latents: Tensor, m: int) -> Tensor:
    """latents [n] -> [n or a little more], padded with m: products are several times faster on multiples of 16."""
    return torch.nn.functional.pad(latents, (0, -len(latents) % 16 if len(latents) else 16), value=m)


def rows_of(W: Tensor, latents: Tensor) -> Tensor:
    """The rows of W [m, stride] of the latents [n]; any row where a latent is m."""
    return W[latents.clamp_max(len(W) - 1)]


def encode_some(x: Tensor, W_enc: Tensor, b_enc: Tensor, latents: Tensor) -> Tensor:
    """x [B, stride] -> activations [B, n] of the latents [n]; -inf where a latent is m."""
    bias = torch.where(latents < len(b_enc), b_enc[latents.clamp_max(len(b_enc) - 1)], -torch.inf)
    return torch.addmm(bias, x, rows_of(W_enc, latents).T)


# ---- sums over the tokens, in one pass over Z ---------------------------------------------------------

ROWS, BLOCK = 128, 512
NAMES = Sums._fields[1:]


@triton.jit
def _log2(value, HARDWARE: tl.constexpr):
    """The logarithm of positive values; the hardware's own instruction is right to 2^-22."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(value)


@triton.jit
def _column_sums(z, sums, tokens, width, parts, TOTAL: tl.constexpr, ENERGY: tl.constexpr, LOGS: tl.constexpr,
                 FIRED: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    z += (part * ROWS).to(tl.int64) * width
    total = tl.zeros([BLOCK], tl.float32)
    energy = tl.zeros([BLOCK], tl.float32)
    logs = tl.zeros([BLOCK], tl.float32)
    fired = tl.zeros([BLOCK], tl.float32)
    left = tl.minimum(tokens - part * ROWS, ROWS)
    for first in range(0, left, AT_ONCE):
        for row in tl.static_range(AT_ONCE):  # several loads under way at once
            until = tl.where(first + row < left, width, 0)
            value = tl.maximum(tl.load(z + row * width + j, mask=j < until, other=0.0).to(tl.float32), 0.0)
            if TOTAL:
                total += value
            if ENERGY:
                energy += value * value
            if LOGS:
                logs += value * _log2(tl.maximum(value, 1e-30), HARDWARE)
            if FIRED:
                fired += tl.where(value > 0, 1.0, 0.0)
        z += AT_ONCE * width
    at = sums + part * width + j
    if TOTAL:
        tl.store(at, total, mask=j < width)
        at += parts * width
    if ENERGY:
        tl.store(at, energy, mask=j < width)
        at += parts * width
    if LOGS:
        tl.store(at, logs * 0.6931471805599453, mask=j < width)
        at += parts * width
    if FIRED:
        tl.store(at, fired, mask=j < width)


def statistics(z: Tensor, needs: Collection[str] = NAMES) -> Sums:
    """z [tokens, m], negative values count as 0 -> the needed sums over the tokens, each [m] float32."""
    tokens, width = z.shape
    parts = triton.cdiv(tokens, ROWS)
    wanted = [name for name in NAMES if name in needs]
    sums = torch.empty(len(wanted), parts, width, device=z.device)
    flags = dict(zip(("TOTAL", "ENERGY", "LOGS", "FIRED"), (name in needs for name in NAMES), strict=True))
    _column_sums[(triton.cdiv(width, BLOCK), parts)](
        z, sums, tokens, width, parts, **flags, HARDWARE=z.is_cuda, ROWS=ROWS, AT_ONCE=4, BLOCK=BLOCK, num_warps=4
    )
    return Sums(tokens=tokens, **dict(zip(wanted, sums.sum(1), strict=True)))


# ---- the latents with the highest scores --------------------------------------------------------------

HALF = tl.constexpr(2**16)


@triton.jit
def _key(q, i, m):
    """Scores as integers of the same order."""
    bits = tl.load(q + i, mask=i < m, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _count_half(q, state, bins, m, UPPER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = _key(q, i, m)
    upper = (key >> 16) + HALF // 2
    if UPPER:
        tl.atomic_add(bins + upper, 1, mask=i < m, sem="relaxed")
    else:
        tl.atomic_add(bins + (key & 0xFFFF), 1, mask=(i < m) & (upper == tl.load(state)), sem="relaxed")


@triton.jit
def _find_half(bins, state, UPPER: tl.constexpr, BLOCK: tl.constexpr):
    """state = upper half of the cut, lower half of the cut, how many are still to be found below what is counted."""
    wanted = tl.load(state + 2)
    above, cut, after = 0, 0, 0
    for step in range(HALF // BLOCK):  # from the largest values down
        value = HALF - (step + 1) * BLOCK + tl.arange(0, BLOCK)
        n = tl.load(bins + value)
        total = tl.sum(n)
        reach = above + total - (tl.cumsum(n, 0) - n)
        if (above < wanted) & (above + total >= wanted):
            cut = tl.max(tl.where(reach >= wanted, value, 0))
            after = above + tl.sum(tl.where(value > cut, n, 0))
        above += total
    if UPPER:
        tl.store(state, cut)
    else:
        tl.store(state + 1, cut)
    tl.store(state + 2, wanted - after)


@triton.jit
def _choose(q, state, pool, members, m, BLOCK: tl.constexpr):
    cut = ((tl.load(state) - HALF // 2) << 16) | tl.load(state + 1)
    room = tl.load(state + 2)
    above, ties = 0, 0
    for first in range(0, m, BLOCK):
        i = first + tl.arange(0, BLOCK)
        key = _key(q, i, m)
        is_above = (key > cut) & (i < m)
        is_tie = (key == cut) & (i < m)
        # Both counts in one running sum: those above in the low half, ties in the high half.
        both = tl.cumsum(is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16), 0)
        ties_here = ties + (both >> 16)
        taken = is_above | (is_tie & (ties_here <= room))
        to = above + (both & 0xFFFF) + tl.minimum(ties_here, room) - 1
        tl.store(pool + i, taken, mask=i < m)
        tl.store(members + to, i.to(tl.int64), mask=taken)
        above += tl.sum(is_above.to(tl.int32))
        ties += tl.sum(is_tie.to(tl.int32))


def highest(q: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Scores q [m] float32 -> the `size` highest: mask [m] bool, and their numbers [size] ascending."""
    m, device = len(q), q.device
    bins = torch.zeros(2, 2**16, dtype=torch.int32, device=device)
    state = torch.zeros(3, dtype=torch.int32, device=device)
    state[2].fill_(size)
    for half, upper in enumerate((True, False)):
        _count_half[(triton.cdiv(m, 1024),)](q, state, bins[half], m, UPPER=upper, BLOCK=1024)
        _find_half[(1,)](bins[half], state, UPPER=upper, BLOCK=2**13, num_warps=16)
    pool = torch.empty(m, dtype=torch.bool, device=device)
    members = torch.empty(size, dtype=torch.long, device=device)
    _choose[(1,)](q, state, pool, members, m, BLOCK=2**13, num_warps=16)
    return pool, members
