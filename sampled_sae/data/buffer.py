"""The buffer of a harvest: its settings, the memory that it takes, and in which order its tokens are trained on.

Contexts are taken in blocks. A block's tokens are shuffled and cut into three parts. A round hands out one part of its
own block, one of the block before and one of the block after it, shuffled together. So the buffer holds two blocks'
worth of tokens, as one would of which half is handed out and then refilled; but no token stays longer than two rounds,
so that a resumed run sends three blocks at most through the model again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from sampled_sae import kernels
from sampled_sae.config import Bound, Distinct, NotEmpty, Positive, require
from sampled_sae.data.contexts import TextConfig
from sampled_sae.data.stream import permutation
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.models.llama import Llama
from sampled_sae.utils.system import available

LARGEST = {"cuda": 2**21, "cpu": 2**19}  # tokens of a buffer if no number is set; it is filled before the first step
SMALLEST = 2**17
SHARE = 1 / 6  # of the free memory, which a buffer takes at most if no number is set
WORTH_COMPILING = 3e11
"""Tokens times blocks times their width from which on compiled blocks save more than the 12 s of their compilation
(8 s with warm caches). On an H200 they save 4.5e-11 s for each."""
AT_ONCE = {"cuda": 2**16, "cpu": 2**14}  # tokens in one pass through the model if no number of contexts is set
CACHE_BATCH = 4096  # tokens per batch when activations are written to a cache, or fewer if the buffer is small
SPARE = 0.02  # share of a block's tokens that may be left out for their norm before some others are used twice
SHUFFLES = 2**40  # from here on, numbers of permutations are those of rounds, not of blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestConfig(TextConfig):
    """Which activations are collected, and how they are mixed."""

    hooks: Annotated[tuple[int | str, ...], NotEmpty, Distinct]
    """Numbers of blocks, counted from 0, for the residual stream after each; or names of modules."""
    buffer_tokens: Positive | None = None
    """Tokens in the shuffle buffer; `train` uses no more than its steps need. Default: for a cache, no more
    than it holds; else as many as fit into a sixth of the free memory, 131,072 to 524,288, on a GPU up to 2,097,152."""
    rolling: bool | Literal["auto"] = "auto"
    """Whether to refill the buffer when half of it is used, so that batches mix tokens of three halves, or when all
    of it is used. Auto means yes for training, no for a cache, which is shuffled again when it is read, and what it
    started with for what is continued."""
    contexts_at_once: Positive | None = None
    """Contexts in one pass through the model. Default: 65,536 tokens' worth on a GPU, 16,384 elsewhere."""
    compile: bool | Literal["auto"] = "auto"
    """Whether torch compiles the model's blocks, which takes some seconds; auto means on a GPU and where that saves
    time."""
    high_norm_factor: Annotated[float, Bound("must be positive", lambda value: value > 0)] | None = 10.0
    """Exclude tokens whose norm is above this multiple of the median; inf keeps them."""

    def check(self) -> None:
        TextConfig.check(self)
        need = f"must hold at least one context of {self.context} tokens"
        fits = self.buffer_tokens is None or self.buffer_tokens >= self.context
        require(fits, "buffer_tokens", self.buffer_tokens, need)


def contexts_at_once(model: LanguageModel, config: HarvestConfig) -> int:
    """Contexts in one pass through the model."""
    tokens = AT_ONCE.get(model.device.type, AT_ONCE["cpu"])
    return config.contexts_at_once or max(1, tokens // config.context)


def enough_buffer(model: LanguageModel, config: HarvestConfig, batch_size: int, steps: int | None) -> int:
    """Tokens of the buffer: the set number or the default, or as many as these steps take if that is less."""
    size = config.buffer_tokens
    if steps is not None:
        all_steps = enough_contexts(steps, config.context - config.skip_first, batch_size) * config.context
        if all_steps <= (size or SMALLEST):
            return all_steps
        size = size or min(all_steps, default_buffer(model, config, batch_size))
    return size or default_buffer(model, config, batch_size)


def default_buffer(model: LanguageModel, config: HarvestConfig, batch_size: int) -> int:
    """Tokens of the buffer if no number is set: a power of two that a part of the free memory holds."""
    free, size = available(model.device), LARGEST.get(model.device.type, LARGEST["cpu"])
    room = 2**19 * _bytes_per_token(model, config) if free is None else free * SHARE
    while size > SMALLEST and size * _bytes_per_token(model, config) > room:
        size //= 2
    return max(size, 5 * batch_size, 4 * config.context)


def _bytes_per_token(model: LanguageModel, config: HarvestConfig) -> int:
    """Bytes on the model's device for each token of the buffer."""
    # With blocks of half its size: one before and one after its shuffle, what is left of others, the round in use.
    copies = 3 if model.device.type == "cuda" and config.rolling is False else 2
    return copies * sum(model.width_at(hook) for hook in config.hooks) * model.dtype.itemsize


def bytes_needed(model: LanguageModel, config: HarvestConfig) -> int:
    """Peak bytes of a harvest on the model's device, without the model's weights."""
    width, size = sum(model.width_at(hook) for hook in config.hooks), model.dtype.itemsize
    kept = max(config.buffer_tokens or 0, config.context) * _bytes_per_token(model, config)
    # Of one pass through a block, usually: a feed-forward layer four times as wide, thrice, and copies of the stream.
    return kept + contexts_at_once(model, config) * config.context * (20 * model.width + width) * size


def worth_compiling(model: LanguageModel, config: HarvestConfig, tokens: int | None) -> bool:
    """Whether compiled blocks save time on so many tokens; hook points inside of blocks need them as they are, and the
    small operations of a `Llama` are fused already."""
    layers = [model.hook_point(hook).layer for hook in config.hooks]
    last = max((-1 if layer is None else layer for layer in layers), default=-1)
    if (
        tokens is None
        or None in layers
        or isinstance(model.model, Llama)
        or tokens * (last + 1) * model.width < WORTH_COMPILING
    ):
        return False
    return kernels.usable(model.device, torch.float32)


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


def cache_batch(config: HarvestConfig, size: int) -> int:
    """Tokens per batch when a buffer of `size` tokens is written to a cache."""
    used = config.context - config.skip_first
    if config.rolling is False:
        return min(CACHE_BATCH, size // 2, max(1, whole_batches(size // config.context, used, 1)))
    return min(CACHE_BATCH, max(1, int(size * (used / config.context) / 5)))


def cache_buffer(model: LanguageModel, config: HarvestConfig, tokens: int) -> int:
    """Tokens of the buffer for a cache of `tokens`: the set number, or as few as fill the cache with the same number of
    buffers as the default."""
    if config.buffer_tokens is not None:
        return config.buffer_tokens

    def rows(contexts: int) -> int:
        batch = cache_batch(config, contexts * config.context)
        return batch * whole_batches(contexts, used, batch)

    used = config.context - config.skip_first
    most = default_buffer(model, config, CACHE_BATCH) // config.context
    number = -(-tokens // max(1, rows(most)))
    fewest = max(1, tokens // (number * used))
    return next((n for n in range(fewest, most) if rows(n) * number >= tokens), most) * config.context


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
