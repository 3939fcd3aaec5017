"""Time, memory and disk of an experiment, estimated from shapes and measured rates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a language model, known before it is loaded."""

    width: int  # of the residual stream
    blocks: int  # number of blocks
    block_weights: int  # weights of one block, without biases and norms
    vocabulary: int  # tokens


class Speed(NamedTuple):
    """Rates of a kind of device, apart from one large matrix product."""

    model: float  # fraction of the product's speed that a language model reaches
    encode: float  # the same for SAEs in evaluations
    element: float  # seconds of a training step per value of Z besides its product
    step: float  # minimum seconds per training step
    word: float  # seconds of absorption's probes per word and latent
    probe: float  # seconds of probing's fits per class and SAE
    matching: float  # seconds of an exact matching per cosine
    load: float  # seconds to load the model, once for training and once for all evaluations
    figures: float  # seconds of the report with its figures


SPEEDS = {
    "cpu": Speed(0.45, 0.5, 5e-9, 2e-3, 6.5e-8, 0.15, 2.5e-7, 12, 25),
    "cuda": Speed(0.18, 0.1, 6.8e-12, 1e-3, 2e-9, 0.05, 2.5e-7, 15, 60),
}
"""cpu: two cores. cuda: steps and models as in docs/speed.md and docs/language-models.md; its encode, word, probe are
guesses."""


class Cost(NamedTuple):
    """Time and disk space of one stage."""

    stage: str
    seconds: float
    kept: int  # bytes that stay on disk
    meanwhile: int  # further bytes at the stage's peak, for checkpoints


def product_speed(device: torch.device, seconds: float = 0.3) -> float:
    """FLOP/s of a large matrix product, as training multiplies on this device; measured."""
    fast = device.type == "cuda"
    n = 8192 if fast else 1024
    x = torch.randn(n, n, device=device, dtype=torch.bfloat16 if fast else torch.float32)
    x @ x  # the first one sets up the library

    def finished() -> float:
        if fast:
            torch.cuda.synchronize(device)
        return time.monotonic()

    begin, count = finished(), 0
    while finished() - begin < seconds:
        x @ x
        count += 1
    return 2 * n**3 * count / (finished() - begin)


def peak(costs: Sequence[Cost]) -> int:
    """Bytes on disk at the worst moment, if the stages come one after the other."""
    kept = worst = 0
    for cost in costs:
        kept += cost.kept
        worst = max(worst, kept + cost.meanwhile)
    return worst


class Workload(NamedTuple):
    """SAEs of one language model, and the rates of the device that measures them."""

    shape: Shape
    layer: int
    context: int  # tokens per context in training
    d_sae: int
    saes: int  # number of SAEs
    speed: Speed
    rate: float  # FLOP/s of a large matrix product

    def read(self, tokens: float, blocks: int | None = None, head: bool = False) -> float:
        """Seconds to read so many tokens with the model, up to the layer unless `blocks` is given."""
        weights = self.shape.block_weights * (self.layer + 1 if blocks is None else blocks)
        weights += self.shape.width * self.shape.vocabulary if head else 0
        return 2 * weights * tokens / (self.rate * self.speed.model)

    def encode(self, tokens: float, times: float = 1.0) -> float:
        """Seconds to encode so many tokens with all SAEs."""
        flops = 2 * self.d_sae * self.shape.width * tokens * times * self.saes
        return flops / (self.rate * self.speed.encode)

    def step(self, d_sae: int, d_in: int, batch: int) -> float:
        """Seconds of one training step of one SAE."""
        return max(self.speed.step, 2 * d_sae * d_in * batch / self.rate + self.speed.element * d_sae * batch)
