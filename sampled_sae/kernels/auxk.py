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
from sampled_sae.kernels.masked import keep_largest_of_rows_, mask_
from sampled_sae.method.config import AuxKConfig
from sampled_sae.method.parameters import Weights

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
    """[parts, n], to be summed."""


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class DeadPass:
    """AuxK's forward and backward pass on one batch."""

    def __init__(self, copies: Copies, weights: Weights, dead: Tensor, config: AuxKConfig):
        """`dead` [n] are the dead latents (m: an empty slot). Encoding them begins at once."""
        self.copies, self.config, self.d, self.dead = copies, config, len(weights.b_dec), dead
        self.stream = self._second_stream()
        with self._beside():
            x = copies.x
            # Codes and their gradients, and what these are multiplied by, side by side for one product of both.
            self.both = x.new_empty(2, len(x), len(dead))
            self.sides = x.new_empty(2, *x.shape)
            self.enc, self.dec, bias = take_latents(copies, weights.b_enc, dead, self.sides[1])
            torch.addmm(bias, x, self.enc.T, out=self.both[0])
            self._cut(config.latents(self.d))

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
            squares = spread(out, total, self.d)
            share = Share(squares, self.any_dead(), len(self.copies.W_enc), self.config.alpha)
            losses = remaining_error_(after, out, scale, self.explained(), share, self.d)
            torch.mm(after, self.dec.T, out=on_f)
            self.rows = latent_rows(self.both, self.sides)
            self.loss = losses.sum()

    def join(self) -> tuple[LatentRows, Tensor]:
        """Gradients of the dead latents, and AuxK's loss; what is launched from here on waits for them."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return self.rows, self.loss


Pair = Tensor | tuple[Tensor, Tensor]
"""Two matrices of a shape; as one tensor where they lie together, so that one product takes both."""


def latent_rows(both: Pair, sides: Pair) -> LatentRows:
    """Gradients of n latents, from their codes [B, n] and the gradients of these (set to 0 where a code is), the
    gradient of the reconstruction and the batch [B, stride]."""
    (f, on_f), (out, x) = both, sides
    bias = mask_(on_f, f)
    if isinstance(both, Tensor) and isinstance(sides, Tensor) and both.is_cuda and TOGETHER:
        W_dec, W_enc = torch.bmm(both.transpose(1, 2), sides, out_dtype=torch.float32)
    else:
        W_dec, W_enc = product(f.T, out), product(on_f.T, x)
    return LatentRows(W_enc, W_dec, bias)


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
def _take(W_enc, W_dec, b_enc, latents, x, enc, dec, bias, to, n, tokens, m, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    at, inside = i * stride + c, c < stride
    if i < n:
        j = tl.load(latents + i)
        row = tl.minimum(j, m - 1)
        tl.store(enc + at, tl.load(W_enc + row * stride + c, mask=inside), mask=inside)
        tl.store(dec + at, tl.load(W_dec + row * stride + c, mask=inside), mask=inside)
        tl.store(bias + i, tl.where(j < m, tl.load(b_enc + row), float("-inf")).to(bias.dtype.element_ty))
    if i < tokens:
        tl.store(to + at, tl.load(x + at, mask=inside), mask=inside)


def take_latents(copies: Copies, b_enc: Tensor, latents: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encoder rows, decoder rows [n, stride] and biases [n] of some latents [n] in 16 bits; the bias is -inf for m.

    The batch is copied to `x` [B, stride] in the same launch.
    """
    (m, stride), n, tokens = copies.W_enc.shape, len(latents), len(x)
    enc, dec, bias = x.new_empty(n, stride), x.new_empty(n, stride), x.new_empty(n)
    _take[(max(n, tokens),)](
        copies.W_enc, copies.W_dec, b_enc, latents, copies.x, enc, dec, bias, x, n, tokens, m, stride,
        BLOCK=triton.next_power_of_2(stride), num_warps=4,
    )  # fmt: skip
    return enc, dec, bias


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


def spread(out: Tensor, total: Tensor, d: int) -> Tensor:
    """out [B, stride] and its sum over the tokens [stride] -> parts of its sum of squares around its mean."""
    squares = torch.empty(triton.cdiv(len(out), ROWS), device=out.device)
    _spread[(len(squares),)](out, total, squares, len(out), d, out.stride(0), ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS)
    return squares


class Share(NamedTuple):
    """What decides the weight of AuxK's loss."""

    squares: Tensor
    """Parts of the sum of squares of `scale` times the error, around its mean."""
    dead: Tensor
    """[n]: the first is m if no latent is dead."""
    m: int
    alpha: float


@triton.jit
def _remaining(out, decoded, squares, dead, after, losses, parts, m, alpha, tokens, d, row, stride, scale,
               PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    part = tl.arange(0, PARTS)
    whole = tl.sum(tl.load(squares + part, mask=part < parts, other=0.0)) / (scale * scale)
    explains = (whole > 0) & (tl.load(dead) < m)  # 0 without an error, and 0 without dead latents
    share = tl.where(explains, 1 / tl.where(explains, whole, 1.0), 0.0)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, stride, BLOCK):
        c = first + tl.arange(0, BLOCK)
        at = t.to(tl.int64)[:, None] * stride + c[None, :]
        inside = (t < tokens)[:, None] & (c < d)[None, :]
        error = tl.load(out + t.to(tl.int64)[:, None] * row + c[None, :], mask=inside, other=0.0).to(tl.float32) / scale
        left = error - tl.load(decoded + at, mask=inside, other=0.0)
        value = (left * (-2 * alpha * share)).to(after.dtype.element_ty)
        tl.store(after + at, value, mask=(t < tokens)[:, None] & (c < stride)[None, :])
        total += tl.sum(left * left, axis=1)
    tl.store(losses + tl.program_id(0), tl.sum(total) * share)


def remaining_error_(after: Tensor, out: Tensor, scale: float, decoded: Tensor, share: Share, d: int) -> Tensor:
    """out [B, stride] = `scale` times the error, what the dead latents explain of it [B, stride] float32 -> `after`
    [B, stride] 16-bit becomes the gradient of AuxK's loss: what they leave, times -2 alpha over the error's sum of
    squares around its mean. Returns parts of the loss: the sums of the squares of what they leave, over the same.
    """
    tokens, stride = out.shape
    parts = len(share.squares)
    losses = torch.empty(triton.cdiv(tokens, ROWS), device=out.device)
    _remaining[(len(losses),)](
        out, decoded, share.squares, share.dead, after, losses, parts, share.m, share.alpha, tokens, d, out.stride(0),
        stride, scale, PARTS=triton.next_power_of_2(parts), ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses
