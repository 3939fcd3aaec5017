"""AuxK over the dead latents: dense products, in parallel with the sparse backward pass of the kept codes.

Of its five products the first needs only the batch, so they are launched on a second stream: that fills the GPU where
the sparse kernels wait for memory. In a recorded step the two streams are two branches of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sampled_sae.kernels.encoder import OUT_DTYPE, product
from sampled_sae.kernels.select import cut_into_blocks, cut_rows
from sampled_sae.method.config import AuxKConfig
from sampled_sae.method.parameters import Parameters

WHOLE_ROWS = 2**14
"""Latents of which a program holds a token's row in its registers."""
PER_WARP = 2**11
"""Values of such a row for each warp."""
ROWS, BLOCK, WARPS = 8, 256, 4
BESIDE = True
"""Whether AuxK runs beside the sparse pass on a GPU."""


class Copies(NamedTuple):
    """What the products read, in 16 bits."""

    x: Tensor
    """[B, stride]: the batch less b_dec."""
    W_enc: Tensor
    """[m, stride]."""
    W_dec: Tensor
    """[m, stride]."""


class LatentRows(NamedTuple):
    """Gradients of some latents."""

    W_enc: Tensor
    """[n, stride]."""
    W_dec: Tensor
    """[n, stride]."""
    b_enc: Tensor
    """[n]."""
    through_encoder: Tensor
    """[d]: the part of b_dec's gradient that comes through their encoders, to be subtracted."""


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class DeadPass:
    """AuxK's forward and backward pass on one batch."""

    def __init__(self, copies: Copies, weights: Parameters, dead: Tensor, config: AuxKConfig):
        """`dead` [n] are the dead latents (m: an empty slot). Encoding them begins at once."""
        self.copies, self.config, self.d, self.dead = copies, config, len(weights.b_dec), dead
        self.stream = self._second_stream()
        with self._beside():
            x = copies.x
            self.enc, self.dec, bias = take_latents(copies, weights.b_enc, dead)
            # Codes and their gradients, and what these are multiplied by, side by side for one product of both.
            self.both = x.new_empty(2, len(x), len(dead))
            self.sides = x.new_empty(2, *x.shape)
            torch.addmm(bias, x, self.enc.T, out=self.both[0])
            self._cut(config.latents(self.d))
            self.sides[1].copy_(x)

    def _second_stream(self) -> torch.cuda.Stream | None:
        return _second_stream(self.copies.x.device) if BESIDE else None

    def _cut(self, keep: int) -> None:
        """Keep the `keep` largest codes of each token."""
        keep_largest_of_rows_(self.both[0], keep)

    def explained(self) -> Tensor:
        """What the dead latents explain of the error [B, stride]."""
        return product(self.both[0], self.dec)

    def any_dead(self) -> Tensor:
        """[n]: the first is below m if there are dead latents."""
        return self.dead

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is launched here waits for what was launched before, not the other way round."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def follow(self, out: Tensor, total: Tensor, scale: float) -> None:
        """`out` [B, stride] 16-bit is `scale` times the error of the reconstruction, `total` [stride] its sum over the
        tokens: compute the rest."""
        with self._beside():
            on_f, after = self.both[1], self.sides[0]
            share = loss_share(out, total, scale, self.d, self.any_dead(), len(self.copies.W_enc), self.config.alpha)
            losses = remaining_error_(after, out, scale, self.explained(), share, self.d)
            torch.mm(after, self.dec.T, out=on_f)
            self.rows = latent_rows(self.both, self.sides, self.enc, self.d)
            self.loss = losses.sum()

    def join(self) -> tuple[LatentRows, Tensor]:
        """Gradients of the dead latents, and AuxK's loss; what is launched from here on waits for them."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return self.rows, self.loss


Pair = Tensor | tuple[Tensor, Tensor]
"""Two matrices of a shape; as one tensor where they lie together, so that one product takes both."""


def latent_rows(both: Pair, sides: Pair, enc: Tensor, d: int) -> LatentRows:
    """Gradients of n latents, from their codes [B, n] and the gradients of these (set to 0 where a code is), the
    gradient of the reconstruction and the batch [B, stride], encoder rows [n, stride]."""
    (f, on_f), (out, x) = both, sides
    bias = mask_(on_f, f)
    if isinstance(both, Tensor) and isinstance(sides, Tensor) and both.is_cuda and TOGETHER:
        W_dec, W_enc = torch.bmm(both.transpose(1, 2), sides, out_dtype=torch.float32)
    else:
        W_dec, W_enc = product(f.T, out), product(on_f.T, x)
    return LatentRows(W_enc, W_dec, bias, weighted_sum(bias, enc)[:d])


TOGETHER = OUT_DTYPE
"""Whether torch has batched products of 16-bit matrices that stay in 32 bits."""


# ---- the dead latents -----------------------------------------------------------------------------------


@triton.jit
def _list(mask, listed, m, size, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    begin = tl.program_id(0) * BLOCK
    earlier = tl.zeros([BLOCK], tl.int32)
    for first in range(0, begin, BLOCK):  # every program counts what comes before its own part
        earlier += tl.load(mask + first + c).to(tl.int32)
    there = tl.load(mask + begin + c, mask=begin + c < m, other=0).to(tl.int32)
    to = tl.sum(earlier) + tl.cumsum(there, 0) - 1
    tl.store(listed + to, (begin + c).to(tl.int64), mask=(there > 0) & (to < size))
    if begin + BLOCK >= m:
        for first in range(tl.sum(earlier) + tl.sum(there), size, BLOCK):
            tl.store(listed + first + c, tl.zeros([BLOCK], tl.int64) + m, mask=first + c < size)


def list_latents(mask: Tensor, size: int) -> Tensor:
    """mask [m] bool with at most `size` latents -> their numbers [size] ascending, then m; without waiting for them."""
    m, block = len(mask), 2**12
    listed = torch.empty(size, dtype=torch.long, device=mask.device)
    _list[(triton.cdiv(m, block),)](mask.view(torch.uint8), listed, m, size, BLOCK=block, num_warps=8)
    return listed


def slots(latents: int, m: int) -> int:
    """Room for so many dead latents of m: one of a few lengths, each of which a step is recorded for."""
    step = max(16, m // 256, 2 ** (latents.bit_length() - 4) if latents >= 16 else 1)
    return -(-latents // step) * step


@triton.jit
def _take(W_enc, W_dec, b_enc, latents, enc, dec, bias, m, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    j = tl.load(latents + i)
    row = tl.minimum(j, m - 1)
    c = tl.arange(0, BLOCK)
    tl.store(enc + i * stride + c, tl.load(W_enc + row * stride + c, mask=c < stride), mask=c < stride)
    tl.store(dec + i * stride + c, tl.load(W_dec + row * stride + c, mask=c < stride), mask=c < stride)
    tl.store(bias + i, tl.where(j < m, tl.load(b_enc + row), float("-inf")).to(bias.dtype.element_ty))


def take_latents(copies: Copies, b_enc: Tensor, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encoder rows, decoder rows [n, stride] and biases [n] of some latents [n] in 16 bits; the bias is -inf for m."""
    (m, stride), n = copies.W_enc.shape, len(latents)
    enc, dec, bias = copies.x.new_empty(n, stride), copies.x.new_empty(n, stride), copies.x.new_empty(n)
    block = triton.next_power_of_2(stride)
    _take[(n,)](copies.W_enc, copies.W_dec, b_enc, latents, enc, dec, bias, m, stride, BLOCK=block, num_warps=4)
    return enc, dec, bias


@triton.jit
def _weigh(weights, rows, sums, n, stride, EACH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, EACH, ROWS):
        i = tl.program_id(0) * EACH + first + tl.arange(0, ROWS)
        inside = (i < n)[:, None] & (c < stride)[None, :]
        value = tl.load(rows + i.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(value * tl.load(weights + i, mask=i < n, other=0.0)[:, None], axis=0)
    tl.store(sums + tl.program_id(0) * stride + c, total, mask=c < stride)


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """weights [n] and 16-bit rows [n, stride] -> the sum of the rows times their weights [stride] float32."""
    n, stride = rows.shape
    sums = torch.empty(triton.cdiv(n, 64), stride, device=rows.device)
    grid = (len(sums), triton.cdiv(stride, BLOCK))
    _weigh[grid](weights, rows, sums, n, stride, EACH=64, ROWS=16, BLOCK=BLOCK, num_warps=WARPS)
    return sums.sum(0)


# ---- codes ----------------------------------------------------------------------------------------------


@triton.jit
def _reach(value, a, b):
    """How many of up to 2^15 values reach a and b: two counts in one sum, because each sum waits for all threads."""
    counts = tl.sum((value >= a).to(tl.int32) + ((value >= b).to(tl.int32) << 16))
    return counts & 0xFFFF, counts >> 16


@triton.jit
def _cut_whole_rows(bits, width, keep, BLOCK: tl.constexpr):
    """Keep the `keep` largest positive values of a row and set the others to 0; ties go to the lowest position."""
    row = bits + tl.program_id(0).to(tl.int64) * width
    c = tl.arange(0, BLOCK)
    value = tl.load(row + c, mask=c < width, other=-1).to(tl.int32)
    # The cut is at `low` or above and below `high`, which `above` values reach: thirds that do not hold it drop out.
    high = tl.maximum(tl.max(value), 1) + 1
    a, b = tl.maximum(high - 512, 1), tl.maximum(high - 192, 1)  # factors of 16 and 2.8 below the largest
    from_a, from_b = _reach(value, a, b)
    above = tl.where(from_b >= keep, 0, tl.where(from_a >= keep, from_b, tl.where(a > 1, from_a, 0)))
    low = tl.where(from_b >= keep, b, tl.where(from_a >= keep, a, 1))
    high = tl.where(from_b >= keep, high, tl.where(from_a >= keep, b, tl.maximum(a, 2)))
    while high - low > 1:
        third = (high - low + 1) // 3
        a = low + third
        b = tl.maximum(high - third, a)
        from_a, from_b = _reach(value, a, b)
        above = tl.where(from_b >= keep, above, tl.where(from_a >= keep, from_b, from_a))
        high = tl.where(from_b >= keep, high, tl.where(from_a >= keep, b, a))
        low = tl.where(from_b >= keep, b, tl.where(from_a >= keep, a, low))
    room = keep - above
    tie = (value == low).to(tl.int32)
    kept = (value > low) | ((tie > 0) & (tl.cumsum(tie, 0) <= room))
    tl.store(row + c, tl.where(kept, value, 0).to(tl.int16), mask=c < width)


def keep_largest_of_rows_(z: Tensor, keep: int) -> None:
    """Keep the `keep` largest positive values of each row of z [tokens, n] bfloat16, in place; the others become 0."""
    tokens, width = z.shape
    if width > WHOLE_ROWS:
        cut_rows(cut_into_blocks(z, keep), keep, dense=True)
        return
    block = max(16, triton.next_power_of_2(width))
    warps = max(1, min(16, block // PER_WARP))
    _cut_whole_rows[(tokens,)](z.view(torch.int16), width, keep, BLOCK=block, num_warps=warps)


MASK_ROWS, MASK_AT_ONCE, MASK_BLOCK = 32, 4, 256


@triton.jit
def _mask_columns(f, g, sums, tokens, width, GRADIENT: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Set g to 0 where f is, and sum its columns; without a gradient, count where f is not 0."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    begin = (part * ROWS).to(tl.int64) * width
    f += begin
    if GRADIENT:
        g += begin
    total = tl.zeros([BLOCK], tl.float32)
    left = tl.minimum(tokens - part * ROWS, ROWS)
    for first in range(0, left, AT_ONCE):
        for row in tl.static_range(AT_ONCE):
            mask = j < tl.where(first + row < left, width, 0)
            value = tl.load(f + row * width + j, mask=mask, other=0.0)
            if GRADIENT:
                slope = tl.load(g + row * width + j, mask=mask, other=0.0)
                slope = tl.where(value > 0, slope, 0.0)
                tl.store(g + row * width + j, slope, mask=mask)
                total += slope.to(tl.float32)
            else:
                total += tl.where(value > 0, 1.0, 0.0)
        f += AT_ONCE * width
        if GRADIENT:
            g += AT_ONCE * width
    tl.store(sums + part * width + j, total, mask=j < width)


def _sums(f: Tensor, g: Tensor | None) -> Tensor:
    tokens, width = f.shape
    parts = triton.cdiv(tokens, MASK_ROWS)
    sums = torch.empty(parts, width, device=f.device)
    _mask_columns[(triton.cdiv(width, MASK_BLOCK), parts)](
        f, f if g is None else g, sums, tokens, width, GRADIENT=g is not None,
        ROWS=MASK_ROWS, AT_ONCE=MASK_AT_ONCE, BLOCK=MASK_BLOCK, num_warps=1,
    )  # fmt: skip
    return sums.sum(0)


def mask_(g: Tensor, f: Tensor) -> Tensor:
    """Set g [tokens, n] to 0 where f [tokens, n] is not positive, in place; returns its column sums [n] float32."""
    return _sums(f, g)


def counts(f: Tensor) -> Tensor:
    """f [tokens, n] -> number of positive values in each column [n] float32."""
    return _sums(f, None)


# ---- the error ------------------------------------------------------------------------------------------


@triton.jit
def _spread(out, total_error, squares, tokens, d, row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, d, BLOCK):
        c = first + tl.arange(0, BLOCK)
        inside = (t < tokens)[:, None] & (c < d)[None, :]
        value = tl.load(out + t.to(tl.int64)[:, None] * row + c[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(total_error + c, mask=c < d, other=0.0) / tokens
        off = tl.where(inside, value - mean[None, :], 0.0)
        total += tl.sum(off * off, axis=1)
    tl.store(squares + tl.program_id(0), tl.sum(total))


@triton.jit
def _share(squares, dead, share, parts, m, scale_squared, on_error, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, BLOCK):
        c = first + tl.arange(0, BLOCK)
        total += tl.load(squares + c, mask=c < parts, other=0.0)
    spread = tl.sum(total) / scale_squared
    explains = (spread > 0) & (tl.load(dead) < m)  # nothing to explain counts as 0, and so does nobody to explain it
    inverse = tl.where(explains, 1 / tl.where(explains, spread, 1.0), 0.0)
    tl.store(share, inverse)
    tl.store(share + 1, on_error * inverse)


def loss_share(out: Tensor, total: Tensor, scale: float, d: int, dead: Tensor, m: int, alpha: float) -> Tensor:
    """out [B, stride] = `scale` times the error, its sum over the tokens [stride], the dead latents [n] (m: an empty
    slot) -> [2]: 1 over the error's sum of squares around its mean, and -2 `alpha` times that; 0 for 1 / 0."""
    tokens, share = len(out), torch.empty(2, device=out.device)
    squares = torch.empty(triton.cdiv(tokens, ROWS), device=out.device)
    _spread[(len(squares),)](out, total, squares, tokens, d, out.stride(0), ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS)
    _share[(1,)](squares, dead, share, len(squares), m, scale**2, -2 * alpha, BLOCK=1024, num_warps=4)
    return share


@triton.jit
def _remaining(out, decoded, share, after, losses, tokens, d, row, stride, scale,
               ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    by = tl.load(share + 1)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, stride, BLOCK):
        c = first + tl.arange(0, BLOCK)
        at = t.to(tl.int64)[:, None] * stride + c[None, :]
        inside = (t < tokens)[:, None] & (c < d)[None, :]
        error = tl.load(out + t.to(tl.int64)[:, None] * row + c[None, :], mask=inside, other=0.0).to(tl.float32) / scale
        left = error - tl.load(decoded + at, mask=inside, other=0.0)
        tl.store(after + at, (left * by).to(after.dtype.element_ty), mask=(t < tokens)[:, None] & (c < stride)[None, :])
        total += tl.sum(left * left, axis=1)
    tl.store(losses + tl.program_id(0), tl.sum(total) * tl.load(share))


def remaining_error_(after: Tensor, out: Tensor, scale: float, decoded: Tensor, share: Tensor, d: int) -> Tensor:
    """out [B, stride] = `scale` times the error, what the dead latents explain of it [B, stride] float32, `share` [2]
    -> `after` [B, stride] 16-bit becomes what they leave, times share[1]. Returns parts of the loss: the sums of its
    squares before, times share[0].
    """
    tokens, stride = out.shape
    losses = torch.empty(triton.cdiv(tokens, ROWS), device=out.device)
    _remaining[(len(losses),)](
        out, decoded, share, after, losses, tokens, d, out.stride(0), stride, scale,
        ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses
