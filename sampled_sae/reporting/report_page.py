"""The page of a sweep: summary, any two metrics, panels, densities, training curves, tables and settings.

Also the front page of a reproduction: state of the stages, links to the results, and the paper's tables.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sampled_sae.config import read_file
from sampled_sae.evals import registry
from sampled_sae.reporting import figures, panels
from sampled_sae.reporting.collect import TRAINING, Found, Saved, kinds
from sampled_sae.reporting.comparison import compare_part
from sampled_sae.reporting.figures import PAIRS, REFERENCE, Styles, about, axis_title, marker, styles, value_text
from sampled_sae.reporting.pages import Figure, Finding, Mark, bold, finding, in_words, render, several, training
from sampled_sae.reporting.palette import MUTED, PALE
from sampled_sae.reporting.sweep import BASE, Configuration, Sweep, group_title, key_of
from sampled_sae.reporting.tables import Missing
from sampled_sae.utils.files import write_text
from sampled_sae.utils.measures import Metric, Table, form, listed
from sampled_sae.utils.progress import clock

FIRST_PANELS = ("probing_5", "over_10_percent")  # metrics whose panels are shown first, if there are any: the paper's


def page(found: Found, made: Sequence[Sweep], out: Path | None = None) -> str:
    """The whole page as text; `out` is the folder that it will lie in, from where it links to the SAEs' own pages."""
    title = f"Sweep: {made[0].title}" if len(made) == 1 else "Sweeps" if made else "Comparison"
    models = f" of {listed([bold(sweep.title) for sweep in made], most=6)}" if made else ""
    sizes = {"SAE": len(found.saes), "training run": len(found.runs), "comparison": len(found.comparisons)}
    counts = [f"{n} {what}{'s' * (n != 1)}" for what, n in sizes.items() if n or what == "SAE"]
    counts[0] += models
    return render(
        "report.html",
        title=title,
        summary="; ".join(counts) + ".",
        found=found,
        sweeps=[_part(sweep, f"s{i}-", _links(found, out)) for i, sweep in enumerate(made)],
        comparisons=[compare_part(folder, content, i) for i, (folder, content) in enumerate(found.comparisons)],
    )


def _links(found: Found, out: Path | None) -> dict[Path, str]:
    """Addresses of the feature browsers of SAEs, by the SAE's folder, relative to the report's."""
    if out is None:
        return {}
    return {sae: quote(os.path.relpath(page, out.resolve())) for sae, page in found.browsers.items()}


def _part(sweep: Sweep, prefix: str, links: dict[Path, str]) -> dict[str, Any]:
    """What the template shows of one sweep; ids begin with `prefix`."""
    look, rows = styles(sweep.rows), sweep.rows
    findings = [*_findings(sweep)]
    reference = sweep.metric(REFERENCE)
    against = [] if reference is None else [*_against(sweep, reference, look, prefix)]
    names = [metric.name for metric, _ in against]
    missing = "The curves are missing: these SAEs came without the log of their run."
    shades = [Mark("━", f"l = {l:g}", color) for l, color in panels.shades(rows).items()]
    runs = {sae.run.folder: sae.run for sae in sweep.saes if sae.run}
    return {
        "sweep": sweep,
        "prefix": prefix,
        "several": several(rows),
        "base": BASE in look,
        "groups": [Mark(its.glyph, group_title(group), its.color) for group, its in look.items()],
        "facts": [*_facts(sweep)],
        "words": in_words([one for _, one in findings], bold),
        "findings": [*_results(findings)],
        "browsers": [(sae.name, links[sae.folder]) for sae in sweep.saes if sae.folder in links],
        "coverage": [*_coverage(sweep)],
        "explorer": _explorer(sweep, look),
        "reference": reference.title if reference else REFERENCE.upper(),
        "against": against,
        "first": next((name for name in (*FIRST_PANELS, *names) if name in names), ""),
        "densities": _figures(panels.densities(sweep, look), f"{prefix}density"),
        "shades": [*shades, *([Mark("┅", BASE, look[BASE].color)] if BASE in look else [])],
        "silent": listed([row.label for row in rows if row.mean(("values", "alive")) == 0] or [""]),
        "training": training(rows, look, sweep.log, "", prefix, missing),
        "each": _singly(sweep),
        "runs": [(folder.name, _without_saes(run.record)) for folder, run in runs.items()],
        "saes": [(sae.name, _known(sae), links.get(sae.folder)) for sae in sweep.saes],
    }


# ---- overview ------------------------------------------------------------------------------------------


def _facts(sweep: Sweep) -> Iterator[tuple[str, str]]:
    seeds = sorted({len(row.runs) for row in sweep.rows})
    each = f" ({len(sweep.rows)} settings, {listed([str(count) for count in seeds])} seeds)" if seeds[-1:] > [1] else ""
    yield "Model", sweep.model or "not named"
    if sweep.layer is not None:
        yield "Layer" if isinstance(sweep.layer, int) else "Hook point", str(sweep.layer)
    yield "SAEs", f"{len(sweep.saes)}{each}"
    runs = [run for row in sweep.rows for run in row.runs]
    for title, name in (("Tokens", "tokens"), ("Latents", "latents"), ("K", "k"), ("Learning rate", "lr")):
        values = sorted({run[name] for run in runs if run[name] is not None})
        if values:
            written = [f"{v:,.0f}" if v >= 1 and float(v).is_integer() else f"{v:g}" for v in values]
            yield title, listed(written, most=6)
    texts = [str(text) for sae in sweep.saes if (text := sae.metadata.get("text"))]
    if texts:
        yield "Text", listed(list(dict.fromkeys(texts)))


def _findings(sweep: Sweep) -> Iterator[tuple[Metric, Finding]]:
    """Of each headline metric with a better end; without any evaluation, of training's FVU on held-out tokens."""
    evaluated = [metric for metric in sweep.metrics if metric.headline and metric.better]
    for metric in evaluated or [metric for metric in sweep.metrics if metric.name == "heldout_fvu"]:
        assert metric.better is not None
        found = finding(sweep.rows, key_of(metric), metric.title, metric.better, metric.digits, metric.null)
        if found:
            yield metric, found


def _results(findings: Iterable[tuple[Metric, Finding]]) -> Iterator[tuple[Metric, list[str]]]:
    """Each metric with the cells of its row: verdict, best mean, its spread, n, null level, BatchTopK."""
    for metric, found in findings:
        row, stat = found.rows[0], found.stats[0]
        ends: Sequence[float] = stat[1:]
        if found.counts[0] == 1:
            ends = row.runs[0]["intervals"].get(metric.name, ())
        spread = " to ".join(form(end, metric.digits) for end in ends) or "-"
        null = "-" if metric.null is None else form(metric.null, metric.digits)
        base = next((found.value(i) for i, other in enumerate(found.rows) if other.group == BASE), "-")
        best = form(stat.mean, metric.digits)
        yield metric, [found.verdict(), best, spread, found.seeds.removeprefix("n = "), null, base]


def _coverage(sweep: Sweep) -> Iterator[tuple[str, int, str]]:
    """How many SAEs have each evaluation, and which have not."""
    for kind in kinds():
        missing = [sae.name for sae in sweep.saes if kind.name not in sae.results]
        have = len(sweep.saes) - len(missing)
        yield kind.title, have, "-" if not missing else "all" if not have else listed(missing, most=6)


# ---- figures -------------------------------------------------------------------------------------------


def _explorer(sweep: Sweep, look: Styles) -> dict[str, Any] | None:
    """Any two metrics against each other; None where there are not two."""
    metrics = {metric.name: metric for metric in sweep.metrics if sweep.having(metric)}
    if len(metrics) < 2:
        return None
    # Of the pairs that most SAEs have: the paper's first, then the headline metrics against the reference.
    wanted = [(x, y) for y, x in PAIRS] + [(REFERENCE, m.name) for m in metrics.values() if m.headline and m.better]
    there = [(x, y) for x, y in wanted if x != y and x in metrics and y in metrics]
    first, second, *_ = metrics
    x, y = max(there or [(first, second)], key=lambda pair: len(sweep.having(*(metrics[name] for name in pair))))
    groups = [kind._replace(metrics=tuple(m for m in kind.metrics if m.name in metrics)) for kind in sweep.kinds]
    figure = figures.base_figure(460, {"nticks": 8}, {"nticks": 8}, {"r": 16}).update_layout(dragmode="zoom")
    each = _singly(sweep) if len(sweep.saes) > len(sweep.rows) else []
    content = {  # what the page's script draws
        "layout": figure.layout.to_plotly_json(),
        "front": MUTED,
        "bars": PALE,
        "metrics": {
            name: {"title": m.title, "axis": axis_title(m.axis), "better": m.better, "meaning": m.meaning}
            for name, m in metrics.items()
        },
        # The base is drawn last, on top.
        "groups": [
            {"name": group, "title": group_title(group), "marker": marker(its, group)}
            for group, its in sorted(look.items(), key=lambda item: item[0] == BASE)
        ],
        "rows": [_point(row, metrics.values()) for row in sweep.rows],
        "saes": [_point(row, metrics.values()) for row in each],
    }
    return {"kinds": [kind for kind in groups if kind.metrics], "x": x, "y": y, "content": content}


def _singly(sweep: Sweep) -> list[Configuration]:
    """Each SAE as a row of its own."""
    return [Configuration(str(run["label"]), row.group, row.l, (run,)) for row in sweep.rows for run in row.runs]


def _point(row: Configuration, metrics: Iterable[Metric]) -> dict[str, Any]:
    known = [(metric, stat) for metric in metrics if (stat := row.stat(key_of(metric)))]
    return {
        "label": row.label,
        "group": row.group,
        "about": about(row),
        "values": {metric.name: list(stat) for metric, stat in known},
        "texts": {metric.name: value_text(row, metric) for metric, _ in known},
    }


def _against(sweep: Sweep, x: Metric, look: Styles, prefix: str) -> Iterator[tuple[Metric, list[Figure]]]:
    """Panels of each metric of an evaluation against `x`."""
    for kind in sweep.kinds:
        for metric in kind.metrics if kind.name != TRAINING else ():
            if metric is not x and sweep.having(x, metric):
                yield metric, _figures(panels.against(sweep, x, metric, look), prefix + metric.name)


def _figures(drawn: Sequence[panels.Panel], name: str) -> list[Figure]:
    return [Figure(f"{name}-{i}", figure, title) for i, (title, figure) in enumerate(panels.singles(drawn))]


# ---- settings ------------------------------------------------------------------------------------------


def _without_saes(record: dict[str, Any]) -> dict[str, Any]:
    config = record.get("config")
    kept = {name: value for name, value in config.items() if name != "saes"} if isinstance(config, dict) else config
    return {**record, "config": kept}


def _known(sae: Saved) -> dict[str, object]:
    asked = {name: content["asked"] for name, content in sae.results.items() if "asked" in content}
    return {"folder": str(sae.folder), "config": sae.config, "metadata": sae.metadata, "evaluations": asked}


# ---- the front page of a reproduction --------------------------------------------------------------------

PAGES = {"SAE sweep": "report/index.html", "synthetic experiment": "synthetic/index.html"}


def write_front(out: Path, paper_tables: Sequence[Table | Missing]) -> Path:
    """Write `out`/index.html from reproduce.json and the paper's tables; return its path."""
    record = read_file(out / "reproduce.json", "reproduce")
    settings = record.get("settings") or {}
    text = render(
        "reproduce.html",
        title="Reproduction of the paper",
        scale=record.get("scale"),
        about=f"{settings.get('model')}, layer {settings.get('layer')}, {settings.get('text')}",
        pages=[(name, path) for name, path in PAGES.items() if (out / path).exists()],
        stages=[*_stages(record.get("stages") or {}, out)],
        tables=[table for table in paper_tables if isinstance(table, Table)],
        missing=[table for table in paper_tables if isinstance(table, Missing)],
        settings=settings,
    )
    write_text(out / "index.html", text)
    return out / "index.html"


def _stages(entries: dict[str, Any], out: Path) -> Iterator[dict[str, str]]:
    """Name, state and time of each stage, and the path of its results; empty where there are none."""
    paths = {"synthetic": "synthetic/index.html", "train": "train", **dict.fromkeys(registry(), "evals/table.csv")}
    paths |= {"compare": "compare/pairs.csv", "report": "report/index.html"}
    for name, path in paths.items():
        entry = entries.get(name)
        time = "-" if entry is None else clock(entry.get("seconds") or 0.0)
        state = "not run" if entry is None else "finished" if entry.get("finished") else "not finished"
        if name == "report":
            state, time = "this page", "-"
        there = state != "not run" and (out / path).exists()
        yield {"name": name, "state": state, "time": time, "path": path if there else ""}
