"""The page of a study: the answer and the tables.

The page is Markdown. Text between `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced by the block of that name;
the rest of the page is left as it is.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

from sampled_sae.reporting.claims import (
    Claim,
    Outcome,
    Synthetic,
    claims_table,
    goal_table,
    hypotheses,
    hypotheses_table,
    reached,
)
from sampled_sae.reporting.study import BASE, GOAL, METRICS, NO_LEADERS, UNEQUAL, Results, by_seed, judged, leading
from sampled_sae.reporting.study_synthetic import synthetic_table
from sampled_sae.reporting.tables import markdown
from sampled_sae.utils.files import read_text, write_text
from sampled_sae.utils.measures import Cell, Column, Stat, Table, form
from sampled_sae.utils.paired import Key, Verdict

FRESH = (3, 4)  # seeds that no choice has seen
NEUTRAL = {
    "better": "more",
    "worse": "less",
    "not worse": "not less",
    "undecided": "undecided",
}  # where no end is better
OPEN = ("undecided", "not measured")  # outcomes whose claims are named without their text
NOT_RUN = "Not run yet: there are no results."
MAIN = ("fvu", "fvu_trained", *GOAL[1:], "absorption_f1", "over_10_percent", "alive", "autointerp", "mmcs_seeds")
"""Metrics of the page's own table; all of them are in tables.md."""


def summary_table(results: Results, setting: str, metrics: Sequence[str] = MAIN, name: str = "summary") -> Table:
    """A row per method: means over seeds with their range, and the number of seeds."""
    used = [name for name in metrics if any(results.measured(setting, m, name) for m in results.methods(setting))]
    columns = [
        Column("method"),
        Column("learning rate"),
        Column("seeds"),
        *(Column(METRICS[n].title, METRICS[n].digits, METRICS[n].better) for n in used),
    ]
    rows: list[list[Cell]] = []
    untried: dict[str, float] = {}
    for method in results.methods(setting):
        by_metric = [by_seed(results.measured(setting, method, name)) for name in used]
        stats = [Stat(statistics.fmean(v), min(v), max(v)) if v else None for v in by_metric]
        rate = f"x {results.best(setting, method):g}{'*' * results.at_end(setting, method)}"
        if (better := results.not_run(setting, method)) is not None:
            rate, untried[method] = f"{rate}†", better
        rows.append([method, rate, max(map(len, by_metric), default=0), *stats])
    note = "Mean over seeds, with the range. Learning rate: factor of the package's default."
    if any("*" in str(row[1]) for row in rows):
        note += " *: the best of those tried is at an end of the grid, so a better one may lie beyond it."
    if untried:
        note += " †: the best rate of the short trainings was not run at full length: "
        note += ", ".join(f"{method} x {factor:g}" for method, factor in untried.items()) + "."
    others: dict[str, list[str]] = {}
    for method in results.methods(setting):
        for title, factor in results.other_rates(setting, method, used).items():
            others.setdefault(f"{method} x {factor:g}", []).append(title)
    if others:
        note += " Measured with another rate: " + "; ".join(f"{k}: {', '.join(v)}" for k, v in others.items()) + "."
    return Table(columns, rows, f"{name}-{setting}", note=note)


def difference_table(results: Results, setting: str, metric: str, base: str = BASE, **how: Any) -> Table:
    """Each method against the base: paired difference, 95% interval, minimum detectable difference, verdict."""
    digits = METRICS[metric].digits
    columns = [Column("method"), Column("difference", digits), Column("95% interval"), Column("MDD", digits)]
    columns += [Column("p", 4), Column("seeds"), Column("pairs"), Column("without one source"), Column("verdict")]
    rows: list[list[Cell]] = []
    marked = False
    for method in results.methods(setting):
        found = None if method == base else results.difference(setting, method, base, metric, **how)
        if found is not None:
            it, verdict = found
            l0 = results.unequal_l0(setting, method, base, how.get("factor"))
            unequal = metric in ("fvu", "fvu_all") and l0 > UNEQUAL
            marked |= unequal
            ends = "-" if it.interval is None else " to ".join(form(end, digits) for end in it.interval)
            left = results.without_each(setting, method, base, metric, **how).values()
            rest = f"{form(min(left), digits)} to {form(max(left), digits)}" if left else "-"
            facts: list[Cell] = [it.mean, ends, it.detectable, it.p_value, it.clusters[0], it.pairs, rest]
            word = verdict if METRICS[metric].better else NEUTRAL[verdict]
            rows.append([f"{method}*" if unequal else method, *facts, word])
    side = "better" if METRICS[metric].better else "more"
    note = f"{METRICS[metric].title} against {base}; positive: {side} than {base}."
    note += " The difference is log2 of the ratio." if METRICS[metric].log else ""
    if marked:
        note += f" *: L0 on the report tokens differs by more than {UNEQUAL:.0%}; see FVU with matched L0."
    if any(row[7] != "-" for row in rows):
        note += " Without one source: the smallest and the largest difference when one source or letter is left out."
    words = [setting, metric, *(f"{value:g}" if isinstance(value, float) else value for value in how.values())]
    return Table(columns, rows, "-".join(["difference", *words]), note=note)


def self_table(results: Results, setting: str, method: str = BASE) -> Table:
    """The method against itself: verdicts where two of its seeds are compared with two others."""
    columns = [Column("metric"), Column("comparisons"), Column("better or worse"), Column("not worse")]
    columns += [Column("undecided"), Column("largest difference", 5)]
    rows: list[list[Cell]] = []
    for metric, how in METRICS.items():
        values = results.measured(setting, method, metric)
        seeds = sorted({key[0] for key in values})
        verdicts, sizes = [], []
        for first in combinations(seeds, 2):
            for second in combinations([seed for seed in seeds if seed not in first], 2):
                own, other = (_renumbered(values, two) for two in (first, second))
                if (found := judged(own, other, how)) is not None:
                    verdicts.append(found[1])
                    sizes.append(abs(found[0].mean))
        if verdicts:
            decided = verdicts.count("better") + verdicts.count("worse")
            counts = [verdicts.count("not worse"), verdicts.count("undecided")]
            rows.append([how.title, len(verdicts), decided, *counts, max(sizes)])
    note = f"{method} against itself: all ways to compare two of its seeds with two others. There is no difference."
    return Table(columns, rows, f"self-{setting}", note=note)


def _renumbered(values: Mapping[Key, float], seeds: Sequence[int]) -> dict[Key, float]:
    """The values of some seeds, with their place among these as the seed: so other seeds can be paired with them."""
    return {(seeds.index(key[0]), *key[1:]): value for key, value in values.items() if key[0] in seeds}


def datasets_table(results: Results, setting: str, methods: Iterable[str], metric: str = "probing_5") -> Table:
    """A row per dataset or letter: means over seeds of each method."""
    units: dict[str, dict[str, list[float]]] = {}
    for method in methods:
        for (_, _, unit), value in results.measured(setting, method, metric).items():
            units.setdefault(unit, {}).setdefault(method, []).append(value)
    shown = [method for method in methods if any(method in own for own in units.values())]
    kind = "letter" if METRICS[metric].measure == "absorption" else "dataset"
    columns = [Column(kind), *(Column(method, METRICS[metric].digits) for method in shown)]
    means = {unit: {m: statistics.fmean(values) for m, values in own.items()} for unit, own in units.items()}
    rows: list[list[Cell]] = [[unit, *(own.get(m) for m in shown)] for unit, own in means.items()]
    if rows:
        rows.append(["**median**", *(statistics.median(own[m] for own in means.values() if m in own) for m in shown)])
    return Table(columns, rows, f"datasets-{setting}-{metric}", note=f"{METRICS[metric].title}: mean over seeds.")


# ---- the answer ----------------------------------------------------------------------------------------


def answer(
    results: Results,
    claims: Sequence[Claim],
    needed: Mapping[str, str],
    roles: Mapping[str, str],
    synthetic: Synthetic | None = None,
) -> str:
    """Five lines: whether to use the family, what instead, what it costs, what is unproven, what was measured."""
    if not results.settings:
        tried = len(results.rows)
        return NOT_RUN if not tried else f"Not run yet: only learning rates were chosen, with {tried} short trainings."
    first = results.settings[0]
    baselines = [name for name, role in roles.items() if role == "baseline"]
    use = _verdict_on_the_family(results, first, roles, baselines)
    outcomes = hypotheses(results, claims, needed, synthetic)
    texts = {claim.name: claim.text for claim in reversed(claims)}
    decided = {kind: [n for n, it in outcomes.items() if it == kind] for kind in get_args(Outcome)}
    counted = ". ".join(
        f"{kind.capitalize()}: "
        + (", ".join(names) if kind in OPEN else "; ".join(f"{texts[name]} ({name})" for name in names))
        for kind, names in decided.items()
        if names
    )
    seeds = sorted({row.run.seed for row in results.rows if row.measure == "core" and row.run.setting == first})
    saes = len({row.run for row in results.rows if row.measure != "rate"})
    where = ", ".join(_place(results, setting) for setting in results.settings)
    return "\n".join(
        [
            f"1. **Should I use Sampled-SAE?** {use}",
            f"2. **Which method instead?** {' '.join(_best_method(results, setting) for setting in results.goals)}",
            f"3. **What does it cost?** {_cost(results, first)}",
            f"4. **Which claims of the paper hold?** {counted}.",
            f"5. **What is this based on?** {saes} SAEs: {where}; seeds in `{first}`: "
            f"{', '.join(map(str, seeds)) or 'none'}. {_undecided(results)} are undecided: the difference is below "
            "what can be detected. Verdicts are those of single comparisons; only the table of the goal adjusts "
            "p-values for their number. What was not run is listed under Deviations in the protocol.",
        ]
    )


def _verdict_on_the_family(results: Results, setting: str, roles: Mapping[str, str], baselines: Sequence[str]) -> str:
    """Whether a variant reaches the goal; if not, what variants lose and win against the base."""
    variants = [name for name in results.methods(setting) if roles.get(name) not in NO_LEADERS]
    goal = f"not worse than {', '.join(baselines)} in any of FVU, CE loss recovered, probing and absorption, and "
    goal += f"better in at least two of them, on {' and '.join(_place(results, setting) for setting in results.goals)}"
    if winners := reached(results, variants, baselines):
        return f"Yes: {', '.join(winners)} reach the goal: {goal}."
    parts = [_lost_and_won(results, setting, variants) for setting in results.goals]
    return f"No reason so far. No variant reaches the goal: {goal}. {' '.join(parts)}"


def _place(results: Results, setting: str) -> str:
    """A setting with its model."""
    return f"{results.models[setting].rpartition('/')[2]} (`{setting}`)"


def _lost_and_won(results: Results, setting: str, variants: Sequence[str]) -> str:
    """What variants with several seeds lose and win against the base in the goal's metrics."""
    found = {name: _against_base(results, setting, name) for name in results.repeated(setting) if name in variants}
    lost = sum(verdicts.get("fvu") == "worse" for verdicts in found.values())
    won = {n: [METRICS[m].title for m, it in own.items() if it == "better"] for n, own in found.items()}
    better = [f"{name} is better in {' and '.join(titles)}" for name, titles in won.items() if titles]
    several = f"{lost} of {len(found)} variants with several seeds have a higher FVU than {BASE}"
    there = set(variants) & set(results.methods(setting))
    counts = {"have one seed there, which decides nothing": len(there) - len(found)}
    counts["were not run there"] = len(variants) - len(there)
    missing = "".join(f" {count} {what}." for what, count in counts.items() if count)
    return f"In `{setting}`, {several}; {'; '.join(better) or 'none is better in any metric'}.{missing}"


def _against_base(results: Results, setting: str, method: str) -> dict[str, Verdict]:
    """Verdicts of a method against the base, by metric of the goal."""
    return {m: it[1] for m in GOAL if (it := results.difference(setting, method, BASE, m))}


def _undecided(results: Results) -> str:
    """How many comparisons with the base are undecided, in the settings that the goal is decided on."""
    every = [
        verdict
        for setting in results.goals
        for method in results.repeated(setting)
        if method != BASE
        for verdict in _against_base(results, setting, method).values()
    ]
    return f"{every.count('undecided')} of {len(every)} comparisons with {BASE} in the goal's metrics"


def _best_method(results: Results, setting: str) -> str:
    """The methods that are worse than no other in any of the goal's metrics, among those with several seeds.

    Metrics that were not measured for the base do not count.
    """
    methods = results.repeated(setting)
    metrics = [metric for metric in GOAL if results.measured(setting, BASE, metric)]
    counts: dict[str, dict[str, list[str]]] = {}
    for method in methods:
        others = {m: [results.difference(setting, method, o, m) for o in methods if o != method] for m in metrics}
        if any(results.measured(setting, method, metric) == {} for metric in metrics):
            continue
        counts[method] = {metric: [it[1] for it in found if it is not None] for metric, found in others.items()}
    best = [method for method, own in counts.items() if not any("worse" in found for found in own.values())]
    if not best:
        return f"In `{setting}` undecided: each method with several seeds is worse than some other, or lacks a metric."
    absent = [METRICS[metric].title for metric in GOAL if metric not in metrics]
    unknown = f" ({', '.join(absent)} not measured)" if absent else ""
    lines = []
    for method in best:
        fvu = statistics.fmean(results.measured(setting, method, "fvu").values())
        won = {METRICS[m].title: found.count("better") for m, found in counts[method].items()}
        wins = ", ".join(f"{count} in {title}" for title, count in won.items() if count)
        beats = f" Of {len(methods) - 1} others, it is better than {wins}." if wins else ""
        whole = (
            f"In `{setting}`, {method} (FVU {fvu:.4f}): no other is better in any metric of the goal{unknown}.{beats}"
        )
        lines.append(whole)
    return " ".join(lines)


def _cost(results: Results, setting: str) -> str:
    """Training time beside the base's."""
    seconds: dict[str, list[float]] = {}
    for row in (row for row in results.rows if row.measure == "core" and row.run.setting == setting):
        if "seconds" in row.values and row.run.factor == results.best(setting, row.run.method):
            seconds.setdefault(row.run.method, []).append(row.values["seconds"])
    base = statistics.median(seconds.get(BASE, [0.0]))
    if base <= 0:
        return "Not measured yet."
    ratios = {method: statistics.median(own) / base for method, own in seconds.items() if method != BASE}
    if not ratios:
        return f"{BASE} trains in {base:.1f} s."
    least, most = (f"{end(ratios.values()):.2f} times ({end(ratios, key=ratios.__getitem__)})" for end in (min, max))
    return f"{BASE} trains in {base:.1f} s (`{setting}`); others take {least} to {most} as long."


# ---- the page ------------------------------------------------------------------------------------------


def tables(
    results: Results,
    claims: Sequence[Claim],
    roles: Mapping[str, str],
    needed: Mapping[str, str] | None = None,
    synthetic: Synthetic | None = None,
    not_run: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Table]:
    """All tables of the page. `not_run`: configurations of a synthetic preset that have no results."""
    yield hypotheses_table(results, claims, needed or {}, synthetic)
    yield claims_table(results, claims, synthetic)
    baselines = [name for name, role in roles.items() if role == "baseline"]
    leaders = leading(results.rows, roles)
    tested = [claim.method for claim in claims if claim.metric and METRICS[claim.metric].units]
    shown = list(dict.fromkeys([*baselines, *leaders, *tested]))
    yield goal_table(results, leaders, baselines)
    yield goal_table(results, leaders, baselines, seeds=FRESH)
    for setting in results.settings:
        yield summary_table(results, setting)
        yield summary_table(results, setting, tuple(METRICS), "every")
        for metric in ("probing_1", "probing_5", "absorption", "absorption_f1"):
            yield datasets_table(results, setting, shown, metric)
        asked: list[tuple[str, dict[str, Any]]] = [(metric, {}) for metric in METRICS]
        asked += [(metric, {"measure": "finalists"}) for metric in ("probing_1", "probing_5")]
        asked += [(metric, {"factor": 1.0}) for metric in MAIN]  # at the common learning rate
        for metric, how in asked:
            yield difference_table(results, setting, metric, **how)
        yield self_table(results, setting)
    for preset, found in (synthetic or {}).items():
        yield synthetic_table(preset, found, (not_run or {}).get(preset, ()))


def fill_page(path: Path, made: Sequence[Table | tuple[str, str]]) -> list[str]:
    """Replace the blocks of a page, and add those that it lacks; returns the names that were added.

    A block is a table, or a name and Markdown. Empty tables are left out, or emptied where the page has a block.
    """
    text = read_text(path) if path.exists() else "# Results\n"
    added: list[str] = []
    for one in made:
        name, content = (one.name, markdown(one) if one.rows else NOT_RUN + "\n") if isinstance(one, Table) else one
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        block = f"{begin}\n\n{content.rstrip()}\n\n{end}"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if pattern.search(text):
            text = pattern.sub(lambda _, block=block: block, text)  # type: ignore[misc]
        elif not (isinstance(one, Table) and not one.rows):
            text, added = f"{text.rstrip()}\n\n{block}\n", [*added, name]
    write_text(path, text)
    return added
