"""Claims of a paper as comparisons, what a study's results say about each, and their tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal, NamedTuple

from sampled_sae.config import Config, PositiveNumber, require
from sampled_sae.reporting.study import BASE, FLOOR, GOAL, METRICS, Results, judged
from sampled_sae.reporting.tables import in_markdown
from sampled_sae.utils.measures import Cell, Column, Table, form, number
from sampled_sae.utils.paired import Difference, Verdict, holm, paired

Kind = Literal["difference", "at most", "dominated", "front", "no best", "synthetic"]
Outcome = Literal["supported", "refuted", "mixed", "undecided", "not measured"]
OPPOSITE: dict[str, str] = {"better": "worse", "worse": "better", "not worse": "worse"}
NO_BREAK = "\u00a0"
Synthetic = Mapping[str, dict[str, Any]]  # results of the synthetic experiment, by preset


@dataclass(frozen=True, slots=True)
class Claim(Config):
    """A claim as a comparison; several of one name make up a hypothesis.

    difference: `method` is better, worse or not worse than `against`. at most: its metric is at most `ratio` times that
    of `against`. dominated: one of `methods` is better than the base in all `metrics`. front: none is better in one of
    `metrics` and not worse in the others. no best: no method at all is not worse than every other in all `metrics`.
    synthetic: `method` reaches `ratio` as its FVE on fresh samples after training on a fixed set.
    """

    name: str  # as H3
    text: str
    metric: str = ""
    method: str = ""
    expect: Literal["better", "worse", "not worse"] = "better"
    against: str = BASE
    ratio: PositiveNumber | None = None  # least ratio of the two means, or most
    kind: Kind = "difference"
    methods: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()

    def check(self) -> None:
        right = f"must be among {', '.join(METRICS)}"
        if self.metric or self.kind in ("difference", "at most"):
            require(self.metric in METRICS, "metric", self.metric, right)
        for metric in self.metrics:
            require(metric in METRICS, "metrics", metric, right)


class Tested(NamedTuple):
    """What the results say about a claim."""

    outcome: Outcome
    effect: Difference | None = None  # in the setting that decides
    settings: int = 0  # settings where it was measured
    setting: str = ""  # the one that decides
    beside: str = "-"  # the verdict in the settings that decide nothing
    detail: str = ""


def outcome(results: Results, claim: Claim, synthetic: Synthetic | None = None) -> Tested:
    """The first setting with several seeds decides, unless settings contradict each other: then the claim is mixed."""
    if claim.kind == "synthetic":
        return _synthetic(claim, synthetic or {})
    if claim.kind in ("dominated", "front", "no best"):
        return _over_methods(results, claim)
    every = {s: d for s in results.settings if (d := results.difference(s, claim.method, claim.against, claim.metric))}
    found = {s: it for s, it in every.items() if s in results.deciding}
    beside = ", ".join(f"{s}: {verdict}" for s, (_, verdict) in every.items() if s not in found) or "-"
    if not found:
        return Tested("not measured", beside=beside)
    found = {s: it for s, it in found.items() if it[0].clusters[0] > 1} or found  # one seed decides nothing
    first = next(iter(found))
    effect = found[first][0]
    each = [_in_setting(results, claim, setting, verdict) for setting, (_, verdict) in found.items()]
    mixed = {"supported", "refuted"} <= set(each)
    return Tested("mixed" if mixed else each[0], effect, len(found), first, beside)


def _in_setting(results: Results, claim: Claim, setting: str, verdict: Verdict) -> Outcome:
    """What one setting says about a claim. A ratio that is claimed is refuted if the measured one is surely below."""
    if claim.kind == "at most":
        return _at_most(results, claim, setting)
    if verdict == OPPOSITE[claim.expect]:
        return "refuted"
    if verdict != claim.expect and not (claim.expect == "not worse" and verdict == "better"):
        return "undecided"
    if claim.ratio is not None:
        first, second = (results.measured(setting, m, claim.metric) for m in (claim.method, claim.against))
        if statistics.fmean(first.values()) < claim.ratio * statistics.fmean(second.values()):
            return "refuted" if _at_most(results, claim, setting) == "supported" else "undecided"
    return "supported"


def _at_most(results: Results, claim: Claim, setting: str) -> Outcome:
    """Whether the 95% interval of the ratio ends below the limit, or begins above it."""
    first, second = (
        {key: math.log2(max(value, FLOOR)) for key, value in results.measured(setting, m, claim.metric).items()}
        for m in (claim.method, claim.against)
    )
    it = paired(first, second, better=None)
    if it is None or it.interval is None or claim.ratio is None:
        return "undecided"
    low, high = it.interval
    limit = math.log2(claim.ratio)
    return "supported" if high <= limit else "refuted" if low > limit else "undecided"


def _over_methods(results: Results, claim: Claim) -> Tested:
    """Claims about all of several methods, in the first setting that decides."""
    setting = next(iter(results.deciding), None)
    if setting is None:
        return Tested("not measured")

    def verdicts(method: str, other: str) -> list[Verdict] | None:
        every = [results.difference(setting, method, other, metric) for metric in claim.metrics]
        there = [it[1] for it in every if it is not None]
        return there if len(there) == len(every) else None

    if claim.kind == "no best":
        return _no_best(results.repeated(setting), verdicts)._replace(setting=setting)
    found = {method: v for method in claim.methods if (v := verdicts(method, BASE)) is not None}
    if not found:
        return Tested("not measured")
    enough = {"better"} if claim.kind == "dominated" else {"better", "not worse"}
    wins = [method for method, v in found.items() if "better" in v and set(v) <= enough]
    lost = len(found) == len(claim.methods) and all("worse" in v for v in found.values())
    yes: Outcome = "supported" if claim.kind == "dominated" else "refuted"
    no: Outcome = "refuted" if claim.kind == "dominated" else "supported"
    return Tested(yes if wins else no if lost else "undecided", None, 1, setting, detail=", ".join(wins))


def _no_best(methods: Sequence[str], verdicts: Any) -> Tested:
    found = {(a, b): v for a, b in permutations(methods, 2) if (v := verdicts(a, b)) is not None}
    measured = [method for method in methods if sum(a == method for a, _ in found) == len(methods) - 1]
    if len(measured) < 2:
        return Tested("not measured")
    of = {method: [v for (a, _), some in found.items() if a == method for v in some] for method in measured}
    best = [method for method, some in of.items() if set(some) <= {"better", "not worse"}]
    lost = all("worse" in some for some in of.values())
    return Tested("refuted" if best else "supported" if lost else "undecided", None, 1, detail=", ".join(best))


def _synthetic(claim: Claim, synthetic: Synthetic) -> Tested:
    """FVE on fresh samples of an SAE that was trained on a fixed set."""
    for found in synthetic.values():
        own = [sae for sae in found["saes"] if sae.get("label") == claim.method]
        fresh, train = (
            [value for sae in own if (value := number(sae.get(name))) is not None]
            for name in ("fve_heldout_threshold", "fve_train")
        )
        if found.get("train", {}).get("samples") and fresh and train and claim.ratio is not None:
            means = statistics.fmean(fresh), statistics.fmean(train)
            detail = f"FVE {means[0]:.4f} on fresh, {means[1]:.4f} on training samples, {len(own)} seeds"
            reached = min(fresh) >= claim.ratio, max(fresh) < claim.ratio
            return Tested("supported" if reached[0] else "refuted" if reached[1] else "mixed", None, 1, detail=detail)
    return Tested("not measured")


# ---- tables --------------------------------------------------------------------------------------------


def combined(outcomes: Sequence[Outcome], needed: str = "all") -> Outcome:
    """The outcome of a hypothesis from those of its comparisons: all of them, or most, must be supported."""
    known = [it for it in outcomes if it != "not measured"]
    if not known:
        return "not measured"
    least = len(outcomes) if needed == "all" else len(outcomes) // 2 + 1
    yes, no = known.count("supported"), known.count("refuted")
    if yes >= least:
        return "supported"
    if "mixed" in known or (yes and no):
        return "mixed"
    return "refuted" if no > len(outcomes) - least and no == len(known) else "undecided"


def hypotheses(
    results: Results, claims: Sequence[Claim], needed: Mapping[str, str], synthetic: Synthetic | None = None
) -> dict[str, Outcome]:
    """The outcome of each hypothesis, in order; what it says about one method, in several metrics, holds jointly."""
    found: dict[str, dict[tuple[str, str], list[Outcome]]] = {}
    for claim in claims:
        own = found.setdefault(claim.name, {}).setdefault((claim.method, claim.against), [])
        own.append(outcome(results, claim, synthetic).outcome)
    return {
        name: combined([_jointly(it) for it in own.values()], needed.get(name, "all")) for name, own in found.items()
    }


def _jointly(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of claims that must hold together."""
    if len(set(outcomes)) == 1:
        return outcomes[0]
    return "refuted" if "refuted" in outcomes else "undecided"


def verdicts_table(
    results: Results,
    claims: Sequence[Claim],
    needed: Mapping[str, str],
    synthetic: Synthetic | None = None,
    details: str = "",
) -> str:
    """Markdown: a row per hypothesis with the effects of its comparisons and a link into the page `details`."""
    lines = ["| claim | | verdict | effect (95% interval) | seeds | settings |", "|---|---|---|---|---|---|"]
    for name, verdict in hypotheses(results, claims, needed, synthetic).items():
        own = [claim for claim in claims if claim.name == name]
        tested = [outcome(results, claim, synthetic) for claim in own]
        by_metric: dict[str, list[str]] = {}
        for claim, it in zip(own, tested, strict=True):
            if it.effect is not None:
                by_metric.setdefault(claim.metric, []).append(_effect(results, claim, it.setting))
        effects = [it.detail for it in tested if it.detail]
        for metric, found in by_metric.items():
            effects += [f"*{METRICS[metric].title}*", *found]
        cells = [in_markdown(own[0].text), verdict, "<br>".join(effects) or "-"]
        cells.append(_span(it.effect.clusters[0] for it in tested if it.effect is not None))
        cells.append(_span(it.settings for it in tested if it.settings))
        lines.append(f"| {' | '.join([f'[{name}]({details}#{name.lower()})', *cells])} |")
    first = next(iter(results.deciding), "")
    note = (
        f"Effects compare with `{BASE}` in `{first}` unless another method or setting is named. x: a ratio. All "
        "others are differences; positive is better, or more where neither direction is better. Settings: how many "
        "were measured with several seeds."
    )
    return "\n".join([*lines, "", note])


def _effect(results: Results, claim: Claim, setting: str) -> str:
    """The effect of a comparison in the setting that decides it; a ratio for FVU and for numbers of latents."""
    how = METRICS[claim.metric]
    ratio = how.log or how.relative
    own = results.measured(setting, claim.method, claim.metric)
    other = results.measured(setting, claim.against, claim.metric) or dict.fromkeys(own, 0.0)
    compared = how._replace(log=ratio, better=None if ratio else how.better)
    found = judged(own, other, compared)
    assert found is not None
    it = found[0]
    ends = [it.mean, *(it.interval or ())]
    shown = [f"{2**end:.2f}" if ratio else form(end, min(how.digits, 3)) for end in ends]
    interval = f" ({NO_BREAK.join([shown[1], 'to', shown[2]])})" if shown[1:] else ""
    against = "" if claim.against in (BASE, "zero") else f" against {claim.against}"
    return in_markdown(f"{_named(results, claim, setting)}{against}: {'x ' if ratio else ''}{shown[0]}{interval}")


def _span(numbers: Iterable[int]) -> str:
    """A number, or the smallest and the largest one."""
    found = sorted(set(numbers))
    return " to ".join(map(str, dict.fromkeys([found[0], found[-1]]))) if found else "-"


def _named(results: Results, claim: Claim, setting: str) -> str:
    """The claim's method, with its learning rate where it is not the best one, and where the claim is decided."""
    rates = results.other_rates(setting, claim.method, [claim.metric]).values() if setting else ()
    elsewhere = [f"in {setting}"] if setting and setting != next(iter(results.deciding)) else []
    return " ".join([claim.method, *(f"(lr x {rate:g})" for rate in rates), *elsewhere])


def _shown(value: float | None, metric: str) -> str:
    """A difference as it is printed: a ratio, if log2 of ratios is compared."""
    how = METRICS[metric]
    return f"x {2**value:.2f}" if how.log and value is not None else form(value, how.digits)


def claims_table(results: Results, claims: Sequence[Claim], synthetic: Synthetic | None = None) -> Table:
    """A row per comparison: outcome, effect in the deciding setting with its interval, MDD, seeds, and settings."""
    columns = [Column("comparison"), Column("metric"), Column("outcome")]
    columns += [Column("difference"), Column("MDD"), Column("seeds"), Column("settings"), Column("paper's recipe")]
    rows: list[list[Cell]] = []
    for claim in claims:
        tested = outcome(results, claim, synthetic)
        metric = METRICS[claim.metric] if claim.metric else None
        title = metric.title if metric else ", ".join(METRICS[name].title for name in claim.metrics) or "FVE"
        cells: list[Cell] = [tested.detail or "-", "-", "-"]
        if (it := tested.effect) is not None:
            ends = "" if it.interval is None else " to ".join(_shown(end, claim.metric) for end in it.interval)
            difference = _shown(it.mean, claim.metric) + (ends and f" ({ends})")
            cells = [difference, _shown(it.detectable, claim.metric), it.clusters[0]]
        pair = claim.method or "all methods"
        if metric:
            pair = f"{_named(results, claim, tested.setting)} against {claim.against}"
        rows.append([pair, title, tested.outcome, *cells, tested.settings, tested.beside])
    return Table(columns, rows, note="Positive is better, or more where neither direction is better; x: a ratio.")


GoalKey = tuple[str, str, str, str]  # setting, method, baseline, metric


def goal_verdicts(
    results: Results, methods: Sequence[str], baselines: Sequence[str], seeds: Sequence[int] | None = None
) -> dict[GoalKey, tuple[Verdict, float | None]]:
    """The verdicts of the goal's comparisons with their p-values, adjusted by Holm's method over all of them."""
    pairs = [(s, m, b) for s in results.deciding for m in methods for b in baselines if m != b]
    every = {(*pair, name): results.difference(*pair, name, seeds=seeds) for pair in pairs for name in GOAL}
    found = {key: it for key, it in every.items() if it is not None}
    known = {key: it[0].p_value for key, it in found.items() if it[0].p_value is not None}
    adjusted = dict(zip(known, holm([p for p in known.values() if p is not None]), strict=True))
    return {key: (it[1], adjusted.get(key)) for key, it in found.items()}


def goal_table(
    results: Results, methods: Sequence[str], baselines: Sequence[str], seeds: Sequence[int] | None = None
) -> Table:
    """Each method against each baseline in the goal's metrics, with p-values adjusted over all of these comparisons."""
    columns = [Column("setting"), Column("method"), Column("against"), *(Column(METRICS[name].title) for name in GOAL)]
    found = goal_verdicts(results, methods, baselines, seeds)
    rows: list[list[Cell]] = []
    for one in dict.fromkeys(key[:3] for key in found):
        rows.append([*one, *(_verdict_cell(found.get((*one, name))) for name in GOAL)])
    note = (
        "p-values are adjusted by Holm's method over all comparisons of this table; nominal: a verdict by the minimum "
        "detectable difference whose adjusted p-value is 0.05 or more."
    )
    return Table(columns, rows, "goal" if seeds is None else "goal-fresh", note=note)


def _verdict_cell(found: tuple[Verdict, float | None] | None) -> str:
    if found is None:
        return "-"
    verdict, p = found
    if p is None or verdict not in ("better", "worse"):
        return verdict
    shown = "p < 0.001" if p < 0.001 else f"p = {form(p, 3)}"
    return f"{verdict} ({shown})" if p < 0.05 else f"{verdict}, nominal ({shown})"


def reached(results: Results, methods: Sequence[str], baselines: Sequence[str]) -> list[str]:
    """The methods that reach the goal on each model: not worse than any baseline, better in two of four metrics.

    Better counts after the adjustment for all comparisons of `methods`, so these are to be the leaders alone.
    """
    verdicts = goal_verdicts(results, methods, baselines)
    kinds = {metric: "probing" if metric.startswith("probing") else metric for metric in GOAL}

    def reaches(method: str, setting: str) -> bool:
        found = {(b, m): verdicts.get((setting, method, b, m), ("undecided", None)) for b in baselines for m in GOAL}
        lost = {kinds[m] for (_, m), (verdict, p) in found.items() if verdict != "better" or p is None or p >= 0.05}
        never_worse = all(verdict in ("better", "not worse") for verdict, _ in found.values())
        return never_worse and len(set(kinds.values()) - lost) >= 2

    return [m for m in methods if results.goals and all(reaches(m, setting) for setting in results.goals)]
