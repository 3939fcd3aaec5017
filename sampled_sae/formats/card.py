"""The model card of an SAE: README.md with what the hub reads in its head, settings, metrics, and how to load it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sampled_sae.formats.hub import Place
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import read_json
from sampled_sae.utils.measures import number, shown

TAGS = ("sparse-autoencoder", "mechanistic-interpretability", "sampled-sae", "saelens")
ORIGIN = {
    "model_name": "Model",
    "hook_name": "Hook point",
    "text": "Text",
    "dataset_path": "Text",
    "context_size": "Context",
    "prepend_bos": "BOS at the start of each context",
}
HERE = """\
```python
import sampled_sae as ss

sae = ss.SAE.from_pretrained({arguments})
codes = sae.encode(x)  # activations x [..., {d_in}] -> [..., {d_sae}]
```"""
SAELENS = """\
```python
from huggingface_hub import snapshot_download
from sae_lens import SAE

sae = SAE.load_from_disk(snapshot_download({repo}){folder})
```"""


def model_card(cfg: InferenceConfig, place: Place, folder: Path | None, license: str | None = None) -> str:
    """The text of README.md; `folder` holds the evaluations' results, if there are any."""
    method = cfg.training.name if cfg.training is not None else None
    head: dict[str, Any] = {"library_name": "sampled-sae", "license": license, "tags": [*TAGS, cfg.architecture]}
    model = str(cfg.metadata.get("model_name") or "")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) and not Path(model).exists():
        head["base_model"] = model
    title = f"{place.subfolder or place.repo.partition('/')[2]}"
    load = [json.dumps(place.repo)]
    load += [f"subfolder={json.dumps(place.subfolder)}"] * bool(place.subfolder)
    load += [f"revision={json.dumps(place.revision)}"] * bool(place.revision)
    parts = [
        "---\n"
        + "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items() if value is not None)
        + "\n---",
        f"# {shown(title)}",
        f"A sparse autoencoder of {cfg.d_sae:,} latents for activations of width {cfg.d_in:,}, made with sampled-sae.",
        "## Load it",
        HERE.format(arguments=", ".join(load), d_in=cfg.d_in, d_sae=cfg.d_sae),
        "The files are a SAELens folder. In SAELens:",
        SAELENS.format(
            repo=", ".join([load[0], *load[2 if place.subfolder else 1 :]]),
            folder=" + " + json.dumps(f"/{place.subfolder}") if place.subfolder else "",
        ),
        "## Configuration",
        _table(("setting", "value"), _settings(cfg, method)),
    ]
    if found := metrics(cfg, folder):
        parts += ["## Metrics", _table(("metric", "value", "interval"), found)]
    return "\n\n".join(parts) + "\n"


def _settings(cfg: InferenceConfig, method: str | None) -> list[tuple[str, str]]:
    rows: list[tuple[str, Any]] = [
        ("Architecture", cfg.architecture),
        ("Width of the activations (d_in)", cfg.d_in),
        ("Latents (d_sae)", cfg.d_sae),
        ("K", cfg.k),
        ("Method", method),
        *((title, cfg.metadata.get(name)) for name, title in ORIGIN.items()),
    ]
    training = cfg.metadata.get("training")
    if isinstance(training, Mapping):
        rows += [(f"Training: {name}", training.get(name)) for name in ("steps", "batch_size", "seed")]
    return [(title, str(value)) for title, value in rows if value is not None]


def metrics(cfg: InferenceConfig, folder: Path | None) -> list[tuple[str, str, str]]:
    """Numbers on held-out tokens at the end of training, then those in the folder's results: title, value, interval."""
    training = cfg.metadata.get("training")
    heldout = training.get("heldout") if isinstance(training, Mapping) else None
    values = heldout if isinstance(heldout, Mapping) else {}
    rows = [
        (f"{name.upper()} on held-out tokens", f"{value:.4g}", "")
        for name in ("fvu", "l0")
        if (value := number(values.get(name))) is not None
    ]
    for file in sorted(folder.glob("evals/*.json")) if folder is not None else ():
        try:
            content = read_json(file)
        except UserError:
            continue  # a damaged result is none
        known = content.get("metrics") if isinstance(content, dict) else None
        for title, one in known.items() if isinstance(known, dict) else ():
            value, low, high = (number(one.get(key)) for key in ("value", "low", "high"))
            if value is not None:
                interval = "" if low is None or high is None else f"{low:.4g} to {high:.4g}"
                rows.append((f"{file.stem}: {title}", f"{value:.4g}", interval))
    return rows


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(shown(cell).replace("|", "\\|") for cell in row) + " |" for row in cells)
