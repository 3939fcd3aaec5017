"""Settings of the absorption evaluation; the defaults are SAEBench's but for where probes start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from sampled_sae.config import (
    Bound,
    Config,
    Count,
    NonNegative,
    OpenShare,
    Positive,
    PositiveNumber,
    Share,
    at_least,
    require,
)
from sampled_sae.evals.bootstrap import Spread
from sampled_sae.evals.results import saebench_layout

Start = Literal["zero", "random"]


@dataclass(frozen=True, slots=True)
class AbsorptionConfig(Config):
    """How words are shown to the model, how probes are fitted, and what counts as absorbed."""

    max_words: Annotated[int, at_least(2)] | None = None
    """Words drawn from the tokenizer's vocabulary; fewer words give weaker probes. Default: all."""
    train_share: OpenShare = 0.8
    """Fraction of the words used to fit probes; the rest are used for testing."""
    template: str = "{word} has the first letter:"
    """A line of the prompt, up to its answer."""
    lines: Count = 10
    """Solved lines before the word, drawn separately for each word from the same split."""
    bos: bool = True
    """Whether prompts begin with the tokenizer's BOS, or its EOS if it has no BOS."""
    fresh_prompts: bool = True
    """Whether absorption is measured on new prompts of the test words, with lines drawn from all words, as SAEBench
    does; otherwise on the prompts that tested the probes."""
    min_f1: NonNegative = 0.6
    """A letter is usable if the F1 of its probe on the residual stream is above this."""
    min_letters: Annotated[int, Bound("must be from 1 to 26", lambda value: 1 <= value <= 26)] = 20
    """With fewer usable letters no means are reported, because probes find too few letters at this layer."""
    max_k: Positive = 10
    """Most main latents per letter."""
    f1_jump: NonNegative = 0.03
    """A further latent becomes a main latent if it increases F1 by more than this."""
    probe_epochs: Positive = 50
    """Epochs over the words for the probes on the residual stream."""
    probe_batch: Positive = 64
    """Words per step of these probes."""
    probe_decay: NonNegative = 1e-4
    """Weight decay of these probes."""
    sparse_epochs: Positive = 50
    """Epochs over the words for the L1 probe on latents. It stops long before convergence: more epochs choose
    other latents."""
    sparse_batch: Positive = 4096
    """Words per step of the L1 probe."""
    sparse_decay: NonNegative = 1e-6
    """Weight decay of the L1 probe."""
    l1: NonNegative = 0.01
    """Weight of the L1 penalty."""
    lr: PositiveNumber = 0.01
    """Adam's learning rate in the first epoch of both probes."""
    end_lr: PositiveNumber = 1e-5
    """Final learning rate; it falls by the same factor each epoch."""
    start: Start = "zero"
    """Initial weights of both probes. SAEBench's are random; with few words or few latents they outweigh what the L1
    probe learns, so the main latents depend on the seed."""
    absorbers: Positive = 3
    """Latents that may together absorb a letter; the fraction counts the largest ones."""
    min_cosine: Share = 0.1
    """Smallest cosine of an absorbing latent's direction and the probe, for the fraction."""
    min_cosine_full: Share = 0.025
    """The same for full absorption."""
    min_share: Share = 0.4
    """Smallest share of the probe's projection that absorbing latents must make up."""
    prompts_at_once: Positive = 64
    """Prompts in one pass through the model, without effect on the results up to rounding."""
    words_at_once: Positive = 512
    """Words that an SAE encodes at once, without effect on the results up to rounding."""
    seed: int = 42
    """Seed of the words' order, the prompts' lines and the probes."""

    def check(self) -> None:
        before, word, after = self.template.partition("{word}")
        right = bool(word) and bool(after.strip()) and not any(brace in before + after for brace in "{}")
        require(right, "template", self.template, "must hold {word} once and some text after it")
        if self.max_words is not None:
            train = int(self.max_words * self.train_share)
            enough = min(train, self.max_words - train) > self.lines
            parts = f"{train} to train and {self.max_words - train} to test"
            few = f"gives {parts}; lines = {self.lines} need more than {self.lines} of each"
            require(enough, "max_words", self.max_words, few)
        require(self.end_lr <= self.lr, "end_lr", self.end_lr, f"must be at most lr = {self.lr}")


class Absorber(NamedTuple):
    """A latent that takes a letter's place at some words."""

    latent: int
    words: int  # words in whose fraction it counts
    full: int  # words that it absorbs alone


class LetterResult(NamedTuple):
    """One letter; what could not be measured is none."""

    letter: str
    why_not: str | None  # why the letter does not count; none for a usable one
    train_words: int  # words with this letter that probes were fitted on
    test_words: int  # words with this letter that tested them
    f1: float | None  # of the probe on the residual stream: whether the model knows the letter here
    sparse_f1: list[float]  # of probes on the first 1, 2, ... of `ranked`.
    ranked: list[int]  # latents that the L1 probe points to, best first
    main: list[int]  # the first ones of these, the letter's main latents. More than one: the letter is split.
    words: int  # test words that the probe gets right: absorption is measured on these
    fraction: float | None  # mean absorption fraction over these words
    full: float | None  # share of these words that are fully absorbed
    full_words: int  # number of these words that are fully absorbed
    absorbers: list[Absorber]  # the latents that absorb at most words
    absorbing: int  # how many latents absorb at some word

    @property
    def usable(self) -> bool:
        """Whether the letter counts in the means."""
        return self.why_not is None


class AbsorptionResult(NamedTuple):
    """One SAE on one layer of one model."""

    model: str
    dtype: str  # the model's precision
    layer: int | str  # the residual stream after this block, counted from 0, or a hook point by name
    words: int  # words of the task, to train and to test
    left_out: int  # words of the vocabulary that are not one token in the prompt, and so are not used
    tail: int  # tokens of the template after the word
    usable_letters: int  # letters that the model knows here
    not_evaluable: str | None  # why there are no means; none where there are
    fraction: Spread | None  # absorption fraction: mean over words, then over usable letters
    full: Spread | None  # share of fully absorbed words
    splits: Spread | None  # main latents per letter; 1 where no letter is split
    main_f1: Spread | None
    """F1 of the probes on the main latents. Where it is low, the SAE has no latents for letters that others could
    absorb, and the numbers above mean little."""
    letters: list[LetterResult]  # all 26
    settings: AbsorptionConfig  # how it was measured


def to_saebench(result: AbsorptionResult, settings: AbsorptionConfig | None = None) -> dict[str, Any]:
    """SAEBench's `absorption_first_letter`; with the reason if there are no means."""
    settings = settings or result.settings
    names = ("absorption_fraction_score", "full_absorption_score", "num_split_features")
    means: dict[str, float | None] = {}
    for name, item in zip(names, (result.fraction, result.full, result.splits), strict=True):
        means |= {f"mean_{name}": item and item.mean, f"std_dev_{name}": item and item.std}
    config = {
        "model_name": result.model,
        "random_seed": settings.seed,
        "f1_jump_threshold": settings.f1_jump,
        "max_k_value": settings.max_k,
        "prompt_template": settings.template,
        "prompt_token_pos": -1 - result.tail,
        "llm_batch_size": settings.prompts_at_once,
        "llm_dtype": result.dtype,
        "k_sparse_probe_l1_decay": settings.l1,
        "k_sparse_probe_batch_size": settings.sparse_batch,
        "k_sparse_probe_num_epochs": settings.sparse_epochs,
        "min_GT_probe_f1": settings.min_f1,
        "min_feats_for_eval": settings.min_letters,
        "eval_k_sparse_probe_batch_size": settings.words_at_once,
        "precalc_k_sparse_probe_sae_acts": True,
    }
    details = [
        {
            "first_letter": letter.letter,
            "mean_absorption_fraction": letter.fraction,
            "full_absorption_rate": letter.full,
            "num_full_absorption": letter.full_words,
            "num_probe_true_positives": letter.words,
            "num_split_features": len(letter.main),
        }
        for letter in result.letters
        if letter.usable
    ]
    why_not = result.not_evaluable and {"not_evaluable": result.not_evaluable}
    return saebench_layout("absorption_first_letter", config, {"mean": means}, details, why_not)
