"""Small operations of a language model's blocks, one kernel each: torch alone takes four to eight for each of them.

They round where transformers does, so that both give the same activations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, weight, out, eps, d, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    at, inside = tl.program_id(0).to(tl.int64) * d + c, c < d
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = (value * (1 / tl.sqrt(tl.sum(value * value) / d + eps))).to(out.dtype.element_ty)
    value = value.to(tl.float32) * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., d] over the root mean square of its last dimension, times `weight` [d]."""
    x, d = x.contiguous(), x.shape[-1]
    out, block = torch.empty_like(x), triton.next_power_of_2(d)
    _rms_norm[(x.numel() // d,)](x, weight, out, eps, d, BLOCK=block, num_warps=max(1, min(8, block // 512)))
    return out


@triton.jit
def _rotate(x, cos, sin, out, length, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h, c = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (h < heads) & (c < half)
    angle = (token % length) * 2 * half + c
    by_cos = tl.load(cos + angle, mask=c < half, other=0.0).to(tl.float32)
    by_sin = tl.load(sin + angle, mask=c < half, other=0.0).to(tl.float32)
    at = (token * heads + h) * 2 * half + c
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    turned = (first * by_cos).to(kind).to(tl.float32) - (second * by_sin).to(kind).to(tl.float32)
    tl.store(out + at, turned.to(kind), mask=inside)
    turned = (second * by_cos).to(kind).to(tl.float32) + (first * by_sin).to(kind).to(tl.float32)
    tl.store(out + at + half, turned.to(kind), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, L, heads, dim] with each pair of entries (i, i + dim / 2) turned by an angle, whose cosine and sine are in
    `cos` and `sin` [L, dim], the same in both halves."""
    n, length, heads, dim = x.shape
    x = x.contiguous()
    out, block = torch.empty_like(x), triton.next_power_of_2(dim // 2)
    rows = triton.next_power_of_2(heads)
    # Fused multiply-adds would leave out the rounding of the products.
    options = {"num_warps": max(1, min(8, rows * block // 256)), "enable_fp_fusion": False}
    _rotate[(n * length,)](x, cos, sin, out, length, heads, dim // 2, HEADS=rows, HALF=block, **options)
    return out


@triton.jit
def _gated(gate, up, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(gate + at, mask=at < n, other=0.0).to(tl.float32)
    value = (value / (1 + tl.exp(-value))).to(out.dtype.element_ty).to(tl.float32)
    value *= tl.load(up + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < n)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, all of one shape."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _gated[(triton.cdiv(gate.numel(), 2048),)](gate, up, out, gate.numel(), BLOCK=2048, num_warps=4)
    return out
