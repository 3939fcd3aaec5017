"""The report's folder: page, tables, and figures as PNG and PDF files; tables and SAEBench files of evaluations."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sampled_sae.config import read_file, write_file
from sampled_sae.evals.results import names_of, read_result, result_path
from sampled_sae.hooks import Where, hook_title
from sampled_sae.reporting import panels
from sampled_sae.reporting.collect import Found, Kind, collect, kinds, part, saelens_fields
from sampled_sae.reporting.figures import PAIRS, REFERENCE, Styles, pareto, plain, styles
from sampled_sae.reporting.pages import CURVES
from sampled_sae.reporting.palette import INK, MUTED
from sampled_sae.reporting.panels import curves
from sampled_sae.reporting.paper_tables import paper_tables
from sampled_sae.reporting.report_page import page
from sampled_sae.reporting.sweep import Configuration, Sweep, group_title, hook_of, key_of, sweeps
from sampled_sae.reporting.tables import Missing, comma_separated, files, latex, markdown
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import make_folder, remove_leftovers, write_json, write_text, writing
from sampled_sae.utils.measures import Column, Table, find, unique
from sampled_sae.utils.third_party import install

if TYPE_CHECKING:
    import plotly.graph_objects as go

FORMATS = ("png", "pdf")
WIDTH, SMALL = 760, (560, 430)  # pixels of a sheet's width, and of a single figure
SCALE = 3  # PNG pixels per pixel: 300 per printed inch at the width of a column
PAPER_FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"


def paper_figures(sweep: Sweep, look: Styles) -> Iterator[tuple[str, go.Figure]]:
    """File names without their ends, and figures."""
    x = sweep.metric(REFERENCE)
    for metric in sweep.metrics:
        if x and metric.headline and metric is not x and sweep.having(x, metric):
            if metric.better:
                yield f"pareto-{metric.name}-{x.name}", _paper(pareto(sweep, x, metric, look, SMALL), *SMALL)
            yield f"panels-{metric.name}-{x.name}", _sheet(panels.against(sweep, x, metric, look))
    for y_name, x_name in PAIRS:
        x, y = sweep.metric(x_name), sweep.metric(y_name)
        if x and y and sweep.having(x, y):
            yield f"pareto-{y_name}-{x_name}", _paper(pareto(sweep, x, y, look, SMALL), *SMALL)
    if drawn := panels.densities(sweep, look):
        yield "density", _sheet(drawn)
    for key, title, _ in CURVES:
        figure = curves(list(sweep.rows), look, sweep.log, key)
        if figure.data:
            yield f"training-{key}", _curves(figure, look, title)


def _sheet(drawn: Sequence[panels.Panel]) -> go.Figure:
    figure = panels.sheet(drawn, WIDTH)
    return _paper(figure, WIDTH, figure.layout.height + 30, top=34)


def _curves(figure: go.Figure, look: Styles, title: str) -> go.Figure:
    """Lines in the colors of their groups: single configurations cannot be distinguished on paper."""
    named: set[str] = set()
    groups = list(look)
    for trace in figure.data:
        group = plain(group_title(groups[trace.meta["group"]]))
        trace.update(showlegend=group not in named and not trace.meta["band"], name=group, legendgroup=group)
        if not trace.meta["band"]:
            named.add(group)
    figure.update_yaxes(title={"text": title})
    return _paper(figure, *SMALL)


def _paper(figure: go.Figure, width: int, height: int, top: int = 14) -> go.Figure:
    """A legend below, a font that every printer has."""
    legend: dict[str, Any] = {"orientation": "h", "x": 0, "xanchor": "left", "y": 0, "yanchor": "bottom"}
    legend |= {"yref": "container", "font": {"size": 12, "color": INK}, "itemsizing": "constant"}
    axis = {"tickfont": {"color": INK, "size": 12}, "linecolor": MUTED, "showline": True}
    axis["title"] = {"font": {"size": 13, "color": INK}}
    figure.update_xaxes(axis).update_yaxes(axis)
    return figure.update_layout(
        font={"family": PAPER_FONT, "color": INK},
        showlegend=True,
        legend=legend,
        width=width,
        height=height,
        margin={"l": 12, "r": 16, "t": top, "b": 90},
    )


def missing_for_figures() -> str | None:
    """Why figures cannot be written as files here, in one line; None if no reason is known."""
    for name in ("plotly", "kaleido"):
        if importlib.util.find_spec(name) is None:
            return f"no PNG and PDF: {name} is missing; {install('report')}"
    return None


def write_figures(figures: Sequence[tuple[str, go.Figure]], folder: Path) -> list[Path]:
    """Write each figure in all formats, on white; all of them through one browser, which takes a second to start."""
    import plotly.io

    if not figures:
        return []
    if not hasattr(plotly.io, "write_images"):
        raise UserError(f"no PNG and PDF: plotly is too old; {install('report')}")
    make_folder(folder)
    for _, figure in figures:
        figure.update_layout(paper_bgcolor="white", plot_bgcolor="white")
    files = [(figure, folder / f"{name}.{end}") for name, figure in figures for end in FORMATS]
    try:
        plotly.io.write_images(
            [figure for figure, _ in files],
            [path for _, path in files],
            width=[figure.layout.width for figure, _ in files],
            height=[figure.layout.height for figure, _ in files],
            scale=[SCALE if path.suffix == ".png" else 1 for _, path in files],
        )
    except (RuntimeError, OSError, ValueError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"no PNG and PDF: kaleido could not draw them ({first})") from error
    return [path for _, path in files]


LIST = "files.json"  # lists the files of the report, so that the next one can remove those it no longer writes


class Written(NamedTuple):
    """What became of a report."""

    page: Path
    tables: list[Path]
    figures: list[Path]
    notes: list[str]  # what is missing, one line each
    sweeps: list[Sweep]
    paper: list[Path]  # the paper's tables, three files each
    paper_tables: list[Table | Missing]  # the same, and those for which something is missing


def write_report(
    folders: Sequence[Path], out: Path, model: str | None = None, layer: int | None = None, figures: bool = True
) -> Written:
    """Write the report of the runs, SAEs and comparisons in `folders` into `out`: index.html, tables/ and figures/.

    `model` and `layer` keep the SAEs of that model or layer. `figures` also writes PNG and PDF files, which takes
    kaleido and a Chrome or Chromium; a note reports a missing one.
    """
    found = _only(collect(folders), model, layer)
    made, notes = sweeps(found), list(found.notes)
    named = dict(zip(_names(made), made, strict=True))
    paper = paper_tables(found, made, [*named])
    make_folder(out)
    index = out / "index.html"
    write_text(index, page(found, made, out))
    own = {name + file: text for name, sweep in named.items() for file, text in sweep_files(sweep).items()}
    of_paper = {file: text for table in paper if isinstance(table, Table) for file, text in files(table).items()}
    tables, filled = (_write_all(out / "tables", texts) for texts in (own, of_paper))
    drawn: list[Path] = []
    lacking = missing_for_figures() if figures else None
    if figures and lacking is None:
        try:
            looks = [(name, sweep, styles(sweep.rows)) for name, sweep in named.items()]
            listed = [(name + file, one) for name, sweep, look in looks for file, one in paper_figures(sweep, look)]
            drawn = write_figures(listed, out / "figures")
        except UserError as error:
            lacking = str(error)
    _tidy(out, [index, *tables, *filled, *drawn])
    return Written(index, tables, drawn, [*notes, *([lacking] if lacking else [])], made, filled, paper)


def _write_all(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    for name, text in texts.items():
        make_folder(folder)
        write_text(folder / name, text)
    return [folder / name for name in texts]


def _only(found: Found, model: str | None, layer: int | None) -> Found:
    """The SAEs of one model or layer."""
    asked = {name: value for name, value in (("model", model), ("layer", layer)) if value is not None}
    if not asked:
        return found
    origins: list[dict[str, Any]] = [
        {"model": s.metadata.get("model_name"), "layer": hook_of(s.metadata)} for s in found.saes
    ]
    kept = [sae for sae, origin in zip(found.saes, origins, strict=True) if origin | asked == origin]
    if not kept:
        wanted = " and ".join(f"{name} = {value!r}" for name, value in asked.items())
        there = sorted({_described(**origin) for origin in origins})
        raise UserError(f"{wanted}: no such SAE; there are {'; '.join(there) or 'none'}")
    runs = [run for run in found.runs if any(sae.run is run for sae in kept)]
    return replace(found, saes=kept, runs=runs)


def _described(model: str | None, layer: Where | None) -> str:
    """A model and a hook point in words; SAEs trained on a file of activations name neither."""
    return (model or "a model without a name") + ("" if layer is None else f", {hook_title(layer)}")


def _names(made: Sequence[Sweep]) -> list[str]:
    """What the files of each sweep begin with: nothing where there is one."""
    if len(made) == 1:
        return [""]
    taken: set[str] = set()
    bases = [re.sub(r"[^a-z0-9.]+", "-", sweep.title.lower()).strip("-.") or "sweep" for sweep in made]
    return [f"{unique(base, taken)}-" for base in bases]


def _tidy(out: Path, written: Sequence[Path]) -> None:
    """Remove the files of an earlier report that this one did not write."""
    names = [str(path.relative_to(out)) for path in written]
    record = out / LIST
    before = read_file(record, "report").get("files") if record.exists() else []
    for name in before if isinstance(before, list) else []:
        # Only files in the report's own folders, whatever the list contains.
        if isinstance(name, str) and name not in names and re.fullmatch(r"(tables|figures)/[^/\\]+", name):
            with writing(out):
                (out / name).unlink(missing_ok=True)
    write_file(record, "report", {"files": names})


# ---- tables of sweeps and of evaluations ----------------------------------------------------------------

SETTINGS = ("l", "k", "latents", "lr", "tokens")


def sweep_files(sweep: Sweep) -> dict[str, str]:
    """File names and their text: a table for each evaluation in three formats, and saes.csv with a row per SAE."""
    made: dict[str, str] = {}
    for kind in sweep.kinds:
        table = sweep.table(kind)
        made |= {f"{kind.name}.md": markdown(table), f"{kind.name}.tex": latex(table)}
        made[f"{kind.name}.csv"] = comma_separated(_with_settings(sweep, kind))
    return made | {"saes.csv": comma_separated(_every_sae(sweep))}


def _with_settings(sweep: Sweep, kind: Kind) -> Table:
    """A row per configuration: its settings, then each number with its range over seeds."""
    columns = [*map(Column, ("configuration", "group", *SETTINGS, "seeds"))]
    columns += [Column(metric.title, metric.digits, name=metric.name) for metric in kind.metrics]
    rows = [
        [row.label, row.group, *_settings(row, row.runs[0]), len(row.runs), *map(row.stat, map(key_of, kind.metrics))]
        for row in sweep.measured(kind)
    ]
    return Table(columns, rows)


def _every_sae(sweep: Sweep) -> Table:
    """A row per SAE, with all numbers as they were measured."""
    names = [metric.name for metric in sweep.metrics]
    rows = [
        [run["label"], row.label, row.group, *_settings(row, run), run["seed"], run["name"]]
        + [run["values"].get(name) for name in names]
        for row in sweep.rows
        for run in row.runs
    ]
    return Table([*map(Column, ("name", "configuration", "group", *SETTINGS, "seed", "folder", *names))], rows)


def _settings(row: Configuration, run: dict[str, Any]) -> list[float | None]:
    """Whole numbers without a point: counts are read as floats."""
    values = [row.l, *(run[name] for name in SETTINGS[1:])]
    return [int(value) if value is not None and float(value).is_integer() else value for value in values]


TABLE = "table.csv"
HEAD = ("sae", "folder", "model", "layer", "seed", "evaluation", "metric", "value", "low", "high")


def write_tables(folders: Sequence[Path], out: Path) -> Path:
    """Write `out`/table.csv, a row for each number of each SAE, and `out`/saebench/KIND/..._eval_results.json.

    All results in the SAEs' folders are included, not only the latest. Returns the path of the table.
    """
    rows: list[list[Any]] = []
    for kind in kinds():
        for name, folder in zip(names_of(folders), folders, strict=True):
            content = read_result(folder, kind.name)
            if content is None:
                continue
            written = result_path(folder, kind.name).stat().st_mtime
            _write_saebench(content, folder, name, out / "saebench", int(written * 1000))
            seed = part(content, "sae").get("seed")
            about = (name, str(folder), content.get("model"), content.get("layer"), seed, kind.name)
            found = [(metric.name, find(metric, content["result"])) for metric in kind.metrics]
            rows += [[*about, metric, *value] for metric, value in found if value is not None]
    remove_leftovers(make_folder(out), TABLE)
    write_text(out / TABLE, comma_separated(Table([*map(Column, HEAD)], rows)))
    return out / TABLE


def _write_saebench(content: dict[str, Any], folder: Path, name: str, out: Path, milliseconds: int) -> None:
    """The file where SAEBench's tools look for it, with what they read of the SAE."""
    layout = part(content, "saebench")
    if not layout:  # of an older evaluation
        return
    own, sae = folder / "sampled_sae.json", saelens_fields(folder)
    training = part(read_file(own, "sae") if own.exists() else {}, "metadata", "training")
    tokens = training.get("steps", 0) * training.get("batch_size", 0)
    kind, label = str(layout["eval_type_id"]), name.replace("/", "_")
    filled = {
        **layout,
        "eval_id": f"{kind}_{label}",
        "datetime_epoch_millis": milliseconds,
        "sae_bench_commit_hash": content.get("git_commit") or "",
        "sae_lens_id": folder.name,
        "sae_lens_release_id": "sampled_sae",
        "sae_lens_version": part(sae, "metadata").get("sae_lens_version"),
        "sae_cfg_dict": {**sae, **({"training_tokens": tokens} if tokens else {})},
    }
    make_folder(out / kind)
    path = out / kind / f"sampled_sae_{label}_eval_results.json"
    remove_leftovers(path.parent, path.name)
    write_json(path, filled)
