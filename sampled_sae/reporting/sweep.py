"""The SAEs of one model and hook point: a row per configuration, with metrics over its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sampled_sae.evals.similarity.members import distinct_labels, flat
from sampled_sae.hooks import Where, hook_title, saved_hook
from sampled_sae.method import presets
from sampled_sae.method.config import SAEConfig
from sampled_sae.reporting.collect import Found, Kind, Log, Saved, kinds, part
from sampled_sae.reporting.palette import GROUPS
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.measures import Better, Column, Metric, Stat, Table, find, listed, number, shown
from sampled_sae.utils.paired import leaders

Key = str | tuple[str, str]  # a field of a run, or a field inside a field, as ("recovery", "LF+HA")


@dataclass(frozen=True)
class Configuration:
    """The runs that differ only in their seed."""

    label: str
    group: str
    l: float | None
    runs: tuple[dict[str, Any], ...]

    def stat(self, key: Key) -> Stat | None:
        """Mean, smallest and largest over the runs that have the number; None where none has it."""
        values = [value for run in self.runs if (value := field(run, key)) is not None]
        return Stat(sum(values) / len(values), min(values), max(values)) if values else None

    def by_seed(self, key: Key) -> dict[tuple[Any], float]:
        """The number of each run that has it, by the run's seed."""
        return {(run.get("seed"),): value for run in self.runs if (value := field(run, key)) is not None}

    def mean(self, key: Key) -> float | None:
        """The mean over the runs, or None."""
        stat = self.stat(key)
        return stat.mean if stat else None


def field(record: Any, key: Key) -> float | None:
    """The number under `key`, or None."""
    for name in (key,) if isinstance(key, str) else key:
        record = record.get(name) if isinstance(record, dict) else None
    return number(record)


def winner(rows: Sequence[Configuration], key: Key, better: Better | None) -> list[int]:
    """Index of the row that is clearly better than all others, over seeds; empty if there is none."""
    found = leaders([row.by_seed(key) for row in rows], better)
    return found if len(found) == 1 else []


def group_title(group: str) -> str:
    """A group as the command line names its method; groups that are none are Sampled-SAEs of that score."""
    return group if group in (*presets.PRESETS, OTHER) else f"sampled:score={group}"


def table_of(rows: Sequence[Configuration], columns: Mapping[Key, Column], name: str = "") -> Table:
    """A row per configuration with means and ranges over seeds; a clear winner of a column is bold."""
    lines = [[row.label, *(row.stat(key) for key in columns)] for row in rows]
    bold = {
        (r, c) for c, (key, column) in enumerate(columns.items(), start=1) for r in winner(rows, key, column.better)
    }
    return Table([Column("SAE"), *columns.values()], lines, name, bold=frozenset(bold))


BASE = "batchtopk"  # the group that others are measured against
OTHER = "other"  # the group of SAEs whose settings are not known
ORIGIN = ("text", "context_size", "prepend_bos", "skip_first")
TRAINING = ("steps", "batch_size", "input_norm")
FREE = ("seed", "name")


@dataclass(frozen=True)
class Sweep:
    """All SAEs of one model and hook point. A run of a row is a dictionary with name, seed, lr, values and so on."""

    model: str | None
    layer: Where | None
    width: int | None
    saes: tuple[Saved, ...]
    rows: tuple[Configuration, ...]  # configurations; BatchTopK first, then by group and l
    kinds: tuple[Kind, ...]  # the evaluations, and of each the metrics, that some SAE has
    log: Log  # the lines of each SAE, by its folder
    notes: tuple[str, ...]  # what to know before comparing these SAEs

    @property
    def title(self) -> str:
        """Model and layer, as far as they are known."""
        if self.model is None:
            return "a model without a name" + (f", width {self.width}" if self.width else "")
        return self.model + ("" if self.layer is None else f", {hook_title(self.layer)}")

    @property
    def metrics(self) -> list[Metric]:
        """All metrics that some SAE has."""
        return [metric for kind in self.kinds for metric in kind.metrics]

    def measured(self, kind: Kind) -> list[Configuration]:
        """The rows with at least one of the evaluation's metrics."""
        return [row for row in self.rows if any(row.stat(key_of(metric)) for metric in kind.metrics)]

    def table(self, kind: Kind, rows: Sequence[Configuration] | None = None) -> Table:
        """The numbers of one evaluation, of these rows or of all that have any."""
        columns: dict[Key, Column] = {
            key_of(metric): Column(metric.title, metric.digits, metric.better, name=metric.name, meaning=metric.meaning)
            for metric in kind.metrics
        }
        return table_of(self.measured(kind) if rows is None else rows, columns, kind.name)

    def having(self, *metrics: Metric) -> list[Configuration]:
        """The rows that have all of these numbers."""
        return [row for row in self.rows if all(row.stat(key_of(metric)) is not None for metric in metrics)]

    def metric(self, name: str) -> Metric | None:
        """A number by its name, if some SAE has it."""
        return next((metric for metric in self.metrics if metric.name == name), None)


def key_of(metric: Metric) -> tuple[str, str]:
    """Where a run of a row keeps this number."""
    return ("values", metric.name)


def sweeps(found: Found) -> list[Sweep]:
    """One for each model and hook point, the largest first."""
    groups: dict[tuple[Any, ...], list[Saved]] = {}
    for sae in found.saes:
        origin = (sae.metadata.get("model_name"), hook_of(sae.metadata))
        model, layer = (one if one is None or isinstance(one, str | int) else str(one) for one in origin)
        # Without a model's name only the width distinguishes activations.
        key = (model, layer, None) if model is not None else (None, layer, sae.width)
        groups.setdefault(key, []).append(sae)
    made = [_sweep(model, layer, members) for (model, layer, _), members in groups.items()]
    return sorted(made, key=lambda sweep: -len(sweep.saes))


def hook_of(metadata: dict[str, Any]) -> Where | None:
    """The hook point in an SAE's metadata, as far as it can be read."""
    try:
        return saved_hook(metadata)
    except UserError:
        return None


def _sweep(model: Any, layer: Any, members: list[Saved]) -> Sweep:
    rows, notes = _rows(members)
    log = {
        str(sae.folder): sae.run.log[sae.folder.name] for sae in members if sae.run and sae.folder.name in sae.run.log
    }
    known = {name for row in rows for run in row.runs for name in run["values"]}
    shown_ = [kind._replace(metrics=tuple(m for m in kind.metrics if m.name in known)) for kind in kinds()]
    runs = {sae.run.folder: sae.run for sae in members if sae.run}
    notes += [*_differing_settings(members), *_not_measured(members)]
    notes += [f"{folder}: {run.log_note}" for folder, run in runs.items() if run.log_note]
    return Sweep(
        None if model is None else shown(model),
        layer if isinstance(layer, int | None) else shown(layer),
        next((sae.width for sae in members if sae.width), None),
        tuple(members),
        tuple(rows),
        tuple(kind for kind in shown_ if kind.metrics),
        log,
        tuple(notes),
    )


def _rows(members: list[Saved]) -> tuple[list[Configuration], list[str]]:
    groups: dict[str, list[Saved]] = {}
    settings = {sae.folder: _settings(sae) for sae in members}
    for sae in members:
        sorted_ = sorted(settings[sae.folder].items(), key=lambda item: item[0])
        key = str(sae.folder) if sae.config is None else repr(sorted_)
        groups.setdefault(key, []).append(sae)
    kinds = [_kind(group[0]) for group in groups.values()]
    own = [settings[group[0].folder] for group in groups.values()]
    labels = distinct_labels([label for _, label, _ in kinds], own)
    rows, notes = [], []
    for label, (family, _, l), group in zip(labels, kinds, groups.values(), strict=True):
        rows.append(Configuration(label, family, l, tuple(_run(sae) for sae in group)))
        notes += _twins(group)
    return sorted(rows, key=_order), notes


def _order(row: Configuration) -> tuple[Any, ...]:
    """BatchTopK first, then the known groups, l from small to large."""
    return [*GROUPS, row.group].index(row.group), row.group, row.l or 0.0, row.label


def _settings(sae: Saved) -> dict[str, Any]:
    """All settings that determine the result except the seeds, flat."""
    config = {name: value for name, value in (sae.config or {}).items() if name not in FREE}
    training = part(sae.metadata, "training") or (part(sae.run.record, "config", "train") if sae.run else {})
    origin = {name: sae.metadata.get(name) for name in ORIGIN} if sae.finished else {}
    return flat(config) | origin | {name: training.get(name) for name in TRAINING}


def _kind(sae: Saved) -> tuple[str, str, float | None]:
    """Group, label and multiplier l of a configuration."""
    try:
        config = SAEConfig.from_dict(sae.config or {})
        label = presets.spec(config)
    except (UserError, TypeError):  # no settings, or those of another version
        return OTHER, shown(sae.name), None
    pool, size = part(sae.config, "pool"), part(sae.config, "pool", "size")
    schedule = part(pool, "schedule").get("kind", "constant")
    if config.jumprelu is not None:
        return "jumprelu", shown(label), None
    if config.prefixes is not None:
        return "matryoshka", shown(label), number(size.get("l"))
    if size.get("kind") == "everything":
        method = "topk_then_batchtopk" if config.pool.scope.until < 1 else "topk"
        return BASE if label == BASE else method, shown(label), None
    if schedule != "constant":
        return schedule, shown(label), None
    group = str(pool.get("score")) + (",pick=sample" if pool.get("pick") == "sample" else "")
    group += f",memory={config.pool.memory:g}" if config.pool.memory is not None else ""
    group += f",inference_size={config.pool.inference_size:g}" if config.pool.inference_size is not None else ""
    return shown(group), shown(label), number(size.get("l"))


def _run(sae: Saved) -> dict[str, Any]:
    """The numbers of one SAE."""
    config, training = sae.config or {}, part(sae.metadata, "training")
    steps = number(training.get("steps")), number(training.get("batch_size"))
    found = {
        metric.name: value
        for kind in kinds()
        for metric in kind.metrics
        if kind.name in sae.results and (value := find(metric, sae.results[kind.name]["result"])) is not None
    }
    return {
        "name": str(sae.folder),
        "label": shown(sae.name),
        "seed": config.get("seed"),
        "lr": number(part(config, "optimizer").get("lr")),
        "k": number(config.get("k")),
        "latents": number(sae.latents or config.get("d_sae")),
        "tokens": steps[0] * steps[1] if steps[0] is not None and steps[1] is not None else None,
        "values": {name: value.value for name, value in found.items()},
        "intervals": {name: [v.low, v.high] for name, v in found.items() if v.low is not None and v.high is not None},
        "density": _density(sae),
        "finished": sae.finished,
    }


def _density(sae: Saved) -> dict[str, Any] | None:
    """Share of all latents in each bin of firing density, and the bins' edges as log10; none where nothing fires."""
    density = _density_of(sae)
    counts, edges, dead = (density.get(name) for name in ("histogram", "log10_edges", "dead"))
    if not isinstance(counts, list) or not isinstance(edges, list) or len(edges) != len(counts) + 1:
        return None
    numbers = [number(value) for value in [*counts, *edges, dead]]
    if None in numbers or not any(counts) or min(*counts, dead) < 0:
        return None
    return {"shares": [count / (sum(counts) + (dead or 0)) for count in counts], "edges": edges}


def _density_of(sae: Saved) -> dict[str, Any]:
    """What an evaluation measured of the firing densities; empty where none did."""
    return next(filter(None, (part(content, "result", "density") for content in sae.results.values())), {})


def _twins(group: Sequence[Saved]) -> list[str]:
    """SAEs that differ in nothing, not even in their seeds: their mean is not one over seeds."""
    same: dict[str, list[str]] = {}
    for sae in group:
        if sae.config is not None:
            seeds = (sae.config.get("seed"), part(sae.metadata, "training").get("seed"))
            same.setdefault(repr(seeds), []).append(str(sae.folder))
    return [
        f"{listed(folders)} have the same settings and the same seed: their mean is not one over seeds."
        for folders in same.values()
        if len(folders) > 1
    ]


def _differing_settings(members: Sequence[Saved]) -> list[str]:
    """Evaluations whose settings differ between SAEs."""
    notes = []
    for kind in kinds():
        asked = [content.get("asked") for sae in members if (content := sae.results.get(kind.name))]
        known = [flat(one) for one in asked if isinstance(one, dict)]
        fields = dict.fromkeys(key for one in known for key in one)
        differing = [
            f"{key} = {listed(values)}"
            for key in fields
            if len(values := list(dict.fromkeys(shown(one.get(key)) for one in known))) > 1
        ]
        if differing:
            notes.append(
                f"{kind.title}: settings differ between SAEs ({'; '.join(differing)}); compare only numbers "
                "measured with the same settings."
            )
    return notes


def _not_measured(members: Sequence[Saved]) -> list[str]:
    """Results without a number, SAEs in which no latent fires, and unfinished SAEs."""
    reasons: dict[str, list[str]] = {}
    for sae in members:
        failed = {name: part(content, "result").get("not_evaluable") for name, content in sae.results.items()}
        why = [f"no {name}: {shown(reason)}" for name, reason in failed.items() if reason]
        why += ["no latent fires on the held-out text"] * (_density_of(sae).get("alive") == 0)
        for reason in [*why, *["training is not finished"] * (not sae.finished)]:
            reasons.setdefault(reason, []).append(shown(sae.name))
    return [f"{listed(names)}: {why}." for why, names in reasons.items()]
