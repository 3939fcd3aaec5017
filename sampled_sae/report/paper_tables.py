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
from collections.abc import Sequence
from typing import Any

from sampled_sae.report.collect import Found
from sampled_sae.report.paper_tables_compare import compared, nothing_compared
from sampled_sae.report.paper_tables_format import Head, Missing, PaperTable
from sampled_sae.report.paper_tables_sweep import nothing_swept, swept
from sampled_sae.report.rows import form
from sampled_sae.report.sweep import Sweep
from sampled_sae.report.synthetic_results import buckets, columns, configurations, data_line

DATA = "Synthetic dataset summary"
RECOVERY = "True features recovered"


def paper_tables(found: Found, made: Sequence[Sweep], before: Sequence[str]) -> list[PaperTable | Missing]:
    """All tables of the paper; `before` is what the names of each sweep's tables begin with."""
    tables: list[PaperTable | Missing] = []
    for number, (folder, results) in enumerate(found.synthetic):
        tables += _synthetic(results, _after(folder.name, number))
    if not found.synthetic:
        why = "no results of the synthetic experiment were found; run sampled-sae synthetic"
        tables += [Missing("paper-synthetic", DATA, why), Missing("paper-synthetic-recovery", RECOVERY, why)]
    for sweep, prefix in zip(made, before, strict=True):
        tables += swept(sweep, prefix)
    tables += [] if made else nothing_swept()
    for number, (folder, content) in enumerate(found.comparisons):
        tables += compared(content, _after(folder.name, number))
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
