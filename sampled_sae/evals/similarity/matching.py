"""Cosines between the rows of two dictionaries, and the one-to-one matching of the largest total cosine.

Cosines come a block at a time: 65,536 x 65,536 of them never lie in memory.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sampled_sae.evals.similarity.members import SimilarityConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.third_party import install

STEPS = 40_000  # points of the quadrature; twice as many change no digit that is shown
MOST_SWEEPS = 1000
"""Sweeps over the candidates that look for prices; fewer are needed, and any prices give a true bound."""
SETTLED = 1e-9  # A price that rises by less does not count


class Directions(NamedTuple):
    """A dictionary's rows as directions."""

    rows: Tensor  # [n, d] float32 of unit norm
    latent: Tensor  # [n] long: which latent each one is. Rows of zeros have no direction and are left out.


def directions(decoder: Tensor, name: str = "decoder") -> Directions:
    """Decoder rows [m, d] of any norm -> unit rows on the same device."""
    if decoder.ndim != 2:
        raise UserError(f"{name} has shape {list(decoder.shape)}: must be a matrix [latents, width]")
    rows = decoder.detach().float()
    largest = torch.linalg.vector_norm(rows, torch.inf, dim=1)
    if not bool(largest.isfinite().all()):
        raise UserError(f"{name} has entries that are nan or infinite: must be finite numbers")
    latent = largest.nonzero()[:, 0]
    if len(latent) < len(rows):
        rows, largest = rows[latent], largest[latent]
    # Squares of very small or large entries would be 0 or infinite.
    unit = rows / largest[:, None]
    unit /= unit.norm(dim=1, keepdim=True)
    return Directions(unit, latent)


def blocks(a: Tensor, b: Tensor, at_once: int) -> Iterator[tuple[int, Tensor]]:
    """Cosines of unit rows [m, d] and [n, d]: the first row's number and [r, n], in order.

    Every block is overwritten by the next one, so that no two of them are held; the reader may change it in place.
    """
    if not len(a) or not len(b):
        return
    height = min(len(a), max(1, at_once // len(b)))
    buffer = a.new_empty(height, len(b))
    for first in range(0, len(a), height):
        part = a[first : first + height]
        yield first, torch.mm(part, b.T, out=buffer[: len(part)])


def nearest(a: Tensor, b: Tensor, at_once: int) -> tuple[Tensor, Tensor]:
    """Unit rows [m, d] and [n, d] -> the largest cosine of each with any row of the other side, [m] and [n].

    One pass gives both; -inf where the other side has no rows.
    """
    rows, columns = a.new_full((len(a),), -torch.inf), b.new_full((len(b),), -torch.inf)
    for first, cosine in blocks(a, b, at_once):
        rows[first : first + len(cosine)] = cosine.amax(1)
        torch.maximum(columns, cosine.amax(0), out=columns)
    # Rounding may carry a cosine of 1 a little beyond.
    return rows.clamp_(max=1), columns.clamp_(max=1)


def best_of_rows(a: Tensor, b: Tensor, count: int, at_once: int, prices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` columns of the largest cosine, less the column's price [n], for each row: values and columns [m, c].

    Largest first; c is n where there are fewer columns than asked for.
    """
    count = min(count, len(b))
    values, columns = a.new_empty(len(a), count), torch.empty(len(a), count, dtype=torch.long, device=a.device)
    for first, cosine in blocks(a, b, at_once):
        if prices is not None:
            cosine.sub_(prices)
        found = cosine.topk(count, dim=1)
        values[first : first + len(cosine)], columns[first : first + len(cosine)] = found
    return values, columns


def random_best(width: int, others: int) -> float | None:
    """Expected largest cosine of a direction with `others` random ones, all even on the sphere in `width` dimensions.

    It is the MMCS of two dictionaries of random rows, where the other one has so many. The cosine t of two random
    directions has a density in proportion to (1 - t^2)^((width - 3) / 2), and the n of one row are independent, so
    that E[max] = 1 - integral of F(t)^n from -1 to 1. None where there are no others.
    """
    if others < 1 or width < 1:
        return None
    if width == 1:
        return 1 - 2 * 0.5**others
    # By the angle, t = -cos(angle): the density is sin(angle)^(width - 2), bounded in every dimension.
    angle = torch.linspace(0, math.pi, STEPS + 1, dtype=torch.float64)
    sine = angle.sin().clamp_min(1e-300)
    density = ((width - 2) * sine.log()).exp()
    below = torch.cat([density.new_zeros(1), torch.cumulative_trapezoid(density, angle)])
    power = (others * (below / below[-1]).clamp_min(1e-300).log()).exp()
    return 1 - float(torch.trapezoid(power * sine, angle))


# ---- one-to-one matching -------------------------------------------------------------------------------


class Match(NamedTuple):
    """The partner of each row; every row of the smaller side has one, none has two."""

    column: Tensor  # [m] long on the CPU: the row's partner, -1 for one without
    cosine: Tensor  # [m] float32 on the CPU: cosine of the two, nan for a row without partner
    method: Literal["exact", "candidates"]
    """Whether all cosines were read at once, or only the best candidates of each row and column."""
    total: float  # sum of the pairs' cosines
    bound: float  # no one-to-one matching has a larger sum than this

    @property
    def pairs(self) -> int:
        return int((self.column >= 0).sum())

    @property
    def gap(self) -> float:
        """Mean cosine per pair by which a better matching could be better, at most."""
        return max(0.0, self.bound - self.total) / max(1, self.pairs)


def match_rows(a: Tensor, b: Tensor, settings: SimilarityConfig | None = None) -> Match:
    """Match unit rows [m, d] to unit rows [n, d], by cosine with its sign.

    Small dictionaries are matched exactly (Hungarian). Large ones on a sparse graph of candidates, which grows until
    duality proves that no better matching exists up to the tolerance, or the rounds are over; `gap` is the remainder.
    """
    settings = settings or SimilarityConfig()
    if not len(a) or not len(b):
        return Match(torch.full((len(a),), -1), torch.full((len(a),), torch.nan), "exact", 0.0, 0.0)
    if len(a) > len(b):
        return _turned(match_rows(b, a, settings), len(a))
    if len(a) * len(b) <= settings.exact_up_to**2:
        return _exact(a, b)
    return _by_candidates(a, b, settings)


def _turned(match: Match, rows: int) -> Match:
    """The same pairs, seen from the other side."""
    column, cosine = torch.full((rows,), -1), torch.full((rows,), torch.nan)
    column[match.column] = torch.arange(len(match.column))
    cosine[match.column] = match.cosine
    return match._replace(column=column, cosine=cosine)


def _exact(a: Tensor, b: Tensor) -> Match:
    _, column, cosine = _hungarian((a @ b.T).cpu())
    total = float(cosine.double().sum())
    return Match(column, cosine, "exact", total, total)


def _hungarian(cosine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best pairs of cosines [m, n] on the CPU: rows, columns and cosines [min(m, n)], in order of the rows."""
    row, column = map(torch.from_numpy, _scipy("optimize").linear_sum_assignment(cosine.numpy(), maximize=True))
    return row, column, cosine[row, column]


class _Edges(NamedTuple):
    """Pairs that a matching may use, each once."""

    row: Tensor
    column: Tensor
    cosine: Tensor  # float64


def _by_candidates(a: Tensor, b: Tensor, settings: SimilarityConfig) -> Match:
    best, columns = best_of_rows(a, b, settings.candidates, settings.at_once)
    back, rows = best_of_rows(b, a, settings.candidates, settings.at_once)
    # Each row has one partner at most, and so has each column: two bounds that need no prices.
    bound = min(float(best[:, 0].double().sum()), float(back[:, 0].double().topk(len(a)).values.sum()))
    edges = _joined(len(b), _listed(best, columns), _listed(back, rows, turned=True))
    try:
        column = _assign(edges, len(a), len(b))
    except ValueError:  # these candidates leave some row without a partner
        edges = _joined(len(b), edges, _completion(a, b, edges, settings.exact_up_to))
        column = _assign(edges, len(a), len(b))
    for number in range(settings.rounds):
        prices = _prices(edges, column, len(b))
        reduced, columns = best_of_rows(a, b, 4, settings.at_once, prices.to(a))
        # Duality: prices p >= 0 bound every matching by sum of p plus each row's largest cosine less price.
        bound = min(bound, float(prices.sum() + reduced[:, 0].double().sum()))
        total = float(_pair_cosines(a, b, column).double().sum())
        if bound - total <= settings.tolerance * len(a) or number == settings.rounds - 1:
            break
        cosine = reduced.double().cpu() + prices[columns.cpu()]
        edges = _joined(len(b), edges, _listed(cosine, columns))
        column = _assign(edges, len(a), len(b))
    cosine = _pair_cosines(a, b, column)
    total = float(cosine.double().sum())
    return Match(column, cosine, "candidates", total, max(bound, total))


def _listed(cosine: Tensor, partner: Tensor, turned: bool = False) -> _Edges:
    """Cosines and partners [n, c] of each row (or column, if turned) as a list."""
    own = torch.arange(len(partner)).repeat_interleave(partner.shape[1])
    other = partner.cpu().flatten()
    return _Edges(*((other, own) if turned else (own, other)), cosine.cpu().double().flatten())


def _joined(n: int, *parts: _Edges) -> _Edges:
    """Lists of edges as one, each edge once, in order of rows and columns."""
    key = torch.cat([part.row * n + part.column for part in parts])
    cosine = torch.cat([part.cosine for part in parts])
    unique, place = key.unique(return_inverse=True)
    # Two products may round one cosine differently: the larger one counts.
    cosine = torch.full((len(unique),), -torch.inf, dtype=torch.float64).scatter_reduce_(0, place, cosine, "amax")
    return _Edges(unique // n, unique % n, cosine)


def _completion(a: Tensor, b: Tensor, edges: _Edges, exact_up_to: int) -> _Edges:
    """Edges that make a matching of all rows possible, where the candidates alone do not."""
    m, n = len(a), len(b)
    # A column of its own for each row, at a cosine of 0, so that the sparse problem always has a solution.
    spare = _Edges(torch.arange(m), n + torch.arange(m), torch.zeros(m, dtype=torch.float64))
    column = _assign(_joined(n + m, edges, spare), m, n + m)
    left = (column >= n).nonzero()[:, 0]
    taken = torch.zeros(n, dtype=torch.bool)
    taken[column[column < n]] = True
    free = (~taken).nonzero()[:, 0]
    if len(left) * len(free) > max(exact_up_to, 1024) ** 2:
        # Only dictionaries of many equal rows come here, where one partner is as good as another.
        free = free[: len(left)]
        return _Edges(left, free, _pair_cosines(a[left.to(a.device)], b, free).double())
    row, among, cosine = _hungarian((a[left.to(a.device)] @ b[free.to(b.device)].T).cpu())
    return _Edges(left[row], free[among], cosine.double())


def _assign(edges: _Edges, m: int, n: int) -> Tensor:
    """The best matching of all m rows that uses these edges alone: each row's column [m]."""
    # Costs must be above 0: scipy takes a 0 for an edge that is not there.
    cost, place = (2 - edges.cosine).numpy(), (edges.row.int().numpy(), edges.column.int().numpy())
    graph = _scipy("sparse").csr_array((cost, place), shape=(m, n))
    found = _scipy("sparse.csgraph").min_weight_full_bipartite_matching(graph)
    row, column = (torch.as_tensor(side, dtype=torch.long) for side in found)
    return torch.empty(m, dtype=torch.long).index_copy_(0, row, column)


def _prices(edges: _Edges, column: Tensor, n: int) -> Tensor:
    """Prices [n] float64 of the columns at which every row likes its own column best, among its edges.

    A row that keeps its column gains cosine less price; another column must cost enough not to tempt it. Prices start
    at 0 and rise until no row prefers another column, which happens because the matching is the best on these edges.
    """
    place = torch.searchsorted(edges.row * n + edges.column, torch.arange(len(column)) * n + column)
    temptation = edges.cosine - edges.cosine[place][edges.row]
    current = column[edges.row]
    prices = torch.zeros(n, dtype=torch.float64)
    for _ in range(MOST_SWEEPS):
        risen = prices.scatter_reduce(0, edges.column, temptation + prices[current], "amax")
        if float((risen - prices).max()) <= SETTLED:
            break
        prices = risen
    return prices


def _pair_cosines(a: Tensor, b: Tensor, column: Tensor) -> Tensor:
    """Cosines [m] of each row of a with its partner, on the CPU."""
    parts = zip(a.split(8192), column.split(8192), strict=True)
    return torch.cat([(part * b[chosen.to(b.device)]).sum(1).cpu() for part, chosen in parts])


def _scipy(name: str) -> Any:
    """A part of scipy, or one line on what is missing."""
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError:
        raise UserError(f"matching needs scipy; {install('experiments')}") from None


class Matching(NamedTuple):
    """The latent that stands for each true feature; no latent stands for two."""

    latent: Tensor  # [k] long: index of the latent, -1 for a feature that got none
    similarity: Tensor  # [k] float: absolute cosine of the two rows, 0 for a feature that got none


def match(learned: Tensor, true: Tensor) -> Matching:
    """One-to-one matching of learned [m, d] to true [k, d] rows with the largest total absolute cosine.

    Signs and lengths of the rows do not matter; a row of zeros has cosine 0 with everything. With fewer
    latents than features (m < k) some features stay unmatched. The result is on the CPU.
    """
    unit_true, unit_learned = (normalize(rows.detach().float(), dim=1) for rows in (true, learned))
    features, latents, cosine = _hungarian((unit_true @ unit_learned.T).abs().cpu())
    latent, similarity = torch.full((len(true),), -1), torch.zeros(len(true))
    latent[features], similarity[features] = latents, cosine
    return Matching(latent, similarity)


def bucket_recovery(
    similarity: Tensor, bucket: Tensor, names: Sequence[str], threshold: float = 0.7
) -> dict[str, float | None]:
    """Share of the features of each bucket with similarity >= threshold.

    similarity [k] and bucket [k] (index into `names`) in; one entry for each name out. A bucket without
    features has no share: its entry is None, which JSON can hold, unlike nan.
    """
    recovered = (similarity.cpu() >= threshold).double()
    inside = [recovered[bucket.cpu() == index] for index in range(len(names))]
    return {name: own.mean().item() if len(own) else None for name, own in zip(names, inside, strict=True)}


def activation_fidelity(learned_frequency: Tensor, true_frequency: Tensor, matching: Matching) -> float | None:
    """Pearson correlation of learned [m] and true [k] firing frequency over the matched features.

    None where a correlation does not exist: fewer than two features, or a frequency that is the same for all of them.

    A true feature whose coefficients have both signs needs two latents, and each fires about half as often
    as the feature. A correlation does not see such a common factor.
    """
    chosen = matching.latent >= 0
    latent = matching.latent[chosen]
    a, b = learned_frequency.cpu()[latent].double(), true_frequency.cpu()[chosen].double()
    # Equality, not zero variance: rounding leaves a constant vector with a tiny variance.
    if len(a) < 2 or bool((a == a[0]).all()) or bool((b == b[0]).all()):
        return None
    a, b = a - a.mean(), b - b.mean()
    return max(-1.0, min(1.0, (a @ b / (a.norm() * b.norm())).item()))
