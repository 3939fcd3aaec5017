"""Matrix products of 16-bit matrices, summed in 32 bits, and the padded 16-bit copies that they take."""

from __future__ import annotations

import torch
from torch import Tensor


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
    if a.is_cuda and a.dtype != torch.float32 and _OUT_DTYPE:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


_OUT_DTYPE = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 8)
"""Whether torch can leave a 16-bit product in 32 bits."""
