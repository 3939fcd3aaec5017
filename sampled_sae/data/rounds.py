"""In which order tokens are trained on: blocks of contexts, and rounds of batches that mix parts of three blocks.

A block's tokens are shuffled and cut into three parts. A round hands out one part of its own block, one of the block
before and one of the block after it, shuffled together. So the buffer holds two blocks' worth of tokens, as one would
of which half is handed out and then refilled; but no token stays longer than two rounds, so that a resumed run sends
three blocks at most through the model again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sampled_sae.config import require
from sampled_sae.data.stream import permutation

SPARE = 0.02  # share of a block's tokens that may be left out for their norm before some others are used twice
SHUFFLES = 2**40  # from here on, numbers of permutations are those of rounds, not of blocks


@dataclass(frozen=True, slots=True)
class Rounds:
    """The blocks of a harvest, and which of their parts each round hands out."""

    contexts: int
    """Contexts of a block."""
    batches: int
    """Batches of a block, and of a round."""
    parts: int
    """Parts of a block: 3, or 1 if rounds are blocks."""
    number: int | None
    """How many rounds and blocks there are; none if there is no end."""

    def round_of(self, block: int, part: int) -> int:
        """The round that hands out a part of a block."""
        if self.parts == 1:
            return block
        # Before the first round and after the last one there is none.
        return min(max(0, block - 1 + part), block + 1 if self.number is None else self.number - 1)

    def parts_of(self, number: int) -> list[tuple[int, int]]:
        """Blocks and parts that round `number` hands out."""
        end = number + 2 if self.number is None else self.number
        blocks = range(max(0, number - 1), min(number + 2, end))
        return [(b, p) for b in blocks for p in range(self.parts) if self.round_of(b, p) == number]

    def cuts(self, rows: int) -> list[int]:
        """Rows of each part of a block of `rows` tokens: the first and the last part have the same size."""
        side = rows // self.parts
        return [rows] if self.parts == 1 else [side, rows - 2 * side, side]

    def mixed(self, parts: list[Tensor], seed: int, number: int) -> Tensor:
        """The parts [n, d] of round `number` -> all their rows [batches * batch_size, d], shuffled."""
        if len(parts) == 1:
            return parts[0]
        rows = sum(map(len, parts))
        to = permutation(rows, seed, SHUFFLES + number).to(parts[0].device)
        mixed = parts[0].new_empty(rows, parts[0].shape[1])
        for part, where in zip(parts, to.split([len(part) for part in parts]), strict=True):
            mixed.index_copy_(0, where, part)
        return mixed


def whole_batches(contexts: int, used: int, batch_size: int) -> int:
    """Batches in a block of so many contexts with `used` tokens in use each."""
    return int(contexts * used * (1 - SPARE)) // batch_size


def enough_contexts(batches: int, used: int, batch_size: int) -> int:
    """The fewest contexts in a block of so many batches."""
    count = max(1, int(batches * batch_size / (used * (1 - SPARE))))
    while whole_batches(count, used, batch_size) < batches:  # for what rounding takes
        count += 1
    return count


def plan_rounds(contexts: int, used: int, batch_size: int, steps: int | None, rolling: bool) -> Rounds:
    """A buffer of so many contexts, `used` tokens of each in use -> its rounds, for `steps` batches or without end.

    A round is a block of the whole buffer if not `rolling`, if that holds all steps, or if half of it holds no batch.
    """
    block, parts, batches = contexts, 1, whole_batches(contexts, used, batch_size)
    size = f"a buffer of {contexts} contexts with {used} tokens each"
    require(batches >= 1, "batch_size", batch_size, f"{size} must hold one batch and {SPARE:.0%} more")
    half = whole_batches(contexts // 2, used, batch_size)
    if rolling and half and (steps is None or steps > batches):
        block, parts, batches = contexts // 2, 3, half
    if steps is None:
        return Rounds(block, batches, parts, None)
    number = -(-steps // batches)
    if parts > 1:  # rounds of the same size, so that no block is harvested of which little is used
        batches = -(-steps // number)
        block = enough_contexts(batches, used, batch_size)
    return Rounds(block, batches, parts, number)
