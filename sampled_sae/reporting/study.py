"""Results of a study: paired differences, verdicts, claims, and the tables and figures of its page.

The page is Markdown. Text between `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced by the table of that name;
the rest of the page is left as it is.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sampled_sae.reporting.figures import INK, base_figure
from sampled_sae.reporting.tables import markdown
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import write_text
from sampled_sae.utils.measures import Better, Cell, Column, Stat, Table, form
from sampled_sae.utils.paired import Difference, Key, Verdict, holm, paired

if TYPE_CHECKING:
    import plotly.graph_objects as go

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
    units: dict[str, Any]  # by dataset or letter: its source and its metrics


def read_rows(path: Path) -> list[Row]:
    """The lines of results.jsonl; the last one of an SAE and evaluation counts, an incomplete last line does not."""
    found: dict[tuple[Run, str], Row] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            plain = json.loads(line)
            run = Run(*(plain[name] for name in Run._fields))
            found[run, plain["measure"]] = Row(run, plain["measure"], plain["values"], plain.get("units", {}))
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise UserError(f"{path}: line {number} is no result of a study ({error})") from None
    return list(found.values())


def best_factor(rows: Sequence[Row], setting: str, model: str, method: str, model_of: Callable[[str], str]) -> float:
    """The factor of the lowest FVU on the selection text, in this setting, or else in one of the same model.

    Where a method was trained with a single factor, that one; where it was not trained, 1.
    """
    own = [row for row in rows if row.run.method == method and row.measure == "select" and "fvu" in row.values]
    for there in (setting, None):
        tried = [row for row in own if (row.run.setting == there if there else model_of(row.run.setting) == model)]
        if tried:
            return min(tried, key=lambda row: row.values["fvu"]).run.factor
    return 1.0


RANKED = (("select", "fvu"), ("select", "ce_recovered"), ("probing", "probing_1"), ("probing", "probing_5"))


def leading(rows: Sequence[Row], roles: Mapping[str, str], count: int = 3) -> list[str]:
    """The methods of the best mean rank over the goal's metrics, with seed 0 in the first setting; no baselines."""
    first = [row for row in rows if row.run.setting == rows[0].run.setting and row.run.seed == 0] if rows else []
    methods = [name for name in dict.fromkeys(row.run.method for row in first) if roles.get(name) != "baseline"]
    ranks: dict[str, list[int]] = {name: [] for name in methods}
    for measure, metric in (*RANKED, ("absorption", "absorption")):
        sign = 1 if METRICS[metric].better == "low" else -1
        best: dict[str, float] = {}
        for row in first:
            if row.measure == measure and metric in row.values and row.run.method in ranks:
                value = sign * row.values[metric]
                best[row.run.method] = min(value, best.get(row.run.method, value))
        for rank, name in enumerate(sorted(best, key=best.__getitem__)):
            ranks[name].append(rank)
    full = max((len(own) for own in ranks.values()), default=0)
    complete = [name for name in methods if full and len(ranks[name]) == full]
    return sorted(complete, key=lambda name: statistics.fmean(ranks[name]))[:count]


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


METRICS: dict[str, Compared] = {
    "fvu": Compared("FVU", "core", "low", 0.01, relative=True, digits=5),
    "ce_recovered": Compared("CE loss recovered", "core", "high", 0.001, digits=5),
    "probing_1": Compared("probing, k = 1", "probing", "high", 0.01, units=True),
    "probing_5": Compared("probing, k = 5", "probing", "high", 0.01, units=True),
    "absorption": Compared("absorption", "absorption", "low", 0.02, units=True),
    "absorption_f1": Compared("F1 of main latents", "absorption", "high", 0.02, units=True),
    "over_10_percent": Compared("latents over 10%", "core", None, 0.0005, digits=5),
    "over_1_percent": Compared("latents over 1%", "core", None, 0.005),
    "middle_firings": Compared("firings of latents at 0.1% to 10%", "core", None, 0.02),
    "alive": Compared("live latents", "core", "high", 0.02),
}
GOAL = ("fvu", "ce_recovered", "probing_1", "probing_5", "absorption")


class Results:
    """All results of a study, and the model of each setting."""

    def __init__(self, rows: Sequence[Row], models: Mapping[str, str]):
        self.rows, self.models = rows, models

    def measured(
        self, setting: str, method: str, metric: str, measure: str = "", factor: float | None = None
    ) -> dict[Key, float]:
        """Values by seed, or by seed, source and unit; with the method's best factor, unless one is given."""
        how = METRICS[metric]
        if factor is None:
            factor = best_factor(self.rows, setting, self.models[setting], method, self.models.__getitem__)
        found: dict[Key, float] = {}
        for row in self.rows:
            if (row.run.setting, row.run.method, row.measure) != (setting, method, measure or how.measure):
                continue
            if row.run.factor != factor:
                continue
            if how.units:
                for unit, (source, values) in row.units.items():
                    if metric in values:
                        found[row.run.seed, source or unit, unit] = values[metric]
            elif metric in row.values:
                found[(row.run.seed,)] = row.values[metric]
        return found

    def difference(
        self, setting: str, first: str, second: str, metric: str, **how: Any
    ) -> tuple[Difference, Verdict] | None:
        """First against second, and the verdict with the metric's margin."""
        compared = METRICS[metric]
        both = [self.measured(setting, name, metric, **how) for name in (first, second)]
        found = paired(*both, clusters=2 if compared.units else 1, better=compared.better)
        if found is None:
            return None
        margin = compared.margin * (abs(statistics.fmean(both[1].values())) if compared.relative else 1)
        return found, found.verdict(margin)

    def without_each(self, setting: str, first: str, second: str, metric: str, **how: Any) -> dict[Any, float]:
        """The mean difference without each source in turn; positive: the first is better."""
        both = [self.measured(setting, name, metric, **how) for name in (first, second)]
        found = {}
        for source in dict.fromkeys(key[1] for key in both[0] if METRICS[metric].units):
            kept = [{key: value for key, value in values.items() if key[1] != source} for values in both]
            if (rest := paired(*kept, clusters=2, better=METRICS[metric].better)) is not None:
                found[source] = rest.mean
        return found

    def methods(self, setting: str) -> list[str]:
        """The methods that were trained in a setting, in order."""
        return list(dict.fromkeys(row.run.method for row in self.rows if row.run.setting == setting))

    @property
    def settings(self) -> list[str]:
        """The settings with results, in order."""
        return list(dict.fromkeys(row.run.setting for row in self.rows))


def summary_table(results: Results, setting: str) -> Table:
    """A row per method: means over seeds with their range, and the number of seeds."""
    used = [name for name in METRICS if any(results.measured(setting, m, name) for m in results.methods(setting))]
    columns = [
        Column("method"),
        Column("seeds"),
        *(Column(METRICS[n].title, METRICS[n].digits, METRICS[n].better) for n in used),
    ]
    rows: list[list[Cell]] = []
    for method in results.methods(setting):
        by_metric = [_by_seed(results.measured(setting, method, name)) for name in used]
        stats = [Stat(statistics.fmean(v), min(v), max(v)) if v else None for v in by_metric]
        rows.append([method, max(map(len, by_metric), default=0), *stats])
    return Table(columns, rows, f"summary-{setting}")


def _by_seed(values: Mapping[Key, float]) -> list[float]:
    """Means over datasets or letters, one per seed."""
    seeds: dict[Any, list[float]] = {}
    for key, value in values.items():
        seeds.setdefault(key[0], []).append(value)
    return [statistics.fmean(own) for own in seeds.values()]


def difference_table(results: Results, setting: str, metric: str, base: str = BASE, **how: Any) -> Table:
    """Each method against the base: paired difference, 95% interval, minimum detectable difference, verdict."""
    digits = METRICS[metric].digits
    columns = [Column("method"), Column("difference", digits), Column("95% interval"), Column("MDD", digits)]
    columns += [Column("p", 4), Column("seeds"), Column("pairs"), Column("without one source"), Column("verdict")]
    rows: list[list[Cell]] = []
    for method in results.methods(setting):
        found = None if method == base else results.difference(setting, method, base, metric, **how)
        if found is not None:
            it, verdict = found
            ends = "-" if it.interval is None else " to ".join(form(end, digits) for end in it.interval)
            left = results.without_each(setting, method, base, metric, **how).values()
            rest = f"{form(min(left), digits)} to {form(max(left), digits)}" if left else "-"
            facts: list[Cell] = [it.mean, ends, it.detectable, it.p_value, it.clusters[0], it.pairs, rest]
            rows.append([method, *facts, verdict])
    side = "better" if METRICS[metric].better else "more"
    note = f"{METRICS[metric].title} against {base}; positive: {side} than {base}."
    if any(row[7] != "-" for row in rows):
        note += " Without one source: the smallest and the largest difference when one source or letter is left out."
    words = [setting, metric, *(f"{value:g}" if isinstance(value, float) else value for value in how.values())]
    return Table(columns, rows, "-".join(["difference", *words]), note=note)


# ---- claims --------------------------------------------------------------------------------------------


class Claim(NamedTuple):
    """A claim of the paper as a comparison."""

    name: str  # as H3
    text: str
    metric: str
    method: str
    expect: Literal["better", "worse", "not worse"]
    against: str = BASE
    ratio: float | None = None  # least ratio of the two means


Outcome = Literal["supported", "refuted", "mixed", "undecided", "not measured"]
OPPOSITE: dict[str, str] = {"better": "worse", "worse": "better", "not worse": "worse"}


def outcome(results: Results, claim: Claim) -> tuple[Outcome, dict[str, tuple[Difference, Verdict]]]:
    """The first setting decides; a setting with the opposite verdict makes a supported claim mixed."""
    found = {s: d for s in results.settings if (d := results.difference(s, claim.method, claim.against, claim.metric))}
    if not found:
        return "not measured", found
    holds = {"better", "not worse"} if claim.expect == "not worse" else {claim.expect}
    verdicts = [verdict for _, verdict in found.values()]
    if verdicts[0] in holds and claim.ratio is not None:
        first, second = (results.measured(next(iter(found)), m, claim.metric) for m in (claim.method, claim.against))
        if statistics.fmean(first.values()) < claim.ratio * statistics.fmean(second.values()):
            return "undecided", found
    if verdicts[0] in holds:
        return ("mixed" if OPPOSITE[claim.expect] in verdicts else "supported"), found
    if verdicts[0] == OPPOSITE[claim.expect]:
        return ("mixed" if any(v in holds for v in verdicts) else "refuted"), found
    return "undecided", found


def claims_table(results: Results, claims: Sequence[Claim]) -> Table:
    """A row per claim: outcome, effect in the first setting with its interval, MDD, seeds, and settings."""
    columns = [Column("claim"), Column("", wide=True), Column("comparison"), Column("metric"), Column("outcome")]
    columns += [Column("difference"), Column("MDD"), Column("seeds"), Column("settings")]
    rows: list[list[Cell]] = []
    for claim in claims:
        verdict, found = outcome(results, claim)
        digits = METRICS[claim.metric].digits
        cells: list[Cell] = ["-", "-", "-", 0]
        if found:
            it = next(iter(found.values()))[0]
            ends = "" if it.interval is None else f" ({' to '.join(form(end, digits) for end in it.interval)})"
            cells = [form(it.mean, digits) + ends, form(it.detectable, digits), it.clusters[0], len(found)]
        pair = f"{claim.method} against {claim.against}"
        rows.append([claim.name, claim.text, pair, METRICS[claim.metric].title, verdict, *cells])
    return Table(columns, rows, "claims")


def goal_table(results: Results, methods: Sequence[str], baselines: Sequence[str]) -> Table:
    """Each method against each baseline in the goal's metrics, with p-values adjusted over all of these comparisons."""
    columns = [Column("setting"), Column("method"), Column("against"), *(Column(METRICS[name].title) for name in GOAL)]
    every = [(s, m, b) for s in results.settings for m in methods for b in baselines if m != b]
    found = {(*one, name): results.difference(*one, name) for one in every for name in GOAL}
    known = {key: it[0].p_value for key, it in found.items() if it is not None and it[0].p_value is not None}
    adjusted = dict(zip(known, holm([p for p in known.values() if p is not None]), strict=True))
    rows: list[list[Cell]] = []
    for one in every:
        keys = [(*one, name) for name in GOAL]
        cells = [(found[key], adjusted.get(key)) for key in keys]
        if any(it is not None for it, _ in cells):
            rows.append([*one, *("-" if it is None else f"{it[1]} (p = {form(p, 3)})" for it, p in cells)])
    return Table(
        columns, rows, "goal", note="p-values are adjusted by Holm's method over all comparisons of this table."
    )


# ---- the page ------------------------------------------------------------------------------------------


def tables(results: Results, claims: Sequence[Claim], roles: Mapping[str, str]) -> Iterator[Table]:
    """All tables of the page."""
    yield claims_table(results, claims)
    baselines = [name for name, role in roles.items() if role == "baseline"]
    yield goal_table(results, leading(results.rows, roles), baselines)
    for setting in results.settings:
        yield summary_table(results, setting)
        asked: list[tuple[str, dict[str, Any]]] = [(metric, {}) for metric in METRICS]
        asked += [(metric, {"measure": "finalists"}) for metric in ("probing_1", "probing_5")]
        asked += [("absorption", {"factor": 1.0})]  # at the common learning rate
        for metric, how in asked:
            table = difference_table(results, setting, metric, **how)
            if table.rows:
                yield table


def forest(results: Results, setting: str, metric: str, base: str = BASE) -> go.Figure | None:
    """Paired differences to the base with their 95% intervals; None where no method has an interval."""
    found = [
        (m, d[0]) for m in results.methods(setting) if m != base and (d := results.difference(setting, m, base, metric))
    ]
    shown = [(method, it) for method, it in found if it.interval is not None]
    if not shown:
        return None
    names, differences = [method for method, _ in shown], [it for _, it in shown]
    side = "better" if METRICS[metric].better else "more"
    title = f"{METRICS[metric].title}: difference to {base} (right: {side})"
    figure = base_figure(60 + 24 * len(names), {"title": {"text": title}}, {"autorange": "reversed"}, {"r": 16})
    half = [(it.interval[1] - it.interval[0]) / 2 for it in differences if it.interval is not None]
    bars = {"type": "data", "array": half, "color": INK, "thickness": 1.5}
    marks = {"color": INK, "size": 8}
    figure.add_scatter(x=[it.mean for it in differences], y=names, mode="markers", marker=marks, error_x=bars)
    figure.add_vline(x=0, line={"color": INK, "width": 1})
    return figure


def fill_page(path: Path, made: Sequence[Table]) -> list[str]:
    """Replace the tables of a page, and add blocks for those that it lacks; returns the names that were added."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    added: list[str] = []
    for table in made:
        begin, end = f"<!-- begin {table.name} -->", f"<!-- end {table.name} -->"
        block = f"{begin}\n\n{markdown(table)}\n{end}"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if pattern.search(text):
            text = pattern.sub(lambda _, block=block: block, text)  # type: ignore[misc]
        else:
            text, added = f"{text.rstrip()}\n\n{block}\n", [*added, table.name]
    write_text(path, text)
    return added
