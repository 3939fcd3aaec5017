"""Settings of the absorption evaluation; the defaults are SAEBench's but for where probes start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sampled_sae.checks import numbers, require, whole_numbers

Start = Literal["zero", "random"]


@dataclass(frozen=True, slots=True)
class AbsorptionConfig:
    """How words are shown to the model, how probes are fitted, and what counts as absorbed."""

    max_words: int | None = None
    """Words drawn from the tokenizer's vocabulary; none for all of them. Fewer words, weaker probes."""
    train_share: float = 0.8
    """Share of the words that probes are fitted on; the others test."""
    template: str = "{word} has the first letter:"
    """A line of the prompt, up to its answer."""
    lines: int = 10
    """Solved lines before the word; they are drawn anew for each word, from the words of its own share."""
    bos: bool = True
    """Whether prompts begin with the tokenizer's BOS, or its EOS if it has no BOS."""
    fresh_prompts: bool = True
    """Whether absorption is measured on new prompts of the test words, with lines drawn from all words, as SAEBench
    does; otherwise on the prompts that tested the probes."""
    min_f1: float = 0.6
    """A letter is usable if the F1 of its probe on the residual stream is above this."""
    min_letters: int = 20
    """With fewer usable letters there is no mean: the model does not spell well enough at this layer."""
    max_k: int = 10
    """Most main latents a letter."""
    f1_jump: float = 0.03
    """A further latent becomes a main one if it raises F1 by more than this."""
    probe_epochs: int = 50
    """Rounds over the words for the probes on the residual stream."""
    probe_batch: int = 64
    """Words a step of these probes."""
    probe_decay: float = 1e-4
    """Weight decay of these probes."""
    sparse_epochs: int = 50
    """Rounds over the words for the L1 probe on latents. It stops long before it has converged: more rounds choose
    other latents."""
    sparse_batch: int = 4096
    """Words a step of the L1 probe."""
    sparse_decay: float = 1e-6
    """Weight decay of the L1 probe."""
    l1: float = 0.01
    """Weight of the L1 penalty."""
    lr: float = 0.01
    """Adam's learning rate in the first round of both probes."""
    end_lr: float = 1e-5
    """What the learning rate falls to, by the same factor each round."""
    start: Start = "zero"
    """Where both probes start. SAEBench's start at random, which with few words or few latents outweighs what the L1
    probe learns: main latents are then as the seed draws them."""
    absorbers: int = 3
    """Latents that may together absorb a letter; the fraction counts the largest ones."""
    min_cosine: float = 0.1
    """Smallest cosine of an absorbing latent's direction and the probe, for the fraction."""
    min_cosine_full: float = 0.025
    """The same for full absorption."""
    min_share: float = 0.4
    """Smallest share of the probe's projection that absorbing latents must make up."""
    prompts_at_once: int = 64
    """Prompts in one pass through the model; results are the same whatever it is, up to rounding."""
    words_at_once: int = 512
    """Words that an SAE encodes at once; results are the same whatever it is, up to rounding."""
    seed: int = 42
    """Seed of the words' order, the prompts' lines and the probes."""

    def __post_init__(self) -> None:
        rounds = ("probe_epochs", "probe_batch", "sparse_epochs", "sparse_batch")
        sizes = ("min_letters", "max_k", "absorbers", "prompts_at_once", "words_at_once", *rounds)
        whole_numbers(self, "max_words", "lines", "seed", *sizes)
        weights = ("min_f1", "f1_jump", "probe_decay", "sparse_decay", "l1")
        shares = ("min_cosine", "min_cosine_full", "min_share")
        numbers(self, "train_share", "lr", "end_lr", *weights, *shares)
        for name in sizes:
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in weights:
            require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        for name in shares:
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "must be between 0 and 1")
        for name in ("bos", "fresh_prompts"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "must be True or False")
        most = self.max_words
        require(most is None or most >= 2, "max_words", most, "must be at least 2, or none for all words")
        require(0 < self.train_share < 1, "train_share", self.train_share, "must be a share between 0 and 1")
        require(self.lines >= 0, "lines", self.lines, "must not be negative")
        right = "must hold {word} once and some text after it"
        require(isinstance(self.template, str), "template", self.template, right)
        before, word, after = self.template.partition("{word}")
        plain = not any(brace in before + after for brace in "{}")
        require(bool(word) and bool(after.strip()) and plain, "template", self.template, right)
        require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "must fit into 64 bits")
        require(self.start in get_args(Start), "start", self.start, f"must be one of {', '.join(get_args(Start))}")
        require(self.min_letters <= 26, "min_letters", self.min_letters, "must be at most 26")
        require(0 < self.end_lr <= self.lr, "end_lr", self.end_lr, f"must be above 0 and at most lr = {self.lr}")
