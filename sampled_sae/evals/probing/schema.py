"""Settings and results of sparse probing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from sampled_sae.config import Config, Count, Distinct, NotEmpty, Positive, at_least, require
from sampled_sae.evals.bootstrap import Spread, spread
from sampled_sae.evals.results import saebench_layout
from sampled_sae.utils.paired import paired

DenseProbe = Literal["exact", "saebench"]
Pair = Annotated[int, at_least(2)]
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
class ProbingConfig(Config):
    """Which texts are probed, with how many latents, and how much is done at once."""

    datasets: Annotated[tuple[str, ...], NotEmpty, Distinct] = SAEBENCH_DATASETS
    """Datasets of SAEBench by name (from the hub), or files ending in .parquet, .jsonl or .csv with the columns text
    and label and, if there is one, split (train or test), or those of the package sae-probes: sae-probes (all),
    sae-probes:binary, sae-probes:multiclass, sae-probes:NAME."""
    k: Annotated[tuple[Positive, ...], NotEmpty, Distinct] = (1, 2, 5, 10)
    """Numbers of latents per probe; a separate probe is fitted for each."""
    seeds: Annotated[tuple[Count, ...], NotEmpty, Distinct] = (0,)
    """Seeds; each draws its own texts, and the spread over seeds is reported."""
    train_texts: Pair = 4000
    """Training texts per probe, half of them from its class; fewer if the class is smaller."""
    test_texts: Pair = 1000
    """Test texts per probe, likewise."""
    fewest_texts: Positive = 20
    """Skip classes with fewer training texts than this, or with fewer test texts than a quarter of it."""
    tokens: Positive = 128
    """Tokens to read of each text, BOS included; the rest is ignored."""
    bos: bool = True
    """Whether each text begins with the tokenizer's BOS (or else its EOS), which no mean includes, as in SAEBench."""
    all_latents: bool = True
    """Whether to fit a probe on all latents too, which takes longer than all the others."""
    dense_probe: DenseProbe = "exact"
    """Probe on all latents and on the whole residual stream. exact: the optimum of the same objective as for k latents.
    saebench: AdamW, with the epoch that is best on the test texts, as in SAEBench, which overestimates
    accuracy."""
    contexts_at_once: Positive = 64
    """Texts in one pass through the model; does not affect the results."""
    tokens_at_once: Positive = 2048
    """Tokens that an SAE encodes at once; does not affect the results."""
    tf32: bool = True
    """Encode in TF32 on a GPU, which keeps more digits than the bfloat16 of the activations there and is several times
    faster; elsewhere it changes nothing."""

    def check(self) -> None:
        require(all(self.datasets), "datasets", self.datasets, "must be names of datasets or files")
        require(self.tokens > self.bos, "tokens", self.tokens, "must leave room for a token besides BOS")


class Scores(NamedTuple):
    """Of one probe on its test texts, half of which are of its class."""

    accuracy: float  # share of right answers
    f1: float  # of its class: harmonic mean of precision and recall; 0 without a true positive
    auc: float  # chance that a text of its class gets a higher value than one of the others; a tie counts half


class Summary(NamedTuple):
    """Means over classes, or over datasets of means over classes."""

    accuracy: Spread
    f1: Spread
    auc: Spread


class Probes(NamedTuple):
    """One number of a kind for each kind of probe: `Scores` of single probes, or `Summary`."""

    top: dict[int, Any]  # on the k best latents, for each k
    all_latents: Any  # on all latents; none if that was not to be measured
    residual_top: dict[int, Any]  # on the k best channels of the residual stream, for each k
    residual: Any  # on the whole residual stream


class TaskResult(NamedTuple):
    """One class against the others, with the texts of one seed."""

    label: str
    seed: int
    train_texts: int  # texts that the probes were fitted to, half of them of the class
    test_texts: int
    latents: list[int]  # those that differ most between the class and the others, the most first; the largest k
    scores: Probes  # `Scores` of each probe


class DatasetResult(NamedTuple):
    """All classes of one dataset."""

    name: str
    summary: Probes  # `Summary` of each kind of probe: means over classes
    tasks: list[TaskResult]
    texts: int  # different texts that were read
    blank: int  # texts that were left out because there is nothing in them
    repeated: int  # texts that were left out because the same text was there before
    other_split: int  # texts that were left out because they belong to neither train nor test
    skipped: dict[str, str]  # classes that have too few texts for a task, and how many they have
    source: str = ""  # collection of texts; datasets that share it are not independent


class Accuracy(NamedTuple):
    """Mean accuracy over datasets, and its standard error clustered by source."""

    mean: float
    se: float | None  # None with a single source
    sources: int


class ProbingResult(NamedTuple):
    """One SAE on one layer of one model."""

    model: str
    dtype: str  # of the model's activations
    layer: int | str  # the residual stream after this block, counted from 0, or a hook point by name
    summary: Probes  # `Summary` of each kind of probe: means over classes, then datasets
    datasets: list[DatasetResult]
    settings: ProbingConfig  # how it was measured
    over_datasets: dict[int, Accuracy]  # of the probes on the k best latents, for each k


def combine(probes: Sequence[Probes], merge: Callable[[list[Any]], Any]) -> Probes:
    """Several results of the same kinds of probes -> one, each kind merged on its own."""
    first = probes[0]

    def one(values: list[Any]) -> Any:
        return None if values[0] is None else merge(values)

    return Probes(
        {k: one([p.top[k] for p in probes]) for k in first.top},
        one([p.all_latents for p in probes]),
        {k: one([p.residual_top[k] for p in probes]) for k in first.residual_top},
        one([p.residual for p in probes]),
    )


def _means_by(name: str, tasks: Iterable[TaskResult]) -> dict[Any, Probes]:
    """Mean `Scores` of the tasks with the same `name`, label or seed."""
    groups: dict[Any, list[Probes]] = {}
    for task in tasks:
        groups.setdefault(getattr(task, name), []).append(task.scores)
    return {key: combine(scores, _mean) for key, scores in groups.items()}


def summarise(datasets: Sequence[Sequence[TaskResult]]) -> Probes:
    """The tasks of each dataset -> means over classes, then over datasets, and their spread over seeds."""
    by_seed = zip(*(_means_by("seed", tasks).values() for tasks in datasets), strict=True)
    return combine([combine(probes, _mean) for probes in by_seed], _spread)


def over_datasets(datasets: Sequence[DatasetResult]) -> dict[int, Accuracy]:
    """For each k the mean accuracy of the probes on the k best latents."""
    found = {}
    for k in datasets[0].summary.top:
        values = {(one.source, one.name): one.summary.top[k].accuracy.mean for one in datasets}
        mean = paired(values, dict.fromkeys(values, 0.0))
        if mean is not None:
            found[k] = Accuracy(mean.mean, mean.se, mean.clusters[0])
    return found


def _mean(scores: list[Scores]) -> Scores:
    return Scores(*(statistics.fmean(values) for values in zip(*scores, strict=True)))


def _spread(scores: list[Scores]) -> Summary:
    return Summary(*(spread(values) for values in zip(*scores, strict=True)))


# ---- SAEBench's layout -------------------------------------------------------------------------------

SAEBENCH_K = (1, 2, 5, 10, 20, 50, 100)  # those that SAEBench's results have a name for


def to_saebench(result: ProbingResult, settings: ProbingConfig) -> dict[str, Any]:
    """The result as SAEBench's own tools read it. Means over seeds; numbers of latents that it does not know are left
    out."""
    config = {
        "random_seed": settings.seeds[0],
        "dataset_names": [dataset.name for dataset in result.datasets],
        "probe_train_set_size": settings.train_texts,
        "probe_test_set_size": settings.test_texts,
        "context_length": settings.tokens,
        "sae_batch_size": max(1, settings.tokens_at_once // settings.tokens),
        "llm_batch_size": settings.contexts_at_once,
        "llm_dtype": result.dtype,
        "model_name": result.model,
        "k_values": [k for k in settings.k if k in SAEBENCH_K],
        "lower_vram_usage": not settings.all_latents,
    }
    details = [
        {"dataset_name": f"{dataset.name}_results", **_accuracies(dataset.summary, lambda s: s.accuracy.mean)}
        for dataset in result.datasets
    ]
    found = _accuracies(result.summary, lambda s: s.accuracy.mean)
    metrics = {kind: {name: value for name, value in found.items() if name.startswith(kind)} for kind in ("llm", "sae")}
    by_label = {f"{dataset.name}_results": _by_label(dataset) for dataset in result.datasets}
    return saebench_layout("sparse_probing", config, metrics, details, by_label)


def _accuracies(probes: Probes, accuracy: Callable[[Any], float]) -> dict[str, float | None]:
    """Accuracies under SAEBench's names."""
    found: dict[str, float | None] = {"llm_test_accuracy": accuracy(probes.residual)}
    found["sae_test_accuracy"] = None if probes.all_latents is None else accuracy(probes.all_latents)
    for kind, top in (("llm", probes.residual_top), ("sae", probes.top)):
        found |= {f"{kind}_top_{k}_test_accuracy": accuracy(one) for k, one in top.items() if k in SAEBENCH_K}
    return found


def _by_label(dataset: DatasetResult) -> dict[str, dict[str, float]]:
    """For each kind of probe the accuracy of each class, the mean over seeds."""
    found: dict[str, dict[str, float]] = {}
    for label, probes in _means_by("label", dataset.tasks).items():
        for name, value in _accuracies(probes, lambda s: s.accuracy).items():
            if value is not None:
                found.setdefault(name, {})[label] = value
    return found
