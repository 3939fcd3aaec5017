"""Results of a study: rows of results.jsonl, best learning rates and leaders, paired differences and their verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from sampled_sae.config import Bound, Config, Count, PositiveNumber, require
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import parse_json, read_text
from sampled_sae.utils.measures import Better
from sampled_sae.utils.paired import Difference, Key, Verdict, paired

BASE = "batchtopk"  # the method that others are compared with


class Run(NamedTuple):
    """One SAE of a study."""

    setting: str
    method: str
    factor: float  # of the default learning rate
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.method}-x{self.factor:g}-s{self.seed}"


class Row(NamedTuple):
    """One evaluation of one SAE."""

    run: Run
    measure: str
    values: dict[str, float]  # by metric
    units: dict[str, tuple[str, dict[str, float]]]  # by dataset or letter: its source and its metrics


Measured = Annotated[float, Bound("must be a number below 1e30", lambda value: abs(value) < 1e30)]


@dataclass(frozen=True, slots=True)
class Line(Config):
    """A row as results.jsonl has it."""

    setting: str
    method: str
    factor: PositiveNumber
    seed: Count
    measure: str
    values: dict[str, Measured] = field(default_factory=dict)
    units: dict[str, tuple[str, dict[str, Measured]]] = field(default_factory=dict)


def read_rows(path: Path, settings: Collection[str] | None = None) -> list[Row]:
    """The lines of results.jsonl; the last one of an SAE and evaluation counts, an incomplete last line does not.

    `settings`: those of the design, if each line must be of one of them.
    """
    found: dict[tuple[Run, str], Row] = {}
    *lines, _ = read_text(path).split("\n") if path.exists() else [""]
    for number, text in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        try:
            line = Line.from_dict(parse_json(text), where)
        except RecursionError:
            raise UserError(f"{where}: nested too deeply for a result of a study") from None
        except ValueError as error:
            raise UserError(f"{where} is no result of a study ({error})") from None
        if settings is not None:
            require(line.setting in settings, f"{where}: setting", line.setting, "must be a setting of the design")
        run = Run(line.setting, line.method, line.factor, line.seed)
        found[run, line.measure] = Row(run, line.measure, line.values, line.units)
    return list(found.values())


def best_factor(
    rows: Sequence[Row], setting: str, method: str, models: Mapping[str, str], tuned_as: str | None = None
) -> float:
    """The factor of the lowest FVU, in this setting, or else in one of the same model.

    `models`: by setting. Where a method was trained at full length with several factors, the best of these. Else the
    short trainings that only chose the rate, on the selection text: the method's own, or else those of `tuned_as`.
    Where a method was trained with a single factor, that one; where it was not trained, 1.
    """
    if whole := whole_length(rows, setting, method):
        return min(whole, key=whole.__getitem__)
    there = [row for row in rows if models[row.run.setting] == models[setting] and "fvu" in row.values]
    for near in ([row for row in there if row.run.setting == setting], there):
        for name, measure in ((method, "rate"), (tuned_as, "rate"), (method, "select")):
            same = [row for row in near if (row.run.method, row.measure) == (name, measure)]
            if same:
                return min(same, key=lambda row: row.values["fvu"]).run.factor
    return 1.0


def whole_length(rows: Sequence[Row], setting: str, method: str) -> dict[float, float]:
    """FVU of a method at full length by factor, mean of the seeds that all factors have; none with a single factor.

    On the selection text, or on the report text where some factor was not measured on the former. It is infinite for a
    factor with which some seed diverged.
    """

    def fvu(row: Row) -> float:
        return row.values.get("fvu", math.inf)

    for measure in ("select", "core"):
        known = [row for row in rows if row.values.keys() & {"fvu", "diverged"}]
        own = [row for row in known if (row.run.setting, row.run.method) == (setting, method)]
        factors = {row.run.factor for row in own if row.measure == "core"}
        seeds = [{row.run.seed for row in own if (row.run.factor, row.measure) == (f, measure)} for f in factors]
        if len(factors) > 1 and (shared := set.intersection(*seeds)):
            there = [row for row in own if row.measure == measure and row.run.seed in shared]
            return {f: statistics.fmean(fvu(row) for row in there if row.run.factor == f) for f in factors}
    return {}


NO_LEADERS = ("baseline", "reference")  # roles of methods that cannot be leaders
RANKED = (("select", "fvu"), ("select", "ce_recovered"), ("probing", "probing_1"), ("probing", "probing_5"))


def leading(rows: Sequence[Row], roles: Mapping[str, str], count: int = 3) -> list[str]:
    """The methods of the best mean rank over the goal's metrics, with seed 0 in the first setting.

    Of each method, the SAE of the lowest FVU on the selection text counts.
    """
    first = [row for row in rows if row.run.setting == rows[0].run.setting and row.run.seed == 0] if rows else []
    chosen: dict[str, Row] = {}
    for row in first:
        if row.measure == "select" and "fvu" in row.values:
            known = chosen.setdefault(row.run.method, row)
            chosen[row.run.method] = min(known, row, key=lambda it: it.values["fvu"])
    first = [row for row in first if row.run.method in chosen and row.run == chosen[row.run.method].run]
    every = dict.fromkeys(row.run.method for row in first)
    methods = [name for name in every if name in roles and roles[name] not in NO_LEADERS]
    ranks: dict[str, list[int]] = {name: [] for name in methods}
    for measure, metric in (*RANKED, ("absorption", "absorption")):
        sign = 1 if METRICS[metric].better == "low" else -1
        best: dict[str, float] = {}
        for row in first:
            if row.measure == measure and metric in row.values and row.run.method in ranks:
                best[row.run.method] = sign * row.values[metric]
        for rank, name in enumerate(sorted(best, key=best.__getitem__)):
            ranks[name].append(rank)
    full = max((len(own) for own in ranks.values()), default=0)
    complete = [name for name in methods if full and len(ranks[name]) == full]
    # Equal mean ranks: the lower FVU, which is the first metric.
    return sorted(complete, key=lambda name: (statistics.fmean(ranks[name]), ranks[name]))[:count]


# ---- comparisons ---------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """A metric as the protocol compares it."""

    title: str
    measure: str
    better: Better | None
    margin: float  # largest loss that counts as none
    relative: bool = False  # whether the margin is a share of the other method's mean
    units: bool = False  # whether pairs are over datasets or letters, too
    digits: int = 4
    log: bool = False  # whether log2 of the ratio is compared, not the difference


BINS = ("below 0.1%", "0.1% to 10%", "above 10%")  # densities of latents


def _probing(k: int) -> Compared:
    return Compared(f"probing, k = {k}", "probing", "high", 0.01, units=True)


METRICS: dict[str, Compared] = {
    "fvu": Compared("FVU", "core", "low", 0.01, relative=True, digits=5),
    "fvu_matched": Compared("FVU, L0 matched on the report tokens", "core", "low", 0.01, relative=True, digits=5),
    "fvu_trained": Compared("FVU, training-time selection", "core", "low", 0.01, relative=True, digits=5),
    "fvu_all": Compared("FVU, with high-norm tokens", "core", "low", 0.01, relative=True, digits=5),
    "ce_recovered": Compared("CE loss recovered", "core", "high", 0.001, digits=5),
    **{f"probing_{k}": _probing(k) for k in (1, 2, 5, 10)},
    "absorption": Compared("absorption", "absorption", "low", 0.02, units=True),
    "absorption_f1": Compared("F1 of main latents", "absorption", "high", 0.02, units=True),
    "over_10_percent": Compared("latents over 10%", "core", None, 0.07, digits=5, log=True),
    "over_1_percent": Compared("latents over 1%", "core", None, 0.07, log=True),
    "middle_firings": Compared("firings of latents at 0.1% to 10%", "core", None, 0.02),
    "alive": Compared("live latents", "core", "high", 0.02),
    "autointerp": Compared("autointerp (balanced detection)", "autointerp", "high", 0.02),
    "autointerp_gain": Compared("autointerp, 0.1% to 10% minus below 0.1%", "autointerp", "high", 0.02),
    **{f"autointerp_{n}": Compared(f"autointerp, {bin}", "autointerp", "high", 0.02) for n, bin in enumerate(BINS)},
    "autointerp_control": Compared("autointerp, explanations of other latents", "autointerp", None, 0.02),
    "mmcs_seeds": Compared("MMCS across seeds", "similarity", "high", 0.02),
    "mmcs_same": Compared("MMCS with BatchTopK, same seed", "similarity", None, 0.02),
    "mmcs_other": Compared("MMCS with BatchTopK, other seed", "similarity", None, 0.02),
    "found": Compared("share of latents found in BatchTopK of another seed", "similarity", None, 0.02),
    "found_seeds": Compared("share of latents found in another seed", "similarity", "high", 0.02),
    **{
        f"{name}_{n}": Compared(f"share found in {where}, latents {bin}", "similarity", None, 0.02)
        for name, where in (("found", "BatchTopK of another seed"), ("found_seeds", "another seed"))
        for n, bin in enumerate(BINS)
    },
}
GOAL = ("fvu", "ce_recovered", "probing_1", "probing_5", "absorption")
FLOOR = 1e-6  # what log2 is taken of where there is nothing
UNEQUAL = 0.01  # relative difference of L0 from which on a pair is marked


class Results:
    """All results of a study, and the model of each setting."""

    def __init__(
        self,
        rows: Sequence[Row],
        models: Mapping[str, str],
        beside: Collection[str] = (),
        rate_of: Mapping[str, str | None] | None = None,
    ):
        """`beside`: settings that are shown and decide nothing; `rate_of`: whose learning rate a method has."""
        self.rows, self.models, self.beside, self.rate_of = rows, models, beside, rate_of or {}
        self._rows: dict[tuple[str, str, str], list[Row]] = {}
        for row in rows:
            self._rows.setdefault((row.run.setting, row.run.method, row.measure), []).append(row)
        self._best: dict[tuple[str, str], float] = {}
        self._measured: dict[Any, dict[Key, float]] = {}

    def best(self, setting: str, method: str) -> float:
        """The method's factor of the default learning rate there: the best of those with core metrics."""
        if (setting, method) not in self._best:
            factors = {row.run.factor for row in self._rows.get((setting, method, "core"), ())}
            tuned_as = self.rate_of.get(method)
            if len(factors) == 1:
                self._best[setting, method] = factors.pop()
            else:
                rows = [row for row in self.rows if not factors or row.run.factor in factors]
                self._best[setting, method] = best_factor(rows, setting, method, self.models, tuned_as)
        return self._best[setting, method]

    def rate(self, setting: str, method: str, measure: str) -> float:
        """The factor that a measure is taken from: the best one, or that of the lowest FVU among those that have it."""
        best, whole = self.best(setting, method), whole_length(self.rows, setting, method)
        there = {row.run.factor for row in self._rows.get((setting, method, measure), ())}
        return best if best in there or not there else min(there, key=lambda factor: whole.get(factor, math.inf))

    def other_rates(self, setting: str, method: str, metrics: Sequence[str]) -> dict[str, float]:
        """The factor of each metric, by title, that was not measured with the method's best one."""
        best = self.best(setting, method)
        there = [METRICS[metric] for metric in metrics if self.measured(setting, method, metric)]
        rates = {metric.title: self.rate(setting, method, metric.measure) for metric in there}
        return {title: rate for title, rate in rates.items() if rate != best}

    def at_end(self, setting: str, method: str) -> bool:
        """Whether the method's factor is the smallest or the largest of those that were tried for it: in this setting,
        or else in those of the same model, from which its factor is."""
        rates = [
            row.run
            for row in self.rows
            if row.measure == "rate" and self.models[row.run.setting] == self.models[setting]
        ]
        for near in ([run for run in rates if run.setting == setting], rates):
            for name in (method, self.rate_of.get(method)):
                if len(tried := {run.factor for run in near if run.method == name}) > 1:
                    return self.best(setting, method) in (min(tried), max(tried))
        return False

    def not_run(self, setting: str, method: str) -> float | None:
        """The best factor of the short trainings, if the method was not trained with it at full length."""
        name = method if (setting, method, "rate") in self._rows else self.rate_of.get(method) or method
        tried = [row for row in self._rows.get((setting, name, "rate"), ()) if "fvu" in row.values]
        if not tried:
            return None
        best = min(tried, key=lambda row: row.values["fvu"]).run.factor
        whole = {row.run.factor for row in self._rows.get((setting, method, "core"), ())}
        return best if whole and best not in whole else None

    def measured(
        self,
        setting: str,
        method: str,
        metric: str,
        measure: str = "",
        factor: float | None = None,
        seeds: Collection[int] | None = None,
    ) -> dict[Key, float]:
        """Values by seed, or by seed, source and unit; with the method's best factor, unless one is given."""
        key = (setting, method, metric, measure, factor, None if seeds is None else tuple(seeds))
        if key not in self._measured:
            how = METRICS[metric]
            wanted = self.rate(setting, method, measure or how.measure) if factor is None else factor
            found: dict[Key, float] = {}
            for row in self._rows.get((setting, method, measure or how.measure), ()):
                if row.run.factor != wanted or (seeds is not None and row.run.seed not in seeds):
                    continue
                if metric not in row.values:  # an evaluation without an overall value says nothing by its units either
                    continue
                if how.units:
                    for unit, (source, values) in row.units.items():
                        if metric in values:
                            found[row.run.seed, source or unit, unit] = values[metric]
                else:
                    found[(row.run.seed,)] = row.values[metric]
            self._measured[key] = found
        return self._measured[key]

    def difference(
        self, setting: str, first: str, second: str, metric: str, **how: Any
    ) -> tuple[Difference, Verdict] | None:
        """First against second, which may be `zero`, and the verdict with the metric's margin."""
        own = self.measured(setting, first, metric, **how)
        other = dict.fromkeys(own, 0.0) if second == "zero" else self.measured(setting, second, metric, **how)
        return judged(own, other, METRICS[metric])

    def without_each(self, setting: str, first: str, second: str, metric: str, **how: Any) -> dict[Any, float]:
        """The mean difference without each source in turn; positive: the first is better."""
        both = [self.measured(setting, name, metric, **how) for name in (first, second)]
        found = {}
        for source in dict.fromkeys(key[1] for key in both[0] if METRICS[metric].units):
            kept = [{key: value for key, value in values.items() if key[1] != source} for values in both]
            if (rest := paired(*kept, clusters=2, better=METRICS[metric].better)) is not None:
                found[source] = rest.mean
        return found

    def unequal_l0(self, setting: str, first: str, second: str, factor: float | None = None) -> float:
        """The largest relative difference of the mean L0 on the report tokens over their seeds; 0 without any.

        With the methods' best factors, unless one is given.
        """
        l0 = [
            {
                row.run.seed: row.values["l0"]
                for row in self._rows.get((setting, m, "core"), ())
                if "l0" in row.values and row.run.factor == (factor or self.best(setting, m))
            }
            for m in (first, second)
        ]
        return max((abs(l0[0][seed] / l0[1][seed] - 1) for seed in l0[0] if l0[1].get(seed)), default=0.0)

    def methods(self, setting: str) -> list[str]:
        """The methods that were measured in a setting, in order."""
        there = (row for row in self.rows if row.run.setting == setting and row.measure != "rate")
        return list(dict.fromkeys(row.run.method for row in there))

    @property
    def settings(self) -> list[str]:
        """The settings with results, in order."""
        return list(dict.fromkeys(row.run.setting for row in self.rows if row.measure != "rate"))

    def repeated(self, setting: str) -> list[str]:
        """The methods with several seeds in a setting: one seed decides nothing."""
        return [m for m in self.methods(setting) if len(self.measured(setting, m, "fvu")) > 1]

    @property
    def deciding(self) -> list[str]:
        """Those that claims are decided on."""
        return [setting for setting in self.settings if setting not in self.beside]

    @property
    def goals(self) -> list[str]:
        """Those that the goal is decided on: the first of each model."""
        first: dict[str, str] = {}
        for setting in self.deciding:
            first.setdefault(self.models[setting], setting)
        return list(first.values())


def judged(own: Mapping[Key, float], other: Mapping[Key, float], how: Compared) -> tuple[Difference, Verdict] | None:
    """The difference of two methods' values of a metric, and the verdict with its margin."""
    if how.log:
        own, other = ({key: math.log2(max(value, FLOOR)) for key, value in values.items()} for values in (own, other))
    found = paired(own, other, clusters=2 if how.units else 1, better=how.better)
    if found is None:
        return None
    margin = how.margin * (abs(statistics.fmean(other.values())) if how.relative else 1)
    return found, found.verdict(margin)


def by_seed(values: Mapping[Key, float]) -> list[float]:
    """Means over datasets or letters, one per seed."""
    seeds: dict[Any, list[float]] = {}
    for key, value in values.items():
        seeds.setdefault(key[0], []).append(value)
    return [statistics.fmean(own) for own in seeds.values()]
