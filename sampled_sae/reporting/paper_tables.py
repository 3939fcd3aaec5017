"""The paper's tables with our numbers, where the results are there; the others are reported as missing.

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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sampled_sae.reporting.collect import Found, Saved, dicts, part
from sampled_sae.reporting.comparison import OLD_UNIQUE, UNIQUE_COLUMNS, Content, feature_table, latents_of, note_of
from sampled_sae.reporting.sweep import BASE, Configuration, Sweep, winner
from sampled_sae.reporting.synthetic import columns, configurations, data_line, data_table
from sampled_sae.reporting.tables import Missing
from sampled_sae.utils.measures import Column, Table, number
from sampled_sae.utils.paired import leaders

SCORES = ("entropy", "squared_l2", "l2", "uniform")  # the paper's four, in the order of its tables
TITLES = {
    "batchtopk": "BatchTopK",
    "topk": "TopK",
    "l2": "L2-norm",
    "squared_l2": "Squared-l",
    "entropy": "Entropy",
    "uniform": "Uniform",
}
ROWS = 5  # features in a table of unique ones


def kind_of(label: str) -> tuple[str, float | None]:
    """Score and l of a Sampled-SAE's label as `presets.spec` makes it; for others the first word.

    Early comparisons have labels as in the names of SAEs, `l2-l5`.
    """
    word = label.split(" ", 1)[0]
    found = re.fullmatch(r"(?:sampled:score=)?([\w.]+)(?:-l|,l=)([\d.]+(?:e[+-]?\d+)?)", word)
    return (found[1], float(found[2])) if found else (word, None)


def title_of(label: str) -> str:
    """A configuration in the paper's words."""
    score, l = kind_of(label)
    rest = ([] if l is None else [f"l = {l:g}"]) + label.split(" ", 1)[1:]
    return TITLES.get(score, score) + (f" ({', '.join(rest)})" if rest else "")


DATA = "Synthetic dataset summary"
RECOVERY = "True features recovered"


def paper_tables(found: Found, made: Sequence[Sweep], before: Sequence[str]) -> list[Table | Missing]:
    """All tables of the paper; `before` is what the names of each sweep's tables begin with."""
    empty = Sweep(None, None, None, (), (), (), {}, ())
    synthetic = [_synthetic(results, _after(folder, i)) for i, (folder, results) in enumerate(found.synthetic)]
    swept_ = [swept(sweep, prefix) for sweep, prefix in zip(made, before, strict=True)]
    comparisons = [compared(content, _after(folder, i)) for i, (folder, content) in enumerate(found.comparisons)]
    parts = [
        *(synthetic or [_without(_synthetic({"saes": []}, ""), "result of the synthetic experiment", "synthetic")]),
        *(swept_ or [_without(swept(empty), "SAE", "train")]),
        *(comparisons or [_without(compared({}, ""), "compare.json", "compare")]),
    ]
    return [table for tables in parts for table in tables]


def _without(tables: Sequence[Table | Missing], what: str, command: str) -> list[Table | Missing]:
    """The tables as missing, because there is nothing to make them of."""
    why = f"no {what} was found; run sampled-sae {command}"
    return [Missing(table.name, table.title, why) for table in tables]


def _after(folder: Path, number: int) -> str:
    """Nothing for the first of several; for the others a number and the folder's name."""
    return "" if number == 0 else f"-{number + 1}-{re.sub(r'[^a-z0-9.]+', '-', folder.name.lower()).strip('-.')}"


def _synthetic(results: dict[str, Any], after: str) -> list[Table | Missing]:
    data = data_table(results)._replace(name=f"paper-synthetic{after}", title=DATA, note=data_line(results))
    found = configurations(results)
    shown = {key: column for key, column in columns(results).items() if column.brief or key == "recovered"}
    means = [[row.label, *map(row.mean, shown)] for row in found]
    named = [Column("SAE"), *(column._replace(better=None) for column in shown.values())]
    note = (
        "A true feature is recovered if it is matched one to one with a latent at |cosine| >= 0.7; fidelity is the "
        "correlation of learned and true firing frequency over matched pairs."
    ) + _over_seeds(found)
    return [data, Table(named, means, f"paper-synthetic-recovery{after}", RECOVERY, note)]


def _over_seeds(rows: Sequence[Configuration]) -> str:
    seeds = max((len(row.runs) for row in rows), default=0)
    return f" Means over up to {seeds} seeds." if seeds > 1 else ""


TOP = 10  # features in a table of the best explained ones
PROBING = "Probing accuracy by number of latents"
TRAINING = "Settings of training"


def swept(sweep: Sweep, before: str = "") -> list[Table | Missing]:
    """The tables of one model and layer; `before` begins their names."""
    groups = [BASE, *SCORES, *dict.fromkeys(row.group for row in sweep.rows if row.group not in (BASE, *SCORES))]
    tops = [_top(sweep, group, before) for group in groups]
    return [_probing(sweep, before), *tops, _training(sweep, before)]


def _probing(sweep: Sweep, before: str) -> Table | Missing:
    """For each k one row per score, with the l of the highest accuracy over all k."""
    name = f"{before}paper-probing"
    ks = [k for k in (1, 2, 5, 10) if sweep.metric(f"probing_{k}") is not None]
    chosen = _best_l(sweep, ks)
    if not ks or not chosen:
        return Missing(name, PROBING, "no SAE has probing results; run sampled-sae eval --evals probing")
    rows: list[list[Any]] = []
    bold: set[tuple[int, int]] = set()
    for k in ks:
        values = [row.mean(("values", f"probing_{k}")) for row in chosen]
        bold |= {(len(rows) + index, 3) for index in winner(chosen, ("values", f"probing_{k}"), "high")}
        labels = [[k, title_of(row.label), row.mean(("values", "fvu"))] for row in chosen]
        rows += [[*label, value] for label, value in zip(labels, values, strict=True)]
    rules = range(0, len(rows), len(chosen))
    heads = [Column("k"), Column("Architecture (with l)"), Column("FVU", 3), Column("SAE accuracy", 4)]
    note = (
        f"Test accuracy of a probe on k latents, mean over classes, then datasets ({', '.join(_datasets(sweep))}). "
        "For each score the l with the highest mean over all k is shown; it is chosen on the same texts, so its "
        "accuracy is slightly optimistic."
    ) + _over_seeds(chosen)
    return Table(heads, rows, name, PROBING, note, frozenset(bold), frozenset(rules))


def _best_l(sweep: Sweep, ks: list[int]) -> list[Configuration]:
    """One row of each group: the one of the highest mean accuracy; BatchTopK last, as in the paper."""
    found: dict[str, list[tuple[float, Configuration]]] = {}
    for row in sweep.rows:
        values = [value for k in ks if (value := row.mean(("values", f"probing_{k}"))) is not None]
        if len(values) == len(ks) and values:
            found.setdefault(row.group, []).append((statistics.fmean(values), row))
    order = sorted(found, key=lambda group: group == BASE)
    return [max(found[group], key=lambda item: item[0])[1] for group in order]


def _datasets(sweep: Sweep) -> list[str]:
    results = [part(sae.results, "probing", "result") for sae in sweep.saes]
    names = [str(item.get("name")) for result in results for item in dicts(result, "datasets")]
    return list(dict.fromkeys(names)) or ["not named"]


def _top(sweep: Sweep, group: str, before: str) -> Table | Missing:
    """The latents of the best scores in autointerp; of the largest pool, the lowest seed."""
    name = f"{before}paper-top-{group.replace(' ', '-')}"
    title = f"Top {TOP} features of {TITLES.get(group, group)}"
    saes = {str(sae.folder): sae for sae in sweep.saes}
    found = [
        (row, run, latents)
        for row in sweep.rows
        for run in row.runs
        if row.group == group and (latents := _explained(saes[run["name"]]))
    ]
    if not found:
        there = any(row.group == group for row in sweep.rows)
        return Missing(name, title, "run sampled-sae eval --evals autointerp" if there else "no such SAE was trained")
    row, run, latents = min(found, key=lambda one: (-(one[0].l or 0.0), one[0].label, _whole(one[1]["seed"])))
    rows = [[rank, score, latent, text, row.l] for rank, (score, latent, text) in enumerate(latents[:TOP], start=1)]
    heads = [Column("Rank"), Column("Score", 3), Column("Latent"), Column("Explanation", wide=True), Column("l")]
    mean = run["values"].get("autointerp")
    result = part(saes[run["name"]].results, "autointerp", "result")
    note = (
        f"{title_of(row.label)}, seed {run['seed']}; mean score of {result.get('chosen')} latents "
        + ("not known" if mean is None else f"{mean:.3f}")
        + f". Explained by {result.get('explainer')}, judged by {result.get('judge')}; the score is the share of 14 "
        "windows classified correctly, ties are broken by the other scores."
    )
    return Table(heads, rows, name, title, note)


def _whole(seed: Any) -> int:
    return seed if isinstance(seed, int) else 0


def _explained(sae: Saved) -> list[tuple[float, int, str]]:
    """Score, number and explanation of the latents that have them, best first."""
    found = []
    for item in dicts(part(sae.results, "autointerp", "result"), "latents"):
        latent, text = item.get("latent"), item.get("explanation")
        values = [number(part(item, "scores").get(kind)) for kind in ("detection", "balanced", "fuzzing")]
        if values[0] is not None and isinstance(latent, int) and isinstance(text, str):
            found.append(([-(value or 0.0) for value in values], latent, text, values[0]))
    return [(score, latent, text) for _, latent, text, score in sorted(found)]


def _training(sweep: Sweep, before: str) -> Table | Missing:
    """The paper's table of settings, from the files of the SAEs."""
    name = f"{before}paper-training"
    saes = [sae for sae in sweep.saes if sae.config is not None]
    if not saes:
        return Missing(name, TRAINING, "the settings of the SAEs are not saved")
    runs = [run for row in sweep.rows for run in row.runs]
    rows: list[list[Any]] = [
        ["Base model", sweep.model],
        ["Layer (residual stream after block)" if isinstance(sweep.layer, int) else "Hook point", sweep.layer],
        ["Activation dimension", sweep.width],
        ["Context length", _every(sae.metadata.get("context_size") for sae in saes)],
        ["Dataset", _every(sae.metadata.get("text") for sae in saes)],
        ["Training tokens", _every(run["tokens"] for run in runs)],
        ["Dictionary size (m)", _every(run["latents"] for run in runs)],
        ["Mean active latents (k)", _every(run["k"] for run in runs)],
        ["Candidate pool multiplier (l)", _every(row.l for row in sweep.rows)],
        ["Training steps", _every(part(sae.metadata, "training").get("steps") for sae in saes)],
        ["Batch size", _every(part(sae.metadata, "training").get("batch_size") for sae in saes)],
        ["Input norm", _every(part(sae.metadata, "training").get("input_norm") for sae in saes)],
        ["Learning rate", _every(run["lr"] for run in runs)],
        ["Adam's beta 1", _setting(saes, "optimizer", "beta1")],
        ["Adam's beta 2", _setting(saes, "optimizer", "beta2")],
        ["Gradient", _setting(saes, "optimizer", "gradient")],
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
    return Table([Column("Parameter"), Column("Value", wide=True)], rows, name, TRAINING, note)


def _setting(saes: list[Saved], *path: str) -> str | None:
    return _every(part(sae.config, *path[:-1]).get(path[-1]) for sae in saes)


def _every(values: Iterable[Any]) -> str | None:
    """The different values in order; none where none is known."""
    known: list[Any] = list(dict.fromkeys(value for value in values if isinstance(value, str | int | float)))
    if all(isinstance(value, int | float) for value in known):
        known = sorted(known)
    return ", ".join(map(_value, known)) or None


def _value(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:g}"


# ---- comparisons -----------------------------------------------------------------------------------------


def compared(content: Content, after: str) -> list[Table | Missing]:
    """The tables of one compare.json; `after` is added to their names."""
    return [_seeds(content, after), _scores(content, after), *(_unique(content, score, after) for score in SCORES)]


SEEDS = "MMCS across seeds"
ACROSS = "MMCS of BatchTopK's features with those of each other SAE"
COUNTED = {"live": "Live latents of both SAEs.", "all": "All latents, dead ones included."}


def _seeds(content: Content, after: str) -> Table | Missing:
    """One row for each configuration of several seeds: the first seed against the others."""
    name = f"paper-mmcs{after}"
    rows, measured, latents = [], [], latents_of(content)
    for agreement in dicts(content, "seeds"):
        label = str(agreement.get("group"))
        values, base = _from_base(content, label)
        if values:
            deviation = statistics.stdev(values) if len(values) > 1 else None
            chance = number(agreement.get("live_random" if latents == "live" else "random"))
            rows.append([title_of(label), statistics.fmean(values), deviation, len(values), base, chance])
            measured.append({(index,): value for index, value in enumerate(values)})
    if not rows:
        return Missing(name, SEEDS, "no configuration was compared in two seeds; train with --seeds 0 1 2")
    digits = {"Sampling method": None, "MMCS": 3, "std": 3, "n": None, "base seed": None, "chance": 3}
    heads = [Column(title, count) for title, count in digits.items()]
    note = (
        "Mean over the base seed's latents of the largest cosine with any latent of another seed, mean over the n "
        f"other seeds. Chance is the MMCS of as many random directions. {COUNTED[latents]}"
    )
    best = leaders(measured, "high")
    return Table(heads, rows, name, SEEDS, note, frozenset((index, 1) for index in best if len(best) == 1))


def _from_base(content: Content, label: str) -> tuple[list[float], Any]:
    """MMCS from the lowest seed of a configuration to each other one, and which seed that is."""
    seeds = {str(sae.get("name")): sae.get("seed") for sae in dicts(content, "saes") if sae.get("group") == label}
    known = {name: seed for name, seed in seeds.items() if isinstance(seed, int)}
    if not known:
        return [], None
    base = min(known, key=lambda name: (known[name], name))
    found = []
    for pair in dicts(content, "pairs"):
        if pair.get("kind") == "seeds" and pair.get("group_a") == label and base in (pair.get("a"), pair.get("b")):
            way = "a_to_b" if pair.get("a") == base else "b_to_a"
            found.append(number(part(pair, latents_of(content), way).get("mmcs")))
    return [value for value in found if value is not None], known[base]


def _scores(content: Content, after: str) -> Table | Missing:
    """BatchTopK against every other configuration, over the compared pairs of seeds."""
    name, seeds = f"paper-mmcs-scores{after}", {str(s.get("name")): s.get("seed") for s in dicts(content, "saes")}
    found: dict[str, list[float]] = {}
    same, latents = True, latents_of(content)
    for pair in dicts(content, "pairs"):
        for here, other, way in (("a", "b", "a_to_b"), ("b", "a", "b_to_a")):
            if pair.get("kind") == "scores" and kind_of(str(pair.get(f"group_{here}")))[0] == BASE:
                value = number(part(pair, latents, way).get("mmcs"))
                if value is not None:
                    found.setdefault(str(pair.get(f"group_{other}")), []).append(value)
                    same = same and seeds.get(str(pair.get("a"))) == seeds.get(str(pair.get("b")))
    if not found:
        return Missing(name, ACROSS, "BatchTopK was not compared with another configuration")
    rows: list[list[Any]] = [[title_of(label), statistics.fmean(of), len(of)] for label, of in found.items()]
    note = f"From BatchTopK's latents to the other SAE's, mean over n pairs. {COUNTED[latents]}"
    if same:
        note += " Both SAEs of a pair have the same seed and start values, which keeps them similar."
    return Table([Column("SAE"), Column("MMCS", 3), Column("n")], rows, name, ACROSS, note)


def _unique(content: Content, score: str, after: str) -> Table | Missing:
    """The features of one score that have the weakest match in BatchTopK; of its largest pool, the lowest seed."""
    name = f"paper-unique-{score}{after}"
    title = f"{TITLES[score]} latents that BatchTopK lacks, with their best explained BatchTopK matches"
    found = sorted(_against_base(content, score), key=lambda item: (-item[0], item[1]))
    if not found:
        why = "no SAE of this score was compared with BatchTopK, both with explanations of autointerp"
        return Missing(name, title, why)
    l, seed, item = found[0]
    left_out = note_of(content, item, "BatchTopK")
    if left_out is None:
        return Missing(name, title, OLD_UNIQUE)
    columns = {key: c._replace(title=c.title.capitalize()) for key, c in UNIQUE_COLUMNS.items() if key != "score"}
    columns["latent"] = Column(f"{TITLES[score]} latent")
    note = (
        f"l = {l:g}, seed {seed}. Overall is the mean of the cosines of decoder rows and of embedded explanations. "
        f"Matches are among explained latents, {item['latents']} here and {item.get('others')} of BatchTopK; nearest "
        "of all is the largest decoder cosine with any latent of BatchTopK, explained or not. " + left_out
    )
    return feature_table(dicts(item, "table")[:ROWS], columns, title, note)._replace(name=name)


def _against_base(content: Content, score: str) -> Iterator[tuple[float, int, Content]]:
    """Tables of unique features of this score against BatchTopK, with l and seed."""
    saes = {str(sae.get("name")): sae for sae in dicts(content, "saes")}
    for pair in dicts(content, "pairs"):
        for item in dicts(pair, "unique"):
            of, against = saes.get(str(item.get("of")), {}), saes.get(str(item.get("against")), {})
            group, l = kind_of(str(of.get("group")))
            base = kind_of(str(against.get("group")))[0] == BASE
            if group == score and l is not None and base and (dicts(item, "table") or item.get("equals")):
                yield l, _whole(of.get("seed")), item
