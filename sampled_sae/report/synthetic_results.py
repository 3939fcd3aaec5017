"""The synthetic experiment's numbers: read from their file, one row a configuration, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sampled_sae.errors import UserError
from sampled_sae.files import read_json
from sampled_sae.report.rows import Column, Configuration, Key, field, form, number

# One line each: a number, a colon, what it means.
MEANINGS = """
FVE: 1 minus squared error over variance: 1 is perfect, 0 is no better than always answering the mean.
FVE train: FVE on training samples; far above held-out FVE, it tells of samples learned by heart.
FVE held-out: FVE on fresh samples, where each batch chooses its own candidate pool as in training.
FVE by threshold: FVE on fresh samples at inference: one threshold, calibrated on other fresh samples.
L0 by threshold: Active latents a sample under that threshold; neither high nor low is good, it should meet K.
By moving average: FVE and L0 with the threshold that training kept as a moving average; FVEs compare at equal L0 only.
Dead: Share of latents that never fire on the held-out samples, with the SAE's own pools; lower is better.
Ever pooled: Share of latents that were in a candidate pool at least once during training.
LF+HA to HF+LA: Share of the bucket's true features matched one to one with a latent at |cosine| >= 0.7.
All features: The same share, over the features of all buckets.
Fidelity: Correlation of learned and true firing frequency over all matched pairs, the poor matches too.
Seconds: Training time of the whole run, divided by its number of SAEs.
"""


def load_results(path: Path) -> dict[str, Any]:
    """Read a results.json; UserError where it is missing, damaged or without SAEs."""
    results = read_json(path)
    saes = results.get("saes") if isinstance(results, dict) else None
    if not isinstance(saes, list) or not all(isinstance(sae, dict) and "name" in sae for sae in saes):
        raise UserError(f"{path}: not the results of a synthetic experiment")
    if not saes:
        raise UserError(f"{path}: has no SAEs, so there is nothing to show")
    return results


def buckets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The statistics of the buckets of true features."""
    return (results.get("data") or {}).get("buckets") or []


def data_line(results: dict[str, Any]) -> str:
    """The statistics of the data as a whole, in one sentence."""
    data = results.get("data") or {}
    noise = number(data.get("noise_db"))
    return (
        f"Mutual coherence {form(data.get('coherence'), 4)}; L0 a sample: expected {form(data.get('expected_l0'), 2)}, "
        f"observed {form(data.get('observed_l0'), 2)}; "
        + ("no noise." if noise is None else f"noise {form(noise, 0)} dB below the signal.")
    )


def configurations(results: dict[str, Any]) -> list[Configuration]:
    """The runs gathered by configuration, in the order of the file.

    Each run gains `recovered`: the share of all true features that it recovered, over the buckets.
    """
    gathered: dict[tuple[str, str, float | None], list[dict[str, Any]]] = {}
    for run in results["saes"]:
        key = str(run.get("label") or run["name"]), str(run.get("group")), number(run.get("l"))
        gathered.setdefault(key, []).append({**run, "recovered": _recovered(run, buckets(results))})
    return [Configuration(*key, tuple(runs)) for key, runs in gathered.items()]


def ranked(rows: list[Configuration]) -> list[Configuration]:
    """The best FVE by threshold first; where it is missing, the other FVEs decide."""
    keys = ("fve_heldout_threshold", "fve_heldout", "fve_train")
    missing = float("-inf")
    return sorted(rows, key=lambda row: [getattr(row.stat(key), "mean", missing) for key in keys], reverse=True)


def _recovered(run: dict[str, Any], parts: list[dict[str, Any]]) -> float | None:
    counted = [part for part in parts if part.get("features")]  # an empty bucket has no share
    shares = [field(run, ("recovery", part["name"])) for part in counted]
    if not shares or None in shares:
        return None
    found = sum(share * part["features"] for share, part in zip(shares, counted, strict=True) if share)
    return found / sum(part["features"] for part in counted)


def columns(results: dict[str, Any]) -> list[Column]:
    """All numbers of a run, in the order of the tables."""
    names = [str(part["name"]) for part in buckets(results)]
    return [
        Column("FVE train", "fve_train", 3, "high", "FVE\ntrain"),
        Column("FVE held-out", "fve_heldout", 3, "high", "FVE\nheld-out"),
        Column("FVE by threshold", "fve_heldout_threshold", 3, "high", "FVE by\nthresh."),
        Column("L0 by threshold", "l0_threshold", 1, None, "\nL0"),
        Column("FVE by moving average", "fve_heldout_ema", 3),  # no contest: each SAE has its own L0 there
        Column("L0 by moving average", "l0_ema", 1),
        Column("dead", "dead", 2, "low", "\ndead"),
        Column("ever pooled", "ever_pooled", 2),
        *(Column(name, ("recovery", name), 2, "high", name.replace("+", "+\n", 1)) for name in names),
        Column("all features", "recovered", 3, "high"),
        Column("fidelity", "fidelity", 2, "high", "fide-\nlity"),
        Column("seconds", "seconds", 1),
    ]


def summary(results: dict[str, Any], name: Callable[[str], str]) -> str:
    """What was run and what the numbers say, in a few sentences; `name` writes a configuration's label."""
    rows, train = configurations(results), results.get("train") or {}
    runs, seeds = len(results["saes"]), max((len(row.runs) for row in rows), default=0)
    each = f" ({len(rows)} configurations, up to {seeds} seeds each: numbers are means)" if seeds > 1 else ""
    features = sum(part.get("features") or 0 for part in buckets(results))
    steps = f"{form(train.get('steps'), 0)} steps of {form(train.get('batch_size'), 0)} samples"
    return " ".join(
        [
            f"{runs} SAE{'s' * (runs > 1)}{each}, trained for {steps} with {features:,} known features.",
            _leader(rows, "fve_heldout_threshold", "held-out FVE by threshold", name),
            _leader(rows, "recovered", "share of true features recovered", name),
            _memory(rows, name),
        ]
    ).strip()


def _leader(rows: list[Configuration], key: Key, what: str, name: Callable[[str], str]) -> str:
    """Who has the highest `key`, who comes next, and where the best BatchTopK stands."""
    known = [(stat, row) for row in rows if (stat := row.stat(key))]
    if not known:
        return f"No SAE has a {what}."
    # Equal as written is equal: the digits beyond say nothing. Among equals BatchTopK is named first.
    order = sorted(known, key=lambda pair: (-round(pair[0].mean, 3), pair[1].group != "batchtopk", -pair[0].mean))
    top = order[0][0]
    low, high = form(top.low, 3), form(top.high, 3)
    value = form(top.mean, 3) + (f" (seeds {low} to {high})" if low != high else "")
    first = [row for stat, row in order if form(stat.mean, 3) == form(top.mean, 3)]
    if len(first) == len(rows):
        return f"{'All SAEs have the same' if len(rows) > 1 else 'It has a'} {what}, {value}."
    names = _listed([name(row.label) for row in first])
    parts = [f"{names} {'have' if len(first) > 1 else 'has'} the best {what}, {value}"]
    rest = order[len(first) :]
    second = [(stat, row) for stat, row in rest if form(stat.mean, 3) == form(rest[0][0].mean, 3)]
    if second:
        names = _listed([name(row.label) for _, row in second])
        overlap = any(stat.low < stat.high and stat.high >= top.low for stat, _ in second)
        parts.append(
            f"next {'come' if len(second) > 1 else 'comes'} {names} with {form(second[0][0].mean, 3)}"
            + ", some seeds overlapping with the best" * overlap
        )
    if not any(row.group == "batchtopk" for row in [*first, *(row for _, row in second)]):
        base = [f"{name(row.label)} has {form(stat.mean, 3)}" for stat, row in rest if row.group == "batchtopk"]
        parts += base[:1]
    return "; ".join(parts) + "."


def _memory(rows: list[Configuration], name: Callable[[str], str]) -> str:
    """Where training flatters most."""
    gaps = [
        (train - held, f"{name(row.label)} ({form(train, 3)} against {form(held, 3)})")
        for row in rows
        if (train := row.mean("fve_train")) is not None and (held := row.mean("fve_heldout")) is not None
    ]
    gap, where = max(gaps, default=(0.0, ""))
    # A smaller gap may not show in the numbers as written.
    return f"Training FVE lies above held-out FVE most of all for {where}." if gap >= 0.001 else ""


def _listed(names: list[str]) -> str:
    shown = names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
