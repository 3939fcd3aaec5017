"""The paper's tables with our numbers, as far as the results are there; what is missing is named.

| the paper's table | is made of | name |
|---|---|---|
| Table 1, MMCS across seeds | compare.json | paper-mmcs |
| the text's MMCS across scores | compare.json | paper-mmcs-scores |
| synthetic dataset summary | the synthetic experiment's results.json | paper-synthetic |
| what the paper plans: recovery by bucket, fidelity | the same | paper-synthetic-recovery |
| probing by k | evals/probing.json and core.json of the SAEs | paper-probing |
| features unique to each score | compare.json, after autointerp | paper-unique-SCORE |
| top ten features | evals/autointerp.json of the SAEs | paper-top-GROUP |
| training configuration | settings of the SAEs | paper-training |
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from sampled_sae.reporting.collect import Found, Saved, part
from sampled_sae.reporting.paper_tables_compare import BASE, SCORES, TITLES, compared, nothing_compared, title_of
from sampled_sae.reporting.paper_tables_format import Head, Missing, PaperTable, best
from sampled_sae.reporting.sweep import Configuration, Sweep
from sampled_sae.reporting.synthetic import buckets, columns, configurations, data_line
from sampled_sae.utils.measures import form, number

DATA = "Synthetic dataset summary"
RECOVERY = "True features recovered"


def paper_tables(found: Found, made: Sequence[Sweep], before: Sequence[str]) -> list[PaperTable | Missing]:
    """All tables of the paper; `before` is what the names of each sweep's tables begin with."""
    tables: list[PaperTable | Missing] = []
    for i, (folder, results) in enumerate(found.synthetic):
        tables += _synthetic(results, _after(folder.name, i))
    if not found.synthetic:
        why = "no results of the synthetic experiment were found; run sampled-sae synthetic"
        tables += [Missing("paper-synthetic", DATA, why), Missing("paper-synthetic-recovery", RECOVERY, why)]
    for sweep, prefix in zip(made, before, strict=True):
        tables += swept(sweep, prefix)
    tables += [] if made else nothing_swept()
    for i, (folder, content) in enumerate(found.comparisons):
        tables += compared(content, _after(folder.name, i))
    tables += [] if found.comparisons else nothing_compared()
    return tables


def _after(folder: str, number: int) -> str:
    """Nothing for the first of several; for the others a number and the folder's name."""
    return "" if number == 0 else f"-{number + 1}-{re.sub(r'[^a-z0-9.]+', '-', folder.lower()).strip('-.')}"


def _synthetic(results: dict[str, Any], after: str) -> list[PaperTable | Missing]:
    rows = [
        [bucket.get("name"), bucket.get("features"), _spread(bucket), bucket.get("p"), bucket.get("sigma")]
        for bucket in buckets(results)
    ]
    heads = [Head("Bucket"), Head("Features"), Head("Mean activation ± std"), Head("p", 3), Head("sigma", 2)]
    data = PaperTable(f"paper-synthetic{after}", DATA, data_line(results), heads, rows)
    shown = [column for column in columns(results) if column.brief or column.key == "recovered"]
    found = configurations(results)
    means = [[row.label, *(row.mean(column.key) for column in shown)] for row in found]
    named = [Head("SAE"), *(Head(column.title, column.digits) for column in shown)]
    seeds = max((len(row.runs) for row in found), default=0)
    note = (
        "A true feature is recovered if it is matched one to one with a latent at |cosine| >= 0.7; fidelity is the "
        "correlation of learned and true firing frequency over matched pairs."
    ) + (f" Means over up to {seeds} seeds." if seeds > 1 else "")
    return [data, PaperTable(f"paper-synthetic-recovery{after}", RECOVERY, note, named, means)]


def _spread(bucket: dict[str, Any]) -> str:
    return f"{form(bucket.get('mean_activation'), 3)} ± {form(bucket.get('std_activation'), 3)}"


TOP = 10
"""Features in a table of the best explained ones."""
PROBING = "Probing accuracy by number of latents"
TRAINING = "Settings of training"


def swept(sweep: Sweep, before: str = "") -> list[PaperTable | Missing]:
    """The tables of one model and layer; `before` begins their names."""
    groups = [BASE, *SCORES, *dict.fromkeys(row.group for row in sweep.rows if row.group not in (BASE, *SCORES))]
    tops = [_top(sweep, group, before) for group in groups]
    return [_probing(sweep, before), *tops, _training(sweep, before)]


def nothing_swept() -> list[PaperTable | Missing]:
    """The same tables where there is no SAE of a model."""
    why = "no SAE was found; run sampled-sae train"
    named = [("paper-probing", PROBING), *((f"paper-top-{g}", _top_title(g)) for g in (BASE, *SCORES))]
    return [Missing(name, title, why) for name, title in [*named, ("paper-training", TRAINING)]]


def _probing(sweep: Sweep, before: str) -> PaperTable | Missing:
    """For each k one row a score, with the l that probes best over all k."""
    name = f"{before}paper-probing"
    ks = [k for k in (1, 2, 5, 10) if sweep.metric(f"probing_{k}") is not None]
    chosen = _best_l(sweep, ks)
    if not ks or not chosen:
        return Missing(name, PROBING, "no SAE has probing results; run sampled-sae eval --evals probing")
    rows: list[list[Any]] = []
    bold: set[tuple[int, int]] = set()
    rules = set()
    for k in ks:
        values = [row.mean(("values", f"probing_{k}")) for row in chosen]
        bold |= {(len(rows) + place, 3) for place in best(values, 4)}
        rules.add(len(rows))
        rows += [
            [k, title_of(row.label), row.mean(("values", "fvu")), value]
            for row, value in zip(chosen, values, strict=True)
        ]
    heads = [Head("k"), Head("Architecture (with l)"), Head("FVU", 3), Head("SAE accuracy", 4)]
    seeds = max(len(row.runs) for row in chosen)
    note = (
        f"Test accuracy of a probe on k latents, mean over classes, then datasets ({', '.join(_datasets(sweep))}). Of "
        "each score the l with the highest mean over all k is shown, which flatters it a little: it is chosen by the "
        "same texts."
    ) + (f" Means over up to {seeds} seeds." if seeds > 1 else "")
    return PaperTable(name, PROBING, note, heads, rows, frozenset(bold), frozenset(rules))


def _best_l(sweep: Sweep, ks: list[int]) -> list[Configuration]:
    """One row of each group: the one of the highest mean accuracy; BatchTopK last, as in the paper."""
    found: dict[str, tuple[float, Configuration]] = {}
    for row in sweep.rows:
        values = [value for k in ks if (value := row.mean(("values", f"probing_{k}"))) is not None]
        if len(values) == len(ks) and values:
            mean = statistics.fmean(values)
            if row.group not in found or mean > found[row.group][0]:
                found[row.group] = (mean, row)
    order = sorted(found, key=lambda group: group == BASE)
    return [found[group][1] for group in order]


def _datasets(sweep: Sweep) -> list[str]:
    names = []
    for sae in sweep.saes:
        listed = part(sae.results, "probing", "result").get("datasets")
        names += [str(part(item).get("name")) for item in listed] if isinstance(listed, list) else []
    return list(dict.fromkeys(names)) or ["not named"]


def _top_title(group: str) -> str:
    return f"Top {TOP} features of {TITLES.get(group, group)}"


def _top(sweep: Sweep, group: str, before: str) -> PaperTable | Missing:
    """The latents of the best scores in autointerp; of the largest pool, the lowest seed."""
    name, title = f"{before}paper-top-{group.replace(' ', '-')}", _top_title(group)
    saes = {str(sae.folder): sae for sae in sweep.saes}
    found = [
        (row, run, latents)
        for row in sweep.rows
        for run in row.runs
        if row.group == group and (latents := _explained(saes[run["name"]]))
    ]
    if not found:
        there = any(row.group == group for row in sweep.rows)
        why = "run sampled-sae eval --evals autointerp" if there else "no such SAE was trained"
        return Missing(name, title, why)
    row, run, latents = min(found, key=lambda one: (-(one[0].l or 0.0), one[0].label, _seed(one[1])))
    rows = [[place, score, latent, text, row.l] for place, (score, latent, text) in enumerate(latents[:TOP], start=1)]
    heads = [Head("Rank"), Head("Score", 3), Head("Latent"), Head("Explanation", wide=True), Head("l")]
    mean = run["values"].get("autointerp")
    result = part(saes[run["name"]].results, "autointerp", "result")
    note = (
        f"{title_of(row.label)}, seed {run['seed']}; mean score of {result.get('chosen')} latents "
        + ("not known" if mean is None else f"{mean:.3f}")
        + f". Explained by {result.get('explainer')}, judged by {result.get('judge')}; the score is the share of 14 "
        "windows sorted rightly, ties are broken by the other scores."
    )
    return PaperTable(name, title, note, heads, rows)


def _seed(run: dict[str, Any]) -> int:
    return run["seed"] if isinstance(run["seed"], int) else 0


def _explained(sae: Saved) -> list[tuple[float, int, str]]:
    """Score, number and explanation of the latents that have them, best first."""
    listed = part(sae.results, "autointerp", "result").get("latents")
    found = []
    for item in listed if isinstance(listed, list) else []:
        scores, latent, text = part(item, "scores"), part(item).get("latent"), part(item).get("explanation")
        values = [number(scores.get(kind)) for kind in ("detection", "balanced", "fuzzing")]
        if values[0] is not None and isinstance(latent, int) and isinstance(text, str):
            found.append(([-(value or 0.0) for value in values], latent, text, values[0]))
    return [(score, latent, text) for _, latent, text, score in sorted(found)]


def _training(sweep: Sweep, before: str) -> PaperTable | Missing:
    """The paper's table of settings, as they stand in the files of the SAEs."""
    name = f"{before}paper-training"
    saes = [sae for sae in sweep.saes if sae.config is not None]
    if not saes:
        return Missing(name, TRAINING, "the SAEs do not say how they were trained")
    runs = [run for row in sweep.rows for run in row.runs]
    rows: list[list[Any]] = [
        ["Base model", sweep.model],
        ["Layer (residual stream after block)", sweep.layer],
        ["Activation dimension", sweep.width],
        ["Context length", _every(sae.metadata.get("context_size") for sae in saes)],
        ["Dataset", _every(sae.metadata.get("text") for sae in saes)],
        ["Training tokens", _every(run["tokens"] for run in runs)],
        ["Dictionary size (m)", _every(run["latents"] for run in runs)],
        ["Mean active latents (k)", _every(run["k"] for run in runs)],
        ["Candidate pool multiplier (l)", _every(row.l for row in sweep.rows)],
        ["Training steps", _every(part(sae.metadata, "training").get("steps") for sae in saes)],
        ["Batch size", _every(part(sae.metadata, "training").get("batch_size") for sae in saes)],
        ["Learning rate", _every(run["lr"] for run in runs)],
        ["Adam's beta 1", _setting(saes, "optimizer", "beta1")],
        ["Adam's beta 2", _setting(saes, "optimizer", "beta2")],
        ["Gradient clipping", _setting(saes, "optimizer", "clip")],
        ["Warm-up steps, a fifth of the run at most", _setting(saes, "optimizer", "warmup_steps")],
        ["Auxiliary loss weight", _setting(saes, "auxk", "alpha")],
        ["Dead after (tokens)", _setting(saes, "auxk", "dead_after")],
        ["Threshold start (step), half of the run at most", _setting(saes, "threshold", "start_step")],
        ["Threshold beta", _setting(saes, "threshold", "beta")],
        ["Groups", _every(row.group for row in sweep.rows)],
        ["Seeds", _every(run["seed"] for run in runs)],
    ]
    note = "As in the settings of the SAEs; several values are those of different SAEs."
    return PaperTable(name, TRAINING, note, [Head("Parameter"), Head("Value", wide=True)], rows)


def _setting(saes: list[Saved], *path: str) -> str | None:
    return _every(part(sae.config, *path[:-1]).get(path[-1]) for sae in saes)


def _every(values: Iterable[Any]) -> str | None:
    """The different values in order; none where none is known."""
    known = list(dict.fromkeys(value for value in values if value is not None))
    if all(isinstance(value, int | float) for value in known):
        known = sorted(known)
    return ", ".join(map(_value, known)) or None


def _value(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:g}"
