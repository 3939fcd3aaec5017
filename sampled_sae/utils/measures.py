"""The numbers that a report knows: what each means, which end of it is good, and where it stands in which file.

One entry of `METRICS` is all that a new number takes: tables, pictures, axes and explanations follow.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Better = Literal["low", "high"]
EVALUATIONS = {
    "core": "Reconstruction and model loss",
    "probing": "Sparse probing",
    "absorption": "Absorption",
    "autointerp": "Interpretability",
    "training": "Training",
}
"""Evaluations in the order of the page, by the names of their files, SAE/evals/NAME.json; training's lie in the SAE's
own settings."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of an SAE."""

    name: str
    """Short and unique, for file names and links."""
    title: str
    """For heads and axes."""
    meaning: str
    """One sentence."""
    better: Better | None
    """Which end is the good one; none where neither is."""
    evaluation: str
    """The file it is in, as in `EVALUATIONS`."""
    path: tuple[str, ...]
    """Where in that file's result."""
    digits: int = 3
    """Digits after the point."""
    headline: bool = False
    """Whether it is in the overview and in the figures for a paper."""

    @property
    def axis(self) -> str:
        """The title with a word on which way is better."""
        side = {"low": " (lower is better)", "high": " (higher is better)", None: ""}[self.better]
        return self.title + side


class Value(NamedTuple):
    """A number as an evaluation found it."""

    value: float
    low: float | None
    """Lower end of the evaluation's own interval, where it has one."""
    high: float | None


def find(metric: Metric, result: Any) -> Value | None:
    """The number in an evaluation's result; none where it was not measured."""
    for part in metric.path:
        result = result.get(part) if isinstance(result, dict) else None
    if not isinstance(result, dict):
        value, low, high = result, None, None
    elif "value" in result:
        value, low, high = (result.get(name) for name in ("value", "low", "high"))
    else:
        value, low, high = result.get("mean"), None, None
    found = number(value)
    return None if found is None else Value(found, number(low), number(high))


class Stat(NamedTuple):
    """One number over the seeds of a configuration."""

    mean: float
    low: float
    high: float


class Column(NamedTuple):
    """One column of a table."""

    title: str
    digits: int | None = None
    """Digits after the point; None for text, names and whole numbers."""
    better: Better | None = None
    """Which end is better, shown beside the title; None for neither."""
    wide: bool = False
    """Whether the cells hold sentences."""
    name: str = ""
    """Header in CSV; the title by default."""
    brief: str = ""
    """Header in a terminal, where line breaks are kept; the title by default."""


Cell = str | int | float | Stat | Value | None


class Table(NamedTuple):
    """A table of raw values; reporting/tables.py and reporting/terminal.py write it in each format."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    """None for a missing value; a Stat or a Value has its range or interval shown with it."""
    name: str = ""
    """File name without extension."""
    title: str = ""
    note: str = ""
    """How the numbers were measured and what to consider when comparing them."""
    bold: frozenset[tuple[int, int]] = frozenset()
    """Cells (row, column) marked as the best."""
    rules: frozenset[int] = frozenset()
    """Rows with a horizontal line above them."""


def best_of(values: Sequence[float | None], digits: int, better: Better | None = "high") -> set[int]:
    """Indices of the best value after rounding; empty if neither end is better or all known values are equal."""
    rounded = [None if value is None else round(value, digits) for value in values]
    known = [value for value in rounded if value is not None]
    if better is None or len(set(known)) < 2:
        return set()
    best = max(known) if better == "high" else min(known)
    return {index for index, value in enumerate(rounded) if value == best}


FVU = Metric(
    "fvu",
    "FVU",
    "Fraction of variance unexplained, by threshold, without tokens of high norm: 0 is perfect, 1 no better than the "
    "mean.",
    "low",
    "core",
    ("normal", "fvu"),
    headline=True,
)


def _probing(k: int) -> Metric:
    latents = "the one latent that differs" if k == 1 else f"the {k} latents that differ"
    return Metric(
        f"probing_{k}",
        f"Probing accuracy, k\u00a0=\u00a0{k}",
        f"Test accuracy of a linear probe on {latents} most between a class and the others; mean over "
        "classes, then datasets.",
        "high",
        "probing",
        ("summary", "top", str(k), "accuracy"),
        headline=k in (1, 5),
    )


METRICS: tuple[Metric, ...] = (
    FVU,
    Metric(
        "fvu_all",
        "FVU, all tokens",
        "Fraction of variance unexplained, by threshold, over all measured tokens, those of high norm too.",
        "low",
        "core",
        ("measured", "fvu"),
    ),
    Metric(
        "fvu_trained",
        "FVU, own cut",
        "Fraction of variance unexplained by training's own cut: pool and budget are shared by a batch.",
        "low",
        "core",
        ("trained", "fvu"),
    ),
    Metric(
        "l0",
        "L0",
        "Mean active latents a token, by threshold; neither high nor low is good, it should meet K.",
        None,
        "core",
        ("normal", "l0"),
        digits=1,
    ),
    Metric(
        "cosine",
        "Cosine",
        "Mean cosine of an activation and its reconstruction.",
        "high",
        "core",
        ("normal", "cosine"),
    ),
    Metric(
        "explained_legacy",
        "Explained variance (SAEBench)",
        "SAEBench's legacy measure: the mean over tokens of each token's own explained variance.",
        "high",
        "core",
        ("normal", "explained_variance_legacy"),
    ),
    Metric(
        "ce_recovered",
        "CE recovered",
        "Share of the model's loss of cross-entropy, made by putting zeros in, that the reconstruction takes back.",
        "high",
        "core",
        ("loss", "ce_recovered"),
        headline=True,
    ),
    Metric(
        "kl_recovered",
        "KL recovered",
        "Share of the divergence from the model's own predictions, made by putting zeros in, that the reconstruction "
        "takes back.",
        "high",
        "core",
        ("loss", "kl_recovered"),
    ),
    Metric(
        "alive",
        "Alive",
        "Share of the latents that fire at all on the held-out text, tokens of high norm aside.",
        "high",
        "core",
        ("density", "alive"),
        headline=True,
    ),
    Metric(
        "over_10_percent",
        "Over 10%",
        "Share of the latents that fire on more than 10% of the tokens; the paper counts how many an SAE keeps.",
        None,
        "core",
        ("density", "over_10_percent"),
        digits=4,
        headline=True,
    ),
    Metric(
        "over_1_percent",
        "Over 1%",
        "Share of the latents that fire on more than 1% of the tokens.",
        None,
        "core",
        ("density", "over_1_percent"),
        digits=4,
    ),
    *(_probing(k) for k in (1, 2, 5, 10)),
    Metric(
        "probing_all",
        "Probing accuracy, all latents",
        "Test accuracy of a linear probe on all latents; mean over classes, then datasets.",
        "high",
        "probing",
        ("summary", "all_latents", "accuracy"),
    ),
    Metric(
        "probing_residual",
        "Probing accuracy, residual stream",
        "Test accuracy of a linear probe on the model's residual stream, whatever the SAE: the mark to reach.",
        None,
        "probing",
        ("summary", "residual", "accuracy"),
    ),
    Metric(
        "absorption",
        "Absorption fraction",
        "How much of a first letter's direction other latents than its main ones carry; mean over words, then letters.",
        "low",
        "absorption",
        ("fraction",),
        headline=True,
    ),
    Metric(
        "absorption_full",
        "Full absorption",
        "Share of the words at which the letter's main latents are silent and one other latent stands in for them.",
        "low",
        "absorption",
        ("full",),
    ),
    Metric(
        "absorption_splits",
        "Main latents a letter",
        "Latents that it takes to read a first letter; 1 where no letter is split.",
        "low",
        "absorption",
        ("splits",),
        digits=2,
    ),
    Metric(
        "absorption_letters",
        "Usable letters",
        "Letters of 26 that the model itself knows at this layer; absorption counts these alone.",
        None,
        "absorption",
        ("usable_letters",),
        digits=0,
    ),
    Metric(
        "autointerp",
        "Interpretability (detection)",
        "Share of text windows that a judge sorts rightly by a latent's explanation, as SAEBench counts; answering "
        "never gives .714.",
        "high",
        "autointerp",
        ("detection", "mean"),
        headline=True,
    ),
    Metric(
        "autointerp_balanced",
        "Interpretability (balanced)",
        "Balanced accuracy of the judge on as many windows that fire as windows checked to be silent; guessing gives "
        ".5.",
        "high",
        "autointerp",
        ("balanced", "mean"),
    ),
    Metric(
        "autointerp_fuzzing",
        "Interpretability (fuzzing)",
        "How well the judge tells windows with the firing tokens marked from windows with others marked; guessing "
        "gives .5.",
        "high",
        "autointerp",
        ("fuzzing", "mean"),
    ),
    Metric(
        "autointerp_control",
        "Interpretability (balanced), shuffled",
        "The balanced score with explanations of other latents, which a judge should find no better than guessing.",
        None,
        "autointerp",
        ("control", "balanced", "mean"),
    ),
    Metric(
        "heldout_fvu",
        "FVU, held out",
        "Fraction of variance unexplained, by threshold, on the tokens that the threshold was calibrated on.",
        "low",
        "training",
        ("heldout", "fvu"),
    ),
    Metric(
        "dead",
        "Dead at the end",
        "Share of the latents that were silent for longer than dead_after when training ended.",
        "low",
        "training",
        ("dead",),
    ),
    Metric(
        "ever_pooled",
        "Ever pooled",
        "Share of the latents that were in a candidate pool at least once.",
        None,
        "training",
        ("ever_pooled",),
    ),
    Metric(
        "seconds",
        "Seconds",
        "Training time of the whole run, divided by its number of SAEs.",
        None,
        "training",
        ("seconds",),
        digits=0,
    ),
)

HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that break a line, or change the direction of what stands around them, without being seen."""


def shown(text: object, keep: str = "") -> str:
    """Text on one line and in one direction: hidden characters become visible escapes, but for those in `keep`."""
    return HIDDEN.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), str(text))


def _escape(sign: str) -> str:
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(sign) or f"\\u{ord(sign):04x}"


def in_html(text: object) -> str:
    """For HTML, between tags and in quoted attributes."""
    return html.escape(shown(text))


def in_markdown(text: object) -> str:
    """For a cell of a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>|~$#&])", r"\\\1", shown(text))


def listed(names: list[str], most: int = 3) -> str:
    """`a, b and c`, or `a, b and 5 more`."""
    named = names if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def number(value: Any) -> float | None:
    """`value` as a finite float, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def form(value: Any, digits: int) -> str:
    """`value` with so many digits after the point, or a dash."""
    finite = number(value)
    # Adding zero turns a rounded -0.0 into 0.0.
    return "-" if finite is None else f"{round(finite, digits) + 0.0:,.{digits}f}"
