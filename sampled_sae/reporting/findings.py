"""What the numbers of several configurations show, in words: a best one is named only where seeds tell it apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sampled_sae.reporting.sweep import BASE, Configuration, Key
from sampled_sae.utils.measures import Better, Stat, form, listed
from sampled_sae.utils.paired import leaders

Name = Callable[[str], str]  # writes a configuration's label


@dataclass(frozen=True)
class Finding:
    """One number of all configurations that have it, the best mean first."""

    title: str
    better: Better
    digits: int
    null: float | None  # value without any information; None: none
    rows: tuple[Configuration, ...]
    stats: tuple[Stat, ...]
    counts: tuple[int, ...]  # measured SAEs of each
    tied: tuple[Configuration, ...]  # those not clearly worse than the first; the first alone is a clear winner

    @property
    def winner(self) -> Configuration | None:
        """The configuration that is clearly better than each other one over seeds."""
        return self.rows[0] if len(self.rows) > 1 and len(self.tied) == 1 else None

    @property
    def seeds(self) -> str:
        """How many SAEs were measured of each configuration."""
        low, high = min(self.counts), max(self.counts)
        return f"n = {low}" if low == high else f"n = {low} to {high}"

    @property
    def single(self) -> bool:
        """Whether no configuration has a second seed, so that nothing is known of the noise."""
        return max(self.counts) == 1

    def value(self, index: int = 0) -> str:
        """The mean of a row and, of several seeds, the smallest and the largest."""
        mean, low, high = (form(one, self.digits) for one in self.stats[index])
        return mean if low == high else f"{mean} ({low} to {high})"

    def verdict(self, name: Name = str) -> str:
        """A few words for a table."""
        if len(self.rows) == 1:
            return "only one was measured"
        if self.winner:
            return name(self.winner.label)
        if self.single:
            return "not known: one SAE each"
        return f"no clear winner: {listed([name(row.label) for row in self.tied])}"

    def sentence(self, name: Name = str) -> str:
        """What the number shows, with the number of SAEs and their spread."""
        what, first, last = name(self.title), name(self.rows[0].label), name(self.rows[-1].label)
        if len(self.rows) == 1:
            return f"{what} of {first} is {self.value()}; {self.seeds}."
        if form(self.stats[0].mean, self.digits) == form(self.stats[-1].mean, self.digits):
            return f"{what} is {form(self.stats[0].mean, self.digits)} for all {len(self.rows)} configurations."
        if self.winner:
            second = f"{name(self.rows[1].label)}, {self.value(1)}{self._base(name, 0, 1)}"
            return f"{what}: {first} is best, {self.value()}, ahead of {second}; {self.seeds}."
        ends = f"from {self.value()} ({first}) to {self.value(-1)} ({last}){self._base(name, 0, len(self.rows) - 1)}"
        if self.single:
            return f"{what} goes {ends}."
        among = "all" if len(self.tied) == len(self.rows) else f"{len(self.tied)} of {len(self.rows)}"
        return f"{what}: no clear winner among {among} configurations. Means go {ends}; {self.seeds}."

    def _base(self, name: Name, *told: int) -> str:
        """The value of BatchTopK, unless its row is among those that were told."""
        at = next((i for i, row in enumerate(self.rows) if row.group == BASE), 0)
        return (
            "" if at in told or self.rows[at].group != BASE else f"; {name(self.rows[at].label)} has {self.value(at)}"
        )


ONE_SEED = (
    "With one SAE per configuration the noise between seeds is not known, so none is named best: train several seeds."
)


def finding(
    rows: Sequence[Configuration], key: Key, title: str, better: Better, digits: int, null: float | None = None
) -> Finding | None:
    """Compare the rows that have the number; None if none has it."""
    known = [row for row in rows if row.stat(key)]
    if not known:
        return None
    tied = leaders([row.by_seed(key) for row in known], better) or [0]
    sign = 1 if better == "low" else -1
    order = sorted(range(len(known)), key=lambda i: (i != tied[0], sign * (known[i].mean(key) or 0.0)))
    stats = [known[i].stat(key) for i in order]
    return Finding(
        title,
        better,
        digits,
        null,
        tuple(known[i] for i in order),
        tuple(stat for stat in stats if stat),
        tuple(len(known[i].by_seed(key)) for i in order),
        tuple(known[i] for i in tied),
    )


def in_words(findings: Sequence[Finding], name: Name = str) -> list[str]:
    """A sentence for each, and one on the seeds where no configuration has two."""
    sentences = [one.sentence(name) for one in findings]
    compared = [one for one in findings if len(one.rows) > 1]
    return [*sentences, *([ONE_SEED] if compared and all(one.single for one in compared) else [])]
