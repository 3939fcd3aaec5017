"""Latents over ranks: each of N processes holds d_sae / N latents of an SAE, and all of them see the whole batch.

Rank r has the rows r * d_sae / N and following. The ranks exchange counts by value, scores, and partial
reconstructions, never gradients of the weights. Every process ends up with the same bits in what they all hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.method.config import SAEConfig
from sampled_sae.method.scores import get_score
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.ranks import Group


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the latents this process holds, and what it exchanges with the others. The default: all of them."""

    ranks: Group = field(default_factory=Group)
    """The processes that hold the parts, in their order."""

    @property
    def index(self) -> int:
        """Number of this part."""
        return self.ranks.rank

    @property
    def number(self) -> int:
        """How many parts there are."""
        return self.ranks.size

    def own(self, d_sae: int) -> slice:
        """The latents of this process, of d_sae."""
        size = d_sae // self.number
        return slice(self.index * size, (self.index + 1) * size)

    def sum(self, part: Tensor) -> Tensor:
        """Sum over the ranks, added in their order: the same bits on every rank and in every run."""
        return self.ranks.ordered_sum(part)

    def count(self, part: Tensor) -> Tensor:
        """Sum of integers over the ranks; may be in place."""
        return self.ranks.sum(part)

    def total(self, number: int, device: torch.device) -> int:
        """Sum of a number over the ranks, which exchange tensors on `device`."""
        return number if self.number == 1 else int(self.count(torch.tensor(number, device=device)))

    def stack(self, part: Tensor) -> Tensor:
        """Every rank's tensor, in their order [number, ...]."""
        return self.ranks.gather(part)

    def gather(self, part: Tensor) -> Tensor:
        """Numbers of this rank's latents [..., n] -> those of all latents [..., number * n]."""
        return part if self.number == 1 else self.stack(part).movedim(0, -2).flatten(-2)

    def rows(self, part: Tensor) -> Tensor:
        """Rows of this rank's latents [n, ...] -> those of all latents [number * n, ...]."""
        return part if self.number == 1 else self.stack(part).flatten(0, 1)


WHOLE = Shard()


def check_divided(config: SAEConfig, number: int) -> None:
    """Raise a one-line error if the latents of an SAE cannot be divided over `number` ranks."""
    if config.d_sae % number:
        raise UserError(f"d_sae = {config.d_sae}: must be a multiple of {number}, the ranks that share its latents")
    score = get_score(config.pool.score)
    together = score.reads == "activations" or (score.reads == "input" and not score.builtin)
    if number > 1 and config.pool.restricts and together:
        raise UserError(
            f"pool.score = {score.name!r}: reads the activations of all latents at once, which are on {number} ranks; "
            "use a score of sums, or divide SAEs instead of latents"
        )


def is_sliced(name: str) -> bool:
    """Whether a tensor of `Learner.state()` holds this rank's latents (along dim 0) rather than the same on all."""
    group, *rest = name.split(".")
    if group in ("weights", "adam"):
        return rest[0] != "b_dec" and rest[-1] != "step"
    return name == "tokens_since_fired"


class Cut(NamedTuple):
    """Where a cut over the values on all ranks lies, for each of a number of rows."""

    bits: Tensor
    """[rows] integers, the first bits of the values: those above are kept. 0 if there are fewer values than wanted."""
    room: Tensor
    """[rows]: how many of those equal to it are kept."""


Exchange = Callable[[str, Callable[[], Tensor], Callable[[Tensor], Tensor]], Tensor]
"""(name, part of a step that makes a tensor, what the ranks do with it) -> the result. A GPU records the parts."""


def exchanged(name: str, make: Callable[[], Tensor], over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """The default: nothing is recorded."""
    return over_ranks(make())


class CommonCut:
    """The `keep` largest values of each row on all ranks together; ties go to the lowest token and latent.

    `bits` [n] are positive floats read as integers of `width` bits, which keeps their order, or 0 for no value. They
    come in order of `token` [n] and latent, and are at least this rank's own `keep` largest of each row. A row is so
    many of the `tokens`, one after the other.

    Values are counted by their first bits, then those that agree with the cut so far by their next ones. The counters
    of all rows fit into one message: for one row 16 bits at a time, two rounds for float32; with a row per token fewer
    bits and more rounds. The largest values themselves, keep * rows from each of N ranks, would be more to send as soon
    as N is about 8.
    """

    def __init__(self, bits: Tensor, token: Tensor, tokens: int, rows: int, keep: int, width: int, shard: Shard):
        self.bits, self.token, self.tokens, self.rows, self.keep = bits, token, tokens, rows, keep
        self.width, self.shard = width, shard
        self.at_once = max(4, 16 - (rows - 1).bit_length())

    def kept(self, exchange: Exchange = exchanged) -> Callable[[], Tensor]:
        """A function that gives which of the values [n] are kept; all that the ranks exchange for it is done before."""
        counts: list[Tensor] = []
        while len(counts) * self.at_once < self.width:
            counts.append(exchange(f"counts {len(counts)}", lambda: self._count(counts), self.shard.count))
        ties = exchange("ties", lambda: self._ties(self._tied(self._cut(counts))), self.shard.stack)
        return lambda: self._inside(self._cut(counts), ties.long())

    def _row(self) -> Tensor:
        return self.token // (self.tokens // self.rows)

    def _rest(self, rounds: int) -> int:
        """How many of the bits are not counted after so many rounds."""
        return max(0, self.width - rounds * self.at_once)

    def _count(self, before: list[Tensor]) -> Tensor:
        """This rank's values that agree with the cut so far, by their next bits [rows * 2^bits]."""
        rest, row = self._rest(len(before) + 1), self._row()
        digits = self._rest(len(before)) - rest
        first = self.bits >> rest
        here = (first >> digits) == self._cut(before).bits[row]
        slot = (row << digits) + (first & ((1 << digits) - 1))
        counts = torch.zeros(self.rows << digits, dtype=torch.int32, device=self.bits.device)
        return counts.index_add_(0, slot, here.to(torch.int32))

    def _cut(self, counts: list[Tensor]) -> Cut:
        """The cut, as far as the counts of some rounds say."""
        cut, wanted = self.token.new_zeros(self.rows), self.token.new_full((self.rows,), self.keep)
        for flat in counts:
            number = flat.view(self.rows, -1)
            reach = number.flip(1).cumsum(1).flip(1)  # values with this digit or a larger one
            digit = (reach >= wanted[:, None]).sum(1).sub_(1).clamp_min_(0)
            own = digit[:, None]
            wanted = wanted - (reach.gather(1, own) - number.gather(1, own))[:, 0]
            cut = cut * number.shape[1] + digit
        return Cut(cut, wanted)

    def _tied(self, cut: Cut) -> Tensor:
        return ((self.bits == cut.bits[self._row()]) & (self.bits > 0)).int()

    def _ties(self, tied: Tensor) -> Tensor:
        """This rank's values of each token that equal the cut [tokens]."""
        return tied.new_zeros(self.tokens).index_add_(0, self.token, tied)

    def _inside(self, cut: Cut, by_rank: Tensor) -> Tensor:
        """The values above the cut, and those tied with it for which there is room; ties by_rank [number, tokens]."""
        row, tied, own = self._row(), self._tied(cut), by_rank[self.shard.index]
        # Ties before this rank's of a token: of earlier tokens of the row on all ranks, of the token on lower ranks.
        of_all = by_rank.sum(0).view(self.rows, -1)
        before = (of_all.cumsum(1) - of_all).view(-1) + by_rank[: self.shard.index].sum(0)
        number = tied.cumsum(0) + (before - own.cumsum(0) + own)[self.token]
        return (self.bits > cut.bits[row]) | ((tied > 0) & (number <= cut.room[row]))


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(value: Tensor) -> tuple[Tensor, int]:
    """Floats [n], none below 0 -> integers of the same order, and the number of bits of the largest."""
    return value.view(INTEGERS[value.itemsize]).long(), 8 * value.itemsize - 1
