"""The overview of a sweep: what was trained, what was measured, and who is best at what."""

from __future__ import annotations

from collections.abc import Iterable

from sampled_sae.report import page_parts as parts
from sampled_sae.report.metrics import EVALUATIONS, Metric
from sampled_sae.report.rows import Configuration, form
from sampled_sae.report.sweep import BASE, Sweep, key_of
from sampled_sae.report.text import in_html, listed


def overview_part(sweep: Sweep) -> str:
    """Facts, coverage and best values."""
    facts = "".join(f"<div><dt>{in_html(name)}</dt><dd>{in_html(value)}</dd></div>" for name, value in _facts(sweep))
    return f"<dl class='facts'>{facts}</dl>{_best(sweep)}{_coverage(sweep)}"


def _facts(sweep: Sweep) -> Iterable[tuple[str, str]]:
    seeds = sorted({len(row.runs) for row in sweep.rows})
    each = f" ({len(sweep.rows)} settings, {listed([str(count) for count in seeds])} seeds)" if seeds[-1:] > [1] else ""
    yield "Model", sweep.model or "not named"
    if sweep.layer is not None:
        yield "Layer", str(sweep.layer)
    yield "SAEs", f"{len(sweep.saes)}{each}"
    runs = [run for row in sweep.rows for run in row.runs]
    for title, name in (("Tokens", "tokens"), ("Latents", "latents"), ("K", "k"), ("Learning rate", "lr")):
        values = sorted({run[name] for run in runs if run[name] is not None})
        if values:
            yield title, listed([_count(value) for value in values], most=6)
    texts = [str(text) for sae in sweep.saes if (text := sae.metadata.get("text"))]
    if texts:
        yield "Text", listed(list(dict.fromkeys(texts)))


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 and float(value).is_integer() else f"{value:g}"


def _best(sweep: Sweep) -> str:
    """The best configuration by each headline number, with BatchTopK's beside it."""
    lines = [line for metric in sweep.metrics if metric.headline and metric.better and (line := _winner(sweep, metric))]
    if not lines or len(sweep.rows) < 2:
        return ""
    heads = ["Best by", "SAE", "value", "BatchTopK"]
    return f"<h3 class='apart'>The best</h3>{parts.table(heads, lines, 'data words', 'The best')}"


def _winner(sweep: Sweep, metric: Metric) -> str | None:
    rows = sweep.having(metric)
    if not rows:
        return None
    sign = 1 if metric.better == "low" else -1

    def value(row: Configuration) -> float:
        return sign * round(row.mean(key_of(metric)) or 0.0, metric.digits)

    top = min(map(value, rows))
    names = [row.label for row in rows if value(row) == top]
    base = next((row.mean(key_of(metric)) for row in rows if row.group == BASE), None)
    who = "all the same" if len(names) == len(rows) else listed(names)
    side = "lowest" if metric.better == "low" else "highest"
    return (
        f"<th scope='row'>{in_html(metric.title)}<small>{side}</small></th><td>{in_html(who)}</td>"
        f"<td>{form(sign * top, metric.digits)}</td><td>{form(base, metric.digits)}</td>"
    )


def _coverage(sweep: Sweep) -> str:
    """How many SAEs have each evaluation; those without are named."""
    lines = []
    for name, title in EVALUATIONS.items():
        missing = [sae.name for sae in sweep.saes if name not in sae.results]
        have = len(sweep.saes) - len(missing)
        lacking = "-" if not missing else "all" if not have else listed(missing, most=6)
        lines.append(
            f"<th scope='row'>{in_html(title)}</th><td>{have} of {len(sweep.saes)}</td><td>{in_html(lacking)}</td>"
        )
    heads = ["Measured", "SAEs", "missing"]
    return f"<h3 class='apart'>What was measured</h3>{parts.table(heads, lines, 'data words', 'What was measured')}"
