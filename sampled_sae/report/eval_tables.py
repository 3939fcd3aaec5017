"""All evaluations of all SAEs as files: one tidy table, and one file for each in SAEBench's layout."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sampled_sae.evals.session import names_of
from sampled_sae.files import make_folder, read_json, write_json, write_text
from sampled_sae.report.metrics import EVALUATIONS, METRICS, find

TABLE = "table.csv"
HEAD = ("sae", "folder", "model", "layer", "seed", "evaluation", "metric", "value", "low", "high")


def write_tables(folders: Sequence[Path], out: Path) -> Path:
    """Write `out`/table.csv, a line for each number of each SAE, and `out`/saebench/KIND/..._eval_results.json; returns
    the table. All results in the SAEs' folders are in it, not only the last ones."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(HEAD)
    for evaluation in EVALUATIONS:
        for name, folder in zip(names_of(folders), folders, strict=True):
            path = folder / "evals" / f"{evaluation}.json"
            if not path.exists():
                continue
            content = read_json(path)
            _write_saebench(content, folder, name, out / "saebench", int(path.stat().st_mtime * 1000))
            seed = (content["sae"] or {}).get("seed")
            about = (name, folder, content.get("model"), content.get("layer"), seed)
            for metric in METRICS:
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
