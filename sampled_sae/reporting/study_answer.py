"""The answer of a study in five lines: whether to use the family, what instead, cost, claims, what is undecided."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from sampled_sae.reporting.claims import Claim, Outcome, Synthetic, hypotheses, reached
from sampled_sae.reporting.study import BASE, GOAL, METRICS, NO_LEADERS, Results, leading
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
        "Which claims of the paper hold?": _claims(claims, hypotheses(results, claims, needed, synthetic)),
        "What is undecided?": _undecided(results),
    }
    return "\n".join(f"{number}. **{title}** {text}" for number, (title, text) in enumerate(lines.items(), 1))


def _use(results: Results, roles: Mapping[str, str]) -> str:
    """Whether a variant reaches the goal; if not, what variants with several seeds lose and win against the base."""
    baselines = [name for name, role in roles.items() if role == "baseline"]
    if winners := reached(results, leading(results.rows, roles), baselines):
        return f"Yes: {_listed(_code(winners))} reached the [goal](#the-goal)."
    parts = []
    for setting in results.goals:
        variants = [name for name in results.repeated(setting) if roles.get(name) not in NO_LEADERS]
        found = {name: _against_base(results, setting, name) for name in variants}
        lost = sum(verdicts.get("fvu") == "worse" for verdicts in found.values())
        won = {n: [METRICS[m].title for m, it in own.items() if it == "better"] for n, own in found.items()}
        better = _listed([f"`{name}` ({', '.join(titles)})" for name, titles in won.items() if titles])
        count = f"all {lost}" if lost == len(found) else f"{lost} of the {len(found)}"
        several = f"{count} variants with several seeds have a higher FVU than `{BASE}`"
        wins = f"Better than it in some metric: {better}" if better else "None is better in any metric of the goal"
        parts.append(f"In `{setting}`, {several}. {wins}.")
    return f"There is no reason to. No variant reached the [goal](#the-goal). {' '.join(parts)}"


def _instead(results: Results) -> str:
    """The methods of each model that are worse than no other with several seeds in any metric of the goal."""
    parts = []
    for setting in results.goals:
        metrics = [metric for metric in GOAL if results.measured(setting, BASE, metric)]
        names = [
            f"`{method}` (FVU {statistics.fmean(results.measured(setting, method, 'fvu').values()):.4f})"
            for method in _unbeaten(results, setting, metrics)
        ]
        model = results.models[setting].rpartition("/")[2]
        absent = [METRICS[metric].title for metric in GOAL if metric not in metrics]
        without = f"; {' and '.join(absent)} not measured" if absent else ""
        parts.append(f"On {model} (`{setting}`{without}): {_listed(names) or 'undecided'}.")
    return f"{' '.join(parts)} No other method with several seeds is better there in any metric of the goal."


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
    absent = [name for name in pools if name not in timed]
    without = f" ({_listed(_code(absent))}: not timed at the learning rate that counts)" if absent else ""
    return (
        f"In `{setting}`, `{BASE}` trains in {base:.1f} s. The paper's pools take {min(timed.values()):.2f} to "
        f"{max(timed.values()):.2f} times as long{without}. The one with the lowest FVU, `{best}`, has "
        f"{fvu[best] / fvu[BASE]:.2f} times `{BASE}`'s FVU."
    )


def _claims(claims: Sequence[Claim], outcomes: Mapping[str, Outcome]) -> str:
    """How many claims have each outcome, and which, with the text of those that are decided."""
    text = {claim.name: claim.text for claim in reversed(claims)}  # a claim of several comparisons has the first's
    counts = []
    for kind in get_args(Outcome):
        names = [name for name, it in outcomes.items() if it == kind]
        shown = [f"{name} ({text[name]})" if kind in ("supported", "refuted") else name for name in names]
        counts += [f"{kind.capitalize()} ({len(names)} of {len(outcomes)}): {', '.join(shown)}."] if names else []
    return " ".join(counts) or "None was tested."


def _undecided(results: Results) -> str:
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
        f"Comparisons with `{BASE}` in {_listed(_code(results.goals))} whose difference is too small to detect: "
        f"{undecided or 'none'}. "
        f"The study has {saes} SAEs in {len(results.settings)} settings, with {_range(seeds)} seeds of each method "
        f"compared in `{first}`."
    )


def _against_base(results: Results, setting: str, method: str) -> dict[str, Verdict]:
    """Verdicts of a method against the base, by metric of the goal."""
    return {m: it[1] for m in GOAL if (it := results.difference(setting, method, BASE, m))}


def _code(names: Sequence[str]) -> list[str]:
    """Names as code."""
    return [f"`{name}`" for name in names]


def _listed(names: Sequence[str]) -> str:
    """Names as in a sentence."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _range(numbers: set[int]) -> str:
    return " to ".join(map(str, sorted({min(numbers), max(numbers)}))) if numbers else "no"
