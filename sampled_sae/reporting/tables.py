"""The numbers of a sweep as tables: Markdown and LaTeX to read, CSV to go on with."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sampled_sae.evals import all_metrics, titles
from sampled_sae.evals.session import names_of
from sampled_sae.reporting.paper_tables_format import head_lines, in_latex, row_of, tabular, text_file
from sampled_sae.reporting.sweep import Column, Configuration, Stat, Sweep, best_of, key_of
from sampled_sae.utils.files import make_folder, read_json, write_json, write_text
from sampled_sae.utils.measures import find, form, in_markdown, shown

SETTINGS = ("l", "k", "latents", "lr", "tokens")
MOST = 6
"""Columns of numbers that stand beside each other in LaTeX."""
Cell = tuple[str, tuple[str, str] | None]  # a number, and its range where seeds differ


def columns_of(sweep: Sweep, evaluation: str) -> list[Column]:
    """The numbers of one evaluation that some SAE has."""
    return [
        Column(metric.title, key_of(metric), metric.digits, metric.better)
        for metric in sweep.metrics
        if metric.evaluation == evaluation
    ]


def evaluations_of(sweep: Sweep) -> list[str]:
    """The evaluations that some SAE has numbers of."""
    return [name for name in titles() if columns_of(sweep, name)]


def measured(sweep: Sweep, columns: Sequence[Column]) -> list[Configuration]:
    """The rows that have one of these numbers at least."""
    return [row for row in sweep.rows if any(row.stat(column.key) for column in columns)]


def tables(sweep: Sweep) -> dict[str, str]:
    """File names and their text: a table for each evaluation, three times, and one line a SAE."""
    made = {}
    for name in evaluations_of(sweep):
        made[f"{name}.md"] = markdown(sweep, name)
        made[f"{name}.tex"] = latex(sweep, name)
        made[f"{name}.csv"] = comma_separated(sweep, name)
    made["saes.csv"] = every_sae(sweep)
    return made


def markdown(sweep: Sweep, evaluation: str) -> str:
    """A Markdown table: means over seeds, their range in brackets, the best of each column bold."""
    columns = columns_of(sweep, evaluation)
    heads = ["SAE", *(in_markdown(column.title) + _arrow(column, "↓", "↑") for column in columns)]
    lines = [heads, ["---", *["---:"] * len(columns)]]
    for label, numbers in _cells(measured(sweep, columns), columns, in_markdown, lambda text: f"**{text}**"):
        lines.append([label, *(f"{value} ({' to '.join(spread)})" if spread else value for value, spread in numbers)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def latex(sweep: Sweep, evaluation: str) -> str:
    """LaTeX tables of a few columns each, one below the other: means over seeds, their range under them."""
    columns = columns_of(sweep, evaluation)
    rows = measured(sweep, columns)
    parts = -(-len(columns) // MOST)
    size = -(-len(columns) // parts)
    blocks = [_block(rows, columns[start : start + size]) for start in range(0, len(columns), size)]
    remark = "Means over seeds, the smallest and the largest in brackets."
    return text_file(remark, "\n\n\\medskip\n".join(blocks))


def _block(rows: Sequence[Configuration], columns: Sequence[Column]) -> str:
    arrows = [_arrow(column, r"$\downarrow$", r"$\uparrow$") for column in columns]
    heads = [["SAE"], *(head_lines(column.title, after=arrow) for column, arrow in zip(columns, arrows, strict=True))]
    lines = []
    for label, numbers in _cells(rows, columns, in_latex, lambda text: rf"\textbf{{{text}}}"):
        lines.append(row_of([label, *(value for value, _ in numbers)]))
        if any(spread for _, spread in numbers):
            ranges = [rf"\scriptsize [{spread[0]}, {spread[1]}]" if spread else "" for _, spread in numbers]
            lines += [row_of(["", *ranges]), r"\addlinespace[2pt]"]
    return r"\noindent" + tabular("l" + "r" * len(columns), heads, lines)


def _cells(
    rows: Sequence[Configuration],
    columns: Sequence[Column],
    escape: Callable[[object], str],
    bold: Callable[[str], str],
) -> list[tuple[str, list[Cell]]]:
    lines: list[tuple[str, list[Cell]]] = [(escape(row.label), []) for row in rows]
    for column in columns:
        stats = [row.stat(column.key) for row in rows]
        best = best_of([stat and stat.mean for stat in stats], column)
        for (_, line), stat, mark in zip(lines, stats, best, strict=True):
            line.append(_cell(stat, column.digits, escape, bold if mark else str))
    return lines


def _cell(stat: Stat | None, digits: int, escape: Callable[[object], str], mark: Callable[[str], str]) -> Cell:
    if stat is None:
        return escape("-"), None
    mean, low, high = (escape(form(value, digits)) for value in stat)
    return mark(mean), (low, high) if low != high else None


def _arrow(column: Column, low: str, high: str) -> str:
    return {"low": f" {low}", "high": f" {high}", None: ""}[column.best]


def comma_separated(sweep: Sweep, evaluation: str) -> str:
    """A line for each configuration: its settings, and each number with the smallest and the largest over seeds."""
    metrics = [metric for metric in sweep.metrics if metric.evaluation == evaluation]
    heads = ["configuration", "group", *SETTINGS, "seeds"]
    for metric in metrics:
        heads += [metric.name, f"{metric.name}_low", f"{metric.name}_high"]
    lines = []
    for row in measured(sweep, columns_of(sweep, evaluation)):
        line = [row.label, row.group, row.l, *(row.runs[0][name] for name in SETTINGS[1:]), len(row.runs)]
        for metric in metrics:
            line += row.stat(key_of(metric)) or [None] * 3
        lines.append(line)
    return _csv(heads, lines)


def every_sae(sweep: Sweep) -> str:
    """A line for each SAE, with all numbers as they were measured."""
    names = [metric.name for metric in sweep.metrics]
    heads = ["name", "configuration", "group", *SETTINGS, "seed", "folder", *names]
    lines = [
        [
            *(run["label"], row.label, row.group, row.l, *(run[name] for name in SETTINGS[1:]), run["seed"]),
            *(run["name"], *(run["values"].get(name) for name in names)),
        ]
        for row in sweep.rows
        for run in row.runs
    ]
    return _csv(heads, lines)


def _csv(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([[_plain(value) for value in line] for line in lines])
    return text.getvalue()


def _plain(value: Any) -> Any:
    """Whole numbers without a point, because counts are kept as floats; text on one line."""
    if isinstance(value, str):
        return shown(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value


TABLE = "table.csv"
HEAD = ("sae", "folder", "model", "layer", "seed", "evaluation", "metric", "value", "low", "high")


def write_tables(folders: Sequence[Path], out: Path) -> Path:
    """Write `out`/table.csv, a line for each number of each SAE, and `out`/saebench/KIND/..._eval_results.json; returns
    the table. All results in the SAEs' folders are in it, not only the last ones."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(HEAD)
    for evaluation in titles():
        for name, folder in zip(names_of(folders), folders, strict=True):
            path = folder / "evals" / f"{evaluation}.json"
            if not path.exists():
                continue
            content = read_json(path)
            _write_saebench(content, folder, name, out / "saebench", int(path.stat().st_mtime * 1000))
            seed = (content["sae"] or {}).get("seed")
            about = (name, folder, content.get("model"), content.get("layer"), seed)
            for metric in all_metrics():
                value = find(metric, content["result"]) if metric.evaluation == evaluation else None
                if value is not None:
                    writer.writerow([*about, evaluation, metric.name, *value])
    make_folder(out)
    write_text(out / TABLE, made.getvalue())
    return out / TABLE


def _write_saebench(content: dict[str, Any], folder: Path, name: str, out: Path, milliseconds: int) -> None:
    """The file where SAEBench's tools look for it, with what they read of the SAE."""
    layout = content.get("saebench")
    if layout is None:  # of an older evaluation
        return
    sae = read_json(folder / "cfg.json") if (folder / "cfg.json").exists() else {}
    training = (read_json(folder / "sampled_sae.json") if (folder / "sampled_sae.json").exists() else {}).get(
        "metadata", {}
    )
    steps = training.get("training", {})
    tokens = steps.get("steps", 0) * steps.get("batch_size", 0)
    kind, label = str(layout["eval_type_id"]), name.replace("/", "_")
    filled = {
        **layout,
        "eval_id": f"{kind}_{label}",
        "datetime_epoch_millis": milliseconds,
        "sae_bench_commit_hash": content.get("git_commit") or "",
        "sae_lens_id": folder.name,
        "sae_lens_release_id": "sampled_sae",
        "sae_lens_version": sae.get("metadata", {}).get("sae_lens_version"),
        "sae_cfg_dict": {**sae, **({"training_tokens": tokens} if tokens else {})},
    }
    make_folder(out / kind)
    write_json(out / kind / f"sampled_sae_{label}_eval_results.json", filled)
