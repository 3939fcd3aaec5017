"""The pages of a study: one with the answer and the main tables, and one with all tables.

Both are Markdown. On the first one, text between `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced by the
block of that name; the rest of the page is left as it is.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from sampled_sae.reporting.claims import Claim, Synthetic, claims_table, goal_table, verdicts_table
from sampled_sae.reporting.study import BASE, GOAL, METRICS, UNEQUAL, Results, Row, Run, by_seed, judged, leading
from sampled_sae.reporting.study_answer import NOT_RUN, answer
from sampled_sae.reporting.study_power import power_table
from sampled_sae.reporting.study_synthetic import synthetic_table
from sampled_sae.reporting.tables import markdown
from sampled_sae.utils.files import read_text, write_text
from sampled_sae.utils.measures import Cell, Column, Stat, Table, form
from sampled_sae.utils.paired import Key

Block = Table | tuple[str, str]  # a table, or a name and Markdown

FRESH = (3, 4)  # seeds that no choice has seen
FAR = 1000  # between the seeds of two settings that are pooled
NEUTRAL = {
    "better": "more",
    "worse": "less",
    "not worse": "not less",
    "undecided": "undecided",
}  # where neither direction is better
EMPTY = """# Results

<!-- begin answer --><!-- end answer -->

## Claims

<!-- begin claims --><!-- end claims -->

## The goal

<!-- begin goal --><!-- end goal -->

## What more seeds would decide

<!-- begin power --><!-- end power -->

## Main metrics
"""
MAIN = ("fvu", "fvu_trained", *GOAL[1:], "absorption_f1", "over_10_percent", "alive", "autointerp", "mmcs_seeds")
"""Metrics that are also compared at the default learning rate."""
SHOWN = ("fvu", "fvu_trained", *GOAL[1:], "absorption_f1", "alive")
"""Metrics of the page's own tables, which should not be wider than the page; all of them are in tables.md."""


def means_table(results: Results, setting: str) -> Table:
    """The summary of the page's metrics, without ranges."""
    full = summary_table(results, setting)
    rows = [[cell.mean if isinstance(cell, Stat) else cell for cell in row] for row in full.rows]
    note = full.note.replace("Mean over seeds, with the range.", "Mean over seeds.", 1)
    return full._replace(rows=rows, note=note)


def summary_table(results: Results, setting: str, metrics: Sequence[str] = SHOWN) -> Table:
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
    return Table(columns, rows, f"summary-{setting}", note=note)


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
    return Table(columns, rows, note=note)


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
    return Table(columns, rows, note=note)


def _renumbered(values: Mapping[Key, float], seeds: Sequence[int]) -> dict[Key, float]:
    """The values of some seeds, with their place among these as the seed: so other seeds can be paired with them."""
    return {(seeds.index(key[0]), *key[1:]): value for key, value in values.items() if key[0] in seeds}


def units_table(results: Results, setting: str, methods: Iterable[str], metric: str = "probing_5") -> Table:
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
    return Table(columns, rows, note=f"{METRICS[metric].title}: mean over seeds.")


POOLED = ("probing_1", "probing_5", "absorption", "absorption_f1")
"""Metrics whose differences are of one scale in all settings, and too small to detect in one of them."""


def pooled(results: Results, model: str) -> Results:
    """The deciding settings of a model as one, in which each seed of a setting is a seed of its own.

    Methods keep the learning rate that counts in each setting; what was measured in one setting is left out.
    """
    settings = [setting for setting in results.deciding if results.models[setting] == model]
    measures = {METRICS[metric].measure for metric in POOLED}
    rows: list[Row] = []
    where: dict[tuple[str, str], set[str]] = {}
    for row in results.rows:
        setting, method, factor, seed = row.run
        if setting in settings and row.measure in measures and factor == results.rate(setting, method, row.measure):
            run = Run(model, method, 1.0, settings.index(setting) * FAR + seed)
            rows.append(row._replace(run=run))
            where.setdefault((method, row.measure), set()).add(setting)
    return Results([row for row in rows if len(where[row.run.method, row.measure]) > 1], {model: model})


# ---- the page ------------------------------------------------------------------------------------------


def page_blocks(
    results: Results,
    claims: Sequence[Claim],
    roles: Mapping[str, str],
    needed: Mapping[str, str] | None = None,
    synthetic: Synthetic | None = None,
    details: str = "",
) -> list[Block]:
    """The blocks of the page: the answer, the claims, the goal, what more seeds would decide in the first setting, and
    the main metrics where the goal is decided."""
    baselines = [name for name, role in roles.items() if role == "baseline"]
    leaders = leading(results.rows, roles)
    return [
        ("answer", answer(results, claims, needed or {}, roles, synthetic)),
        ("claims", verdicts_table(results, claims, needed or {}, synthetic, details)),
        goal_table(results, leaders, baselines),
        power_table(results, results.goals[0] if results.goals else "", leaders, baselines)._replace(name="power"),
        *(means_table(results, setting) for setting in results.goals),
    ]


Sections = list[tuple[str, list[tuple[str, Table]]]]
"""Titles of sections, each with its tables by title."""


def detailed_sections(
    results: Results,
    claims: Sequence[Claim],
    roles: Mapping[str, str],
    synthetic: Synthetic | None = None,
    not_run: Mapping[str, Sequence[str]] | None = None,
) -> Sections:
    """All tables: of each claim, setting and synthetic preset. `not_run`: configurations without results."""
    by_claim: dict[str, list[Claim]] = {}
    for claim in claims:
        by_claim.setdefault(claim.name, []).append(claim)
    baselines = [name for name, role in roles.items() if role == "baseline"]
    leaders = leading(results.rows, roles)
    tested = [claim.method for claim in claims if claim.metric and METRICS[claim.metric].units]
    shown = list(dict.fromkeys([*baselines, *leaders, *tested]))
    fresh = goal_table(results, leaders, baselines, seeds=FRESH)
    found: Sections = [
        ("Claims", [(name, claims_table(results, own, synthetic)) for name, own in by_claim.items()]),
        ("Goal", [(f"With seeds {' and '.join(map(str, FRESH))} alone, which no choice has seen", fresh)]),
    ]
    for setting in results.settings:
        made = [("All metrics", summary_table(results, setting, tuple(METRICS)))]
        for metric in ("probing_1", "probing_5", "absorption", "absorption_f1"):
            made.append((f"{_titled(metric)} by unit", units_table(results, setting, shown, metric)))
        made += [(_titled(metric), difference_table(results, setting, metric)) for metric in METRICS]
        for metric in ("probing_1", "probing_5"):
            table = difference_table(results, setting, metric, measure="finalists")
            made.append((f"{_titled(metric)}, further datasets", table))
        for metric in MAIN:
            table = difference_table(results, setting, metric, factor=1.0)
            made.append((f"{_titled(metric)}, all with the default learning rate", table))
        made.append((f"{BASE} against itself", self_table(results, setting)))
        made.append(("What more seeds would decide", power_table(results, setting, leaders, baselines)))
        found.append((setting, made))
    for model in dict.fromkeys(results.models[setting] for setting in results.deciding):
        joint = pooled(results, model)
        tables = [(_titled(metric), difference_table(joint, model, metric)) for metric in POOLED]
        found.append((f"{model.rpartition('/')[2]} pooled", tables))
    presets = {preset: synthetic_table(it, (not_run or {}).get(preset, ())) for preset, it in (synthetic or {}).items()}
    return [*found, ("Synthetic data", [*presets.items()])]


def _titled(metric: str) -> str:
    title = METRICS[metric].title
    return title[0].upper() + title[1:]


def detailed_page(sections: Sections) -> str:
    """Markdown: every table that is not empty under a heading, after a list of the sections."""
    parts = ["# All tables of the study"]
    kept = [(title, [it for it in made if it[1].rows]) for title, made in sections]
    kept = [(title, made) for title, made in kept if made]
    parts.append("\n".join(f"- [{title}](#{title.lower().replace(' ', '-')})" for title, _ in kept))
    for title, made in kept:
        parts.append(f"## {title}")
        # Names of claims are what links lead to; other headings would otherwise stand once per setting.
        parts += [
            f"### {name if title == 'Claims' else f'{title}: {name}'}\n\n{markdown(it).rstrip()}" for name, it in made
        ]
    return "\n\n".join(parts) + "\n"


def fill_page(path: Path, made: Sequence[Block]) -> list[str]:
    """Replace the blocks of a page, and add those that it lacks; returns the names that were added.

    A block is a table, or a name and Markdown. Empty tables are left out, or emptied where the page has a block.
    """
    text = read_text(path) if path.exists() else EMPTY
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
