"""A study's tables of synthetic experiments: every configuration beside the base, and what was not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sampled_sae.reporting.study import BASE, METRICS, judged
from sampled_sae.reporting.sweep import Configuration
from sampled_sae.reporting.synthetic import buckets, configurations
from sampled_sae.utils.measures import Cell, Column, Table

MEANS = {
    "fve_train": Column("FVE, training samples", 4),
    "fve_heldout": Column("FVE, fresh samples", 4),
    "fve_heldout_threshold": Column("FVE, threshold", 4),
}


def synthetic_table(found: dict[str, Any], not_run: Sequence[str] = ()) -> Table:
    """A row per configuration of a synthetic experiment, mean over seeds; `not_run`: labels without results."""
    names = [str(part["name"]) for part in buckets(found)]
    columns = [Column("SAE"), Column("seeds"), *MEANS.values()]
    columns += [Column("difference", 4), Column("MDD", 4), Column("verdict"), Column("not firing", 2), Column("MCC", 3)]
    columns += [Column(name, 2) for name in names]
    every = configurations(found)
    base = next((one for one in every if one.label == BASE), None)
    rows: list[list[Cell]] = []
    for one in every:
        recovered = [one.mean(("recovery", name)) for name in names]
        after = [*_against(one, base), one.mean("dead"), one.mean("mcc"), *recovered]
        rows.append([one.label, len(one.runs), *map(one.mean, MEANS), *after])
    note = (
        "Training and fresh samples: with the training-time selection. Threshold: fresh samples at the inference "
        f"threshold. Difference: of the FVE at the threshold, paired with {BASE} over seeds; positive is better. "
        "Buckets: share of the features recovered."
    )
    if not_run:
        note += f" Unfinished: not run of this preset are {', '.join(not_run)}."
    return Table(columns, rows, note=note)


def _against(one: Configuration, base: Configuration | None) -> list[Cell]:
    """Paired difference from the base, its minimum detectable difference and the verdict."""
    if base is None or one is base:
        return [None, None, "-"]
    # The margin belongs to the FVU: a share of the base's.
    own, other = ({seed: 1 - fve for seed, fve in it.by_seed("fve_heldout_threshold").items()} for it in (one, base))
    found = judged(own, other, METRICS["fvu"])
    return [None, None, "-"] if found is None else [found[0].mean, found[0].detectable, found[1]]
