"""Time, memory and disk of an experiment, estimated from shapes and measured rates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from sampled_sae.evals.probing.data import PACKAGES
from sampled_sae.experiments.scales import STAND_IN, Scale
from sampled_sae.experiments.synthetic import EXPERIMENTS, Experiment, grid
from sampled_sae.training.checkpoint import KEEP

WORDS = 40_000
"""Words of ASCII letters that a tokenizer has, roughly."""
PAGE = 12_000_000
"""Bytes of a page with its pictures and tables."""
EMBEDDERS = {"minilm": 10_600_000}
"""Weights of an embedder without its vocabulary; others are taken for mpnet."""
MPNET = 85_000_000


class Speed(NamedTuple):
    """How fast a kind of device is at what is not one large product."""

    model: float
    """Share of the product's speed that a language model reaches."""
    encode: float
    """The same for SAEs in evaluations."""
    element: float
    """Seconds of a training step for each value of Z beside its product."""
    step: float
    """Least seconds of a step."""
    word: float
    """Seconds of absorption's probes for each word and latent."""
    probe: float
    """Seconds of probing's fits for each class of an SAE."""
    matching: float
    """Seconds of an exact matching for each cosine."""
    load: float
    """Seconds to load the model, once for training and once for all evaluations."""
    figures: float
    """Seconds of the report with its figures."""


SPEEDS = {
    "cpu": Speed(0.45, 0.5, 5e-9, 2e-3, 6.5e-8, 0.15, 2.5e-7, 12, 25),
    "cuda": Speed(0.18, 0.1, 6.8e-12, 1e-3, 2e-9, 0.05, 2.5e-7, 15, 60),
}
"""cpu: two cores. cuda: steps and models as in docs/speed.md and docs/language-models.md; its encode, word, probe are
guesses."""


class Cost(NamedTuple):
    """What one stage takes."""

    stage: str
    seconds: float
    kept: int
    """Bytes that stay on disk."""
    meanwhile: int
    """Bytes beside them at the stage's peak, for checkpoints."""


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


class Work:
    """Seconds of each stage."""

    def __init__(self, scale: Scale, speed: Speed, product: float):
        self.scale, self.speed, self.rate = scale, speed, product
        self.saes = len(scale.saes())
        self.steps = max(1, scale.tokens // scale.batch_size)

    def bytes_of(self, latents: int, width: int) -> int:
        """Of the weights of one SAE, in 32 bits."""
        return 4 * (2 * latents * width + latents + width)

    def read(self, tokens: float, blocks: int | None = None, head: bool = False) -> float:
        """So many tokens through the model, to the layer unless said otherwise."""
        shape = self.scale.shape
        weights = shape.block_weights * (self.scale.layer + 1 if blocks is None else blocks)
        weights += shape.width * shape.vocabulary if head else 0
        return 2 * weights * tokens / (self.rate * self.speed.model)

    def encode(self, tokens: float, times: float = 1.0) -> float:
        """So many tokens through all SAEs."""
        flops = 2 * self.scale.latents * self.scale.shape.width * tokens * times * self.saes
        return flops / (self.rate * self.speed.encode)

    def step(self, latents: int, width: int, batch: int) -> float:
        """One step of one SAE."""
        return max(self.speed.step, 2 * latents * width * batch / self.rate + self.speed.element * latents * batch)

    def synthetic(self) -> Cost:
        asked = self.scale.synthetic
        given = {name: getattr(asked, name) for name in ("steps", "seeds", "scores", "multipliers")}
        experiment: Experiment = replace(
            EXPERIMENTS[asked.preset], **{name: value for name, value in given.items() if value is not None}
        )
        m, d = experiment.latents, experiment.data.d
        saes = len(grid(experiment)) * len(experiment.seeds)
        step = self.step(m, d, experiment.batch_size)
        measure = 6 * experiment.heldout * (2 * m * d / (self.rate * self.speed.encode) + self.speed.element * m)
        matching = self.speed.matching * m * experiment.data.features
        size = saes * self.bytes_of(m, d)
        checkpoints = min(KEEP + 1, 5)
        return Cost(
            "synthetic", saes * (experiment.steps * step + measure + matching), size + PAGE, 3 * size * checkpoints
        )

    def train(self) -> float:
        scale, tokens = self.scale, self.steps * self.scale.batch_size + self.scale.heldout_tokens
        step = self.step(scale.latents, scale.shape.width, scale.batch_size)
        return len(scale.runs()) * (self.read(tokens) + self.speed.load) + self.saes * self.steps * step

    def core(self) -> float:
        """One whole pass, two with the layer put out, and one from the layer on for each SAE."""
        shape, tokens = self.scale.shape, self.scale.contexts * self.scale.context
        rest = self.read(tokens, shape.blocks - self.scale.layer - 1, head=True)
        whole = self.read(tokens, shape.blocks, head=True)
        return self.speed.load + whole + (2 + self.saes) * rest + self.encode(tokens, times=3)

    def probing(self) -> float:
        scale = self.scale.probing
        classes = sum(len(PACKAGES) if name == STAND_IN else 5 for name in scale.datasets)
        texts = classes * (scale.train_texts + scale.test_texts) / 2 * len(scale.seeds)
        tokens = texts * scale.tokens
        return self.read(tokens) + self.encode(tokens) + self.speed.probe * classes * (self.saes + 1) * len(scale.seeds)

    def absorption(self) -> float:
        """Prompts of about eight tokens a line; test words are read twice."""
        scale = self.scale.absorption
        words = min(WORDS, scale.max_words or WORDS)
        tokens = words * (2 - scale.train_share) * (8 * scale.lines + 3)
        return self.read(tokens) + self.encode(2 * words) + self.speed.word * words * self.scale.latents * self.saes

    def autointerp(self) -> float:
        """Two readings by the SAEs; some 35 windows of 21 tokens of each latent are embedded."""
        scale, tokens = self.scale.autointerp, self.scale.interp_tokens
        weights = EMBEDDERS.get(scale.embedder or "", MPNET)
        texts = 35 * (len(scale.latents) or scale.max_latents) * self.saes
        embedded = 2 * weights * 30 * texts / (self.rate * self.speed.model)
        return self.read(tokens) + self.encode(tokens, times=2) + embedded * (scale.judge == "offline")

    def compare(self) -> float:
        """Seeds with each other, and each configuration with the reference."""
        scale = self.scale
        seeds, scored = len(scale.seeds), len(scale.scores)
        pairs = (1 + scored) * seeds * (seeds - 1) // 2 + self.saes - seeds
        cosines = scale.latents**2
        each = 2 * cosines * scale.shape.width / (self.rate * self.speed.encode)
        matched = scale.similarity.matching != "none" and scale.latents <= scale.similarity.exact_up_to
        return pairs * (each + (self.speed.matching * cosines if matched else 0)) + self.speed.load
