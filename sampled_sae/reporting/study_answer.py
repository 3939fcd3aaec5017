"""The answer of a study in five lines: whether to use the family, what instead, cost, claims, what is unproven."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from sampled_sae.reporting.claims import Claim, Outcome, Synthetic, hypotheses, reached
from sampled_sae.reporting.study import BASE, GOAL, METRICS, NO_LEADERS, Results
from sampled_sae.utils.paired import Verdict

NOT_RUN = "Not run yet: there are no results."


def answer(
    results: Results,
    claims: Sequence[Claim],
    needed: Mapping[str, str],
    roles: Mapping[str, str],
    synthetic: Synthetic | None = None,
) -> str:
    """Markdown, a list of five."""
    if not results.settings:
        tried = len(results.rows)
        return NOT_RUN if not tried else f"Not run yet: only learning rates were chosen, with {tried} short trainings."
    lines = {
        "Should I use Sampled-SAE?": _use(results, roles),
        "Which method instead?": _instead(results),
        "What does it cost?": _cost(results, roles),
        "Which claims of the paper hold?": _claims(hypotheses(results, claims, needed, synthetic)),
        "What is unproven?": _unproven(results),
    }
    return "\n".join(f"{number}. **{title}** {text}" for number, (title, text) in enumerate(lines.items(), 1))


def _use(results: Results, roles: Mapping[str, str]) -> str:
    """Whether a variant reaches the goal; if not, what variants with several seeds lose and win against the base."""
    first = results.settings[0]
    baselines = [name for name, role in roles.items() if role == "baseline"]
    candidates = [name for name in results.methods(first) if roles.get(name) not in NO_LEADERS]
    if winners := reached(results, candidates, baselines):
        return f"Yes: {_listed(winners)} reached the [goal](#the-goal)."
    parts = []
    for setting in results.goals:
        variants = [name for name in results.repeated(setting) if roles.get(name) not in NO_LEADERS]
        found = {name: _against_base(results, setting, name) for name in variants}
        lost = sum(verdicts.get("fvu") == "worse" for verdicts in found.values())
        won = {n: [METRICS[m].title for m, it in own.items() if it == "better"] for n, own in found.items()}
        better = _listed([f"{name} ({', '.join(titles)})" for name, titles in won.items() if titles])
        count = f"all {lost}" if lost == len(found) else f"{lost} of {len(found)}"
        several = f"{count} variants with several seeds have a higher FVU than {BASE}"
        parts.append(f"In `{setting}`, {several}; better in some metric: {better or 'none'}.")
    return f"There is no reason to. No variant reached the [goal](#the-goal). {' '.join(parts)}"


def _instead(results: Results) -> str:
    """The methods of each model that are worse than no other with several seeds in any metric of the goal."""
    parts = []
    for setting in results.goals:
        metrics = [metric for metric in GOAL if results.measured(setting, BASE, metric)]
        names = [
            f"{method} (FVU {statistics.fmean(results.measured(setting, method, 'fvu').values()):.4f})"
            for method in _unbeaten(results, setting, metrics)
        ]
        model = results.models[setting].rpartition("/")[2]
        absent = [METRICS[metric].title for metric in GOAL if metric not in metrics]
        titles = " and ".join(absent)
        were = "was" if len(absent) == 1 else "were"
        without = f" {titles[0].upper()}{titles[1:]} {were} not measured." if titles else ""
        parts.append(f"{model} (`{setting}`): {_listed(names) or 'undecided'}.{without}")
    return f"{' '.join(parts)} Of the methods with several seeds, no other is better there in any metric of the goal."


def _unbeaten(results: Results, setting: str, metrics: Sequence[str]) -> list[str]:
    """The methods that have all of the metrics and are worse than no other in any of them."""
    methods = results.repeated(setting)
    whole = [m for m in methods if all(results.measured(setting, m, metric) for metric in metrics)]

    def beaten(method: str) -> bool:
        rivals = [other for other in methods if other != method]
        found = (results.difference(setting, method, other, metric) for other in rivals for metric in metrics)
        return any(it is not None and it[1] == "worse" for it in found)

    return [method for method in whole if not beaten(method)]


def _cost(results: Results, roles: Mapping[str, str]) -> str:
    """Training time beside the base's, and the FVU of the paper's best pool."""
    setting, seconds = results.settings[0], dict[str, list[float]]()
    for row in (row for row in results.rows if row.measure == "core" and row.run.setting == setting):
        if "seconds" in row.values and row.run.factor == results.best(setting, row.run.method):
            seconds.setdefault(row.run.method, []).append(row.values["seconds"])
    base = statistics.median(seconds.get(BASE, [0.0]))
    pools = [name for name in results.repeated(setting) if roles.get(name) == "paper"]
    timed = {name: statistics.median(seconds[name]) / base for name in pools if base > 0 and name in seconds}
    if not timed:
        return "Not measured yet."
    fvu = {name: statistics.fmean(results.measured(setting, name, "fvu").values()) for name in (BASE, *timed)}
    best = min(timed, key=lambda name: fvu[name])
    return (
        f"In `{setting}`, {BASE} trains in {base:.1f} s, and the paper's pools take {min(timed.values()):.2f} to "
        f"{max(timed.values()):.2f} times as long. The best of them, {best}, has {fvu[best] / fvu[BASE]:.2f} times "
        "its FVU."
    )


def _claims(outcomes: Mapping[str, Outcome]) -> str:
    """How many claims have each outcome, and which."""
    named = {kind: [name for name, it in outcomes.items() if it == kind] for kind in get_args(Outcome)}
    counts = [f"{len(names)} {kind} ({', '.join(names)})" for kind, names in named.items() if names]
    return f"Of {len(outcomes)}: {', '.join(counts)}." if counts else "None was tested."


def _unproven(results: Results) -> str:
    """Comparisons that are undecided, by metric, and what the study consists of."""
    verdicts = [
        (metric, verdict)
        for setting in results.goals
        for method in results.repeated(setting)
        if method != BASE
        for metric, verdict in _against_base(results, setting, method).items()
    ]
    every, left = (
        Counter(metric for metric, it in verdicts if it in kinds) for kinds in (get_args(Verdict), ["undecided"])
    )
    undecided = ", ".join(
        f"{METRICS[metric].title} ({left[metric]} of {every[metric]})" for metric in GOAL if left[metric]
    )
    first = results.settings[0]
    seeds = {len(results.measured(first, method, "fvu")) for method in results.repeated(first)}
    saes = len({row.run for row in results.rows if row.measure != "rate"})
    return (
        f"Differences to {BASE} that are too small to detect: {undecided or 'none'}. "
        f"The study has {saes} SAEs in {len(results.settings)} settings, with {_range(seeds)} seeds of each method "
        f"compared in `{first}`."
    )


def _against_base(results: Results, setting: str, method: str) -> dict[str, Verdict]:
    """Verdicts of a method against the base, by metric of the goal."""
    return {m: it[1] for m in GOAL if (it := results.difference(setting, method, BASE, m))}


def _listed(names: Sequence[str]) -> str:
    """Names as in a sentence."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _range(numbers: set[int]) -> str:
    return " to ".join(map(str, sorted({min(numbers), max(numbers)}))) if numbers else "no"
