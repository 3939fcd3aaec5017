"""Dictionaries of unit rows that overlap as little as possible: the true features of synthetic data.

The overlap of a set of rows is its coherence: the largest |cosine| between two different rows. No set of k > d
rows in d dimensions can go below the Welch bound, sqrt((k - d) / (d (k - 1))).

Three ways to build the rows; `low_coherence` picks one:
- at most d rows: an orthonormal set, coherence 0;
- d a power of 4: mutually unbiased real bases (a Kerdock set), coherence exactly 1 / sqrt(d), at once;
- anything else: `descend`, a numerical search. It ends about 10 to 25% above the Welch bound (measured for k
  up to 4 d; far more rows cannot come near that bound). For k below about 3.5 d it even beats the bases.
  They stay the default for powers of 4, because they are exact and fast, and differ between machines by
  rounding only. Call `descend` yourself to get the lower value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sampled_sae.utils.errors import UserError

# Irreducible polynomials over GF(2) that define the fields GF(2^m); bit i is the coefficient of x^i.
_POLYNOMIALS = {
    1: 0b11, 3: 0b1011, 5: 0b100101, 7: 0b10000011, 9: 0b1000010001, 11: 0b100000000101, 13: 0b10000000011011
}  # fmt: skip
_BLOCK_ENTRIES = 2**24  # entries of the Gram matrix held at one time: 64 MiB as float32


def low_coherence(d: int, k: int, seed: int = 0) -> Tensor:
    """k unit rows of width d with low coherence; [k, d] float32 on the CPU, decided by (d, k, seed)."""
    _check_sizes(d, k)
    generator = torch.Generator().manual_seed(seed)
    if k <= d:
        return _rotation(d, generator)[:k].float()
    if k > max_bases(d) * d:
        return descend(d, k, seed)
    rows = unbiased_bases(d, math.ceil(k / d))
    chosen = torch.randperm(len(rows), generator=generator)[:k]
    # Without the rotation a quarter of the features would lie along single coordinates, which suits an
    # optimiser that works coordinate by coordinate, such as Adam.
    rotated = rows[chosen].double() @ _rotation(d, generator)
    return normalize(rotated, dim=1).float()


def coherence(rows: Tensor) -> float:
    """Largest |cosine| between two different rows of [k, d]; 0 for fewer than two rows."""
    if len(rows) < 2:
        return 0.0
    unit = normalize(rows.detach().float(), dim=1)
    block = _block_size(len(unit))
    largest = 0.0
    for start in range(0, len(unit), block):
        # The Gram matrix is symmetric: columns before the block have been seen.
        gram = (unit[start : start + block] @ unit[start:].T).abs_()
        gram.fill_diagonal_(0)
        largest = max(largest, gram.max().item())
    return largest


def max_bases(d: int) -> int:
    """How many mutually unbiased bases `unbiased_bases` can build: d / 2 + 1 for a power of 4, else 0."""
    n = d.bit_length() - 1
    return d // 2 + 1 if d == 1 << n and n - 1 in _POLYNOMIALS else 0


def unbiased_bases(d: int, count: int) -> Tensor:
    """The first `count` mutually unbiased bases of R^d, one below the other; [count * d, d] float32.

    Rows of one basis are orthogonal; rows of two bases have |cosine| 1 / sqrt(d). The bases are the
    identity, the Hadamard matrix, and Hadamard matrices whose columns carry the signs (-1)^Q(x).
    """
    if not 0 <= count <= max_bases(d):
        raise UserError(f"count={count}: R^{d} has {max_bases(d)} such bases here (d must be a power of 4)")
    n = d.bit_length() - 1
    bits = (torch.arange(d)[:, None] >> torch.arange(n)[None, :] & 1).float()
    hadamard = 1 - 2 * (bits @ bits.T % 2)
    bases = [torch.eye(d)]
    for element in range(count - 1):
        quadratic = torch.triu(kerdock_form(element, n).float(), diagonal=1)
        signs = 1 - 2 * ((bits @ quadratic * bits).sum(dim=1) % 2)
        bases.append(hadamard * signs / math.sqrt(d))
    return torch.cat(bases[:count]) if count else torch.empty(0, d)


def kerdock_form(element: int, n: int) -> Tensor:
    """Alternating form number `element` of the Kerdock set on n bits; [n, n] of 0 and 1, n even.

    On GF(2^m) + GF(2), m = n - 1, the form of the field element a is
    B_a((x, s), (y, t)) = Tr(a x) Tr(a y) + Tr(a^2 x y) + s Tr(a y) + t Tr(a x),
    and the sum of any two different forms of the set is nonsingular. That full rank is what makes the
    two bases unbiased. Element 0 is the zero form: the plain Hadamard matrix.
    """
    m = n - 1
    scaled = [_multiply(element, 1 << i, m) for i in range(m)]
    traces = [_trace(value, m) for value in scaled]
    form = torch.zeros(n, n, dtype=torch.long)
    for i in range(m):
        form[i, m] = form[m, i] = traces[i]
        for j in range(m):
            form[i, j] = _trace(_multiply(scaled[i], scaled[j], m), m) ^ (traces[i] & traces[j])
    return form


def descend(d: int, k: int, seed: int = 0) -> Tensor:
    """k unit rows of width d whose coherence was lowered step by step from random rows; [k, d] float32.

    Each step lowers the sum of |cosine|^p over pairs; p grows from 4 to 200, so that the sum comes to mean
    the largest. The number of steps falls from 600 to 100 as one step gets dearer: a few seconds for
    (256, 1024) and half a minute for (768, 3072) on two cores. Rounding differs between machines
    and numbers of threads, and the search magnifies it: there, one seed can give different rows.
    """
    _check_sizes(d, k)
    # Not the plain seed: an SAE of the same seed would draw its start from the same numbers.
    generator = torch.Generator().manual_seed(seed ^ 0x5DEECE66D)
    rows = normalize(torch.randn(k, d, generator=generator), dim=1)
    steps = max(100, min(600, int(150 * 256 * 1024**2 / (d * k * k))))
    momentum, energy = torch.zeros_like(rows), 0.0
    largest, lowest, best = coherence(rows), math.inf, rows
    for step in range(steps):
        done = step / steps
        push, largest = _push(rows, power=4 * 50**done, scale=largest)
        if largest < lowest:
            lowest, best = largest, rows
        # As Adam does, with one scale for all entries: the sum falls by orders of magnitude as p grows.
        momentum = 0.9 * momentum + 0.1 * push
        energy = 0.99 * energy + 0.01 * push.square().sum(dim=1).mean().item()
        scale = math.sqrt(energy / (1 - 0.99 ** (step + 1))) + 1e-30
        rows = normalize(rows - 0.1 * (1 - done) / scale * momentum / (1 - 0.9 ** (step + 1)), dim=1)
    return rows if coherence(rows) < lowest else best


def _push(rows: Tensor, power: float, scale: float) -> tuple[Tensor, float]:
    """Gradient [k, d] of the sum of |cosine / scale|^power along the sphere, and the coherence of `rows`.

    `scale` is the coherence one step before; without it the high powers would underflow.
    """
    block = _block_size(len(rows))
    gradient = torch.empty_like(rows)
    largest = 0.0
    for start in range(0, len(rows), block):
        part = slice(start, start + block)
        gram = rows[part] @ rows.T
        gram[:, part].fill_diagonal_(0)
        size = gram.abs()
        largest = max(largest, size.max().item())
        weight = size.div_(max(scale, 1e-30)).clamp_(max=1).pow_(power - 1)
        gradient[part] = weight.mul_(gram.sign_()) @ rows
    along_row = (gradient * rows).sum(dim=1, keepdim=True)
    return gradient - along_row * rows, largest


def _rotation(d: int, generator: torch.Generator) -> Tensor:
    """A uniformly random orthogonal matrix; [d, d] float64."""
    q, r = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    # QR alone is not uniform: it fixes signs by a convention of its own. This takes the convention out.
    return q * r.diagonal().sign()


def _multiply(a: int, b: int, m: int) -> int:
    """Product of two elements of GF(2^m), each written as the bits of a polynomial."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        b >>= 1
        a <<= 1
        if a >> m:
            a ^= _POLYNOMIALS[m]
    return product


def _trace(a: int, m: int) -> int:
    """Trace of an element of GF(2^m) down to GF(2): a + a^2 + a^4 + ..., which is 0 or 1."""
    total = 0
    for _ in range(m):
        total ^= a
        a = _multiply(a, a, m)
    return total


def _block_size(k: int) -> int:
    return max(1, _BLOCK_ENTRIES // k)


def _check_sizes(d: int, k: int) -> None:
    if d < 2:
        raise UserError(f"d={d}: the width must be at least 2")
    if k < 1:
        raise UserError(f"k={k}: the number of rows must be at least 1")
