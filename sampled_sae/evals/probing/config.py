"""Settings of sparse probing."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sampled_sae.checks import require, whole_numbers
from sampled_sae.errors import UserError

DenseProbe = Literal["exact", "saebench"]

SAEBENCH_DATASETS = (
    "LabHC/bias_in_bios_class_set1",
    "LabHC/bias_in_bios_class_set2",
    "LabHC/bias_in_bios_class_set3",
    "canrager/amazon_reviews_mcauley_1and5",
    "canrager/amazon_reviews_mcauley_1and5_sentiment",
    "codeparrot/github-code",
    "fancyzhx/ag_news",
    "Helsinki-NLP/europarl",
)
"""The eight of SAEBench, under its names."""


@dataclass(frozen=True, slots=True)
class ProbingConfig:
    """Which texts are probed, with how many latents, and how much is done at once."""

    datasets: tuple[str, ...] = SAEBENCH_DATASETS
    """Datasets of SAEBench by name (from the hub), or files ending in .parquet, .jsonl or .csv with the columns text
    and label and, if there is one, split (train or test)."""
    k: tuple[int, ...] = (1, 2, 5, 10)
    """Numbers of latents that a probe may use; each is a probe of its own."""
    seeds: tuple[int, ...] = (0,)
    """Each seed draws the texts anew; the spread is over them."""
    train_texts: int = 4000
    """Texts that a probe is fitted to, half of them of its class; where a class has fewer, what there is."""
    test_texts: int = 1000
    """Texts that it is tested on, likewise."""
    fewest_texts: int = 20
    """A class with fewer texts to fit to, or fewer than a quarter of it to test on, is skipped."""
    tokens: int = 128
    """Tokens of a text that are read, BOS included; the rest of it is cut off."""
    bos: bool = True
    """Whether each text begins with the tokenizer's BOS (or else its EOS), which no mean counts; so does SAEBench."""
    all_latents: bool = True
    """Whether to fit a probe on all latents too, which takes longer than all the others."""
    dense_probe: DenseProbe = "exact"
    """Probe on all latents and on the whole residual stream. exact: the optimum of the same objective as for k latents.
    saebench: AdamW, of whose epochs the best one on the test texts counts, as in SAEBench; its numbers are too
    high."""
    contexts_at_once: int = 64
    """Texts in one pass through the model; results are the same whatever it is."""
    tokens_at_once: int = 2048
    """Tokens that an SAE encodes at once; results are the same whatever it is."""
    tf32: bool = True
    """Encode in TF32 on a GPU, which keeps more digits than the bfloat16 of the activations there and is several times
    faster; elsewhere it changes nothing."""

    def __post_init__(self) -> None:
        sizes = ("train_texts", "test_texts", "fewest_texts", "tokens", "contexts_at_once", "tokens_at_once")
        whole_numbers(self, *sizes)
        for name, least in (*((name, 1) for name in sizes), ("train_texts", 2), ("test_texts", 2)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"must be at least {least}")
        for name in ("bos", "all_latents", "tf32"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "must be True or False")
        require(self.tokens > self.bos, "tokens", self.tokens, "must leave room for a token besides BOS")
        names = get_args(DenseProbe)
        require(self.dense_probe in names, "dense_probe", self.dense_probe, f"must be one of {', '.join(names)}")
        _distinct_numbers(self, "k", 1)
        _distinct_numbers(self, "seeds", 0)
        _names(self)

    @property
    def fewest_test_texts(self) -> int:
        """Texts of a class to test on, below which it is skipped."""
        return -(-self.fewest_texts // 4)


def _distinct_numbers(config: Any, name: str, least: int) -> None:
    value = getattr(config, name)
    try:
        numbers = tuple(operator.index(number) for number in value)
    except TypeError:
        raise UserError(f"{name} = {value!r}: must be whole numbers") from None
    require(len(numbers) > 0, name, value, "must name at least one")
    require(min(numbers) >= least, name, value, f"must be at least {least}")
    require(len(set(numbers)) == len(numbers), name, value, "must name each one once")
    object.__setattr__(config, name, numbers)


def _names(config: ProbingConfig) -> None:
    given = config.datasets
    right = "must be names of datasets or files"
    require(isinstance(given, tuple | list), "datasets", given, right)
    require(all(isinstance(name, str) and name for name in given), "datasets", given, right)
    require(len(given) > 0, "datasets", given, "must name at least one")
    require(len(set(given)) == len(given), "datasets", given, "must name each one once")
    object.__setattr__(config, "datasets", tuple(given))
