"""Results of a study: lines of results.jsonl, slices of SAEs for automated interpretability, and the page.

An SAE of 65,536 latents has 300 MB; a slice, the latents that are explained, has less than 1 MB.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sampled_sae.evals import get_evaluation
from sampled_sae.evals.autointerp.evaluate import evaluate_autointerp_many
from sampled_sae.evals.autointerp.schema import CONTEXT, DENSITIES, AutointerpConfig
from sampled_sae.experiments.design import Measure, Study
from sampled_sae.experiments.layer import EDGES, Layer, read_tokens
from sampled_sae.experiments.synthetic import EXPERIMENTS, grid
from sampled_sae.formats.tensors import read_safetensors
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.reporting.study import GOAL, Results, Run, read_rows
from sampled_sae.reporting.study_answer import NOT_RUN
from sampled_sae.reporting.study_figures import across, against, forest
from sampled_sae.reporting.study_page import detailed_page, detailed_sections, fill_page, page_blocks
from sampled_sae.reporting.synthetic import load_results
from sampled_sae.reporting.write import write_figures
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import make_folder, replacing, write_text, writing
from sampled_sae.utils.measures import find

RESULTS = "results.jsonl"
EVALUATIONS: dict[str, str] = {"select": "core", "finalists": "probing"}  # others have the evaluation's own name


def values_of(measure: Measure, result: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation's result."""
    evaluation = get_evaluation(EVALUATIONS.get(measure, measure))
    found = {metric.name: find(metric, result) for metric in evaluation.metrics}
    values = {name: value.value for name, value in found.items() if value is not None}
    return values | ({"fvu_matched": result["matched"]} if result.get("matched") is not None else {})


def line(run: Run, measure: str, values: Mapping[str, float | None], units: Mapping[str, Any] | None = None) -> str:
    """A result as one line of results.jsonl: metrics that are finite, and those of single datasets or letters."""
    rounded = {name: round(value, 6) for name, value in values.items() if value is not None and math.isfinite(value)}
    row: dict[str, Any] = {**run._asdict(), "measure": measure, "values": rounded, "units": units or {}}
    return json.dumps({name: value for name, value in row.items() if value != {}}, separators=(",", ":")) + "\n"


def line_of(run: Run, measure: Measure, result: Mapping[str, Any], sae: SAE) -> str:
    """The line of an evaluation's result, with the training time, or the words that absorption was measured with."""
    about = {"seconds": sae.cfg.metadata["training"]["seconds"]} if measure == "core" else {}
    about |= {"words": result["words"]} if measure == "absorption" else {}
    return line(run, measure, values_of(measure, result) | about, units_of(measure, result))


def units_of(measure: Measure, result: Mapping[str, Any]) -> dict[str, Any]:
    """For each dataset or letter its source and its metrics."""
    if measure == "absorption":
        return {
            letter["letter"]: [
                "",
                {"absorption": round(letter["fraction"], 4), "absorption_f1": round(_main_f1(letter), 4)},
            ]
            for letter in result["letters"]
            if letter["why_not"] is None and letter["fraction"] is not None
        }
    if EVALUATIONS.get(measure, measure) != "probing":
        return {}
    return {
        one["name"]: [
            one["source"],
            {f"probing_{k}": round(s["accuracy"]["mean"], 4) for k, s in one["summary"]["top"].items()},
        ]
        for one in result["datasets"]
    }


def _main_f1(letter: Mapping[str, Any]) -> float:
    main = len(letter["main"])
    return float(letter["sparse_f1"][main - 1]) if main else 0.0


# ---- slices -----------------------------------------------------------------------------------------

EACH = 60  # latents of each bin


def write_slice(folder: Path, run: Run, sae: SAE, frequency: Tensor) -> dict[str, float]:
    """Keep latents of each density bin, drawn from those with frequency [d_sae] above 0; returns how many fire."""
    bins = torch.bucketize(frequency.cpu(), torch.tensor(EDGES, dtype=frequency.dtype), right=True)
    generator, chosen, live = torch.Generator().manual_seed(run.seed), [], {}
    for number in range(len(DENSITIES)):
        own = ((bins == number) & (frequency.cpu() > 0)).nonzero().squeeze(1)
        live[f"live_{number}"] = float(len(own))
        chosen.append(own[torch.randperm(len(own), generator=generator)[:EACH]].sort().values)
    rows = torch.cat(chosen).to(sae.device)
    tensors = {
        "W_enc": sae.W_enc.detach()[:, rows].contiguous(),
        "b_enc": sae.b_enc.detach()[rows],
        "b_dec": sae.b_dec.detach(),
        "threshold": sae.threshold[rows] if sae.threshold.ndim else sae.threshold,
        "latents": rows,
    }
    about = {"k": str(sae.cfg.k), "before": str(int(sae.cfg.apply_b_dec_to_input))} | {
        name: str(value) for name, value in run._asdict().items()
    }
    path = folder / f"{run.setting}-{run.name}.safetensors"
    with replacing(path) as temporary, writing(path):
        save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, temporary, metadata=about)
    return live


def read_slice(path: Path, device: torch.device) -> tuple[Run, SAE]:
    """The run, and an SAE of the latents that were kept; it encodes, and does not decode."""
    found = read_safetensors(path)
    try:
        run = Run(found.about["setting"], found.about["method"], float(found.about["factor"]), int(found.about["seed"]))
        d_in, n = found.tensors["W_enc"].shape
        cfg = InferenceConfig(d_in, n, k=int(found.about["k"]), apply_b_dec_to_input=found.about["before"] == "1")
    except (KeyError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: not latents of a study ({type(error).__name__}: {error})") from None
    sae = SAE(cfg)
    with torch.no_grad():
        sae.W_enc.copy_(found.take("W_enc", (d_in, n)))
        sae.W_dec.copy_(sae.W_enc.T)
        sae.b_enc.copy_(found.take("b_enc", (n,)))
        sae.b_dec.copy_(found.take("b_dec", (d_in,)))
        sae.threshold = found.take("threshold", (), (n,))
    return run, sae.to(device)


def judged(
    saes: Mapping[Run, SAE], layer: Layer, live: Mapping[Run, Sequence[float]], tokens: int, embedder: str | None
) -> Iterator[tuple[Run, dict[str, float]]]:
    """Balanced detection of each slice by the offline judge, by density bin and over live latents.

    `live`: live latents of the whole SAE in each bin.
    """
    config = AutointerpConfig(embedder=embedder, tokens=tokens, max_latents=len(DENSITIES) * EACH, fuzzing_each=0)
    size = min(CONTEXT, layer.model.context or CONTEXT)
    text = read_tokens(layer.material.report, layer.model, layer.named, size, tokens // size, "beginnings")
    results = evaluate_autointerp_many(list(saes.values()), layer.model, layer.layer, text, config)
    for run, result in zip(saes, results, strict=True):
        bins = [(result.by_density or {}).get(name) for name in DENSITIES]
        means = [None if one is None or not one["balanced"].latents else one["balanced"].mean.value for one in bins]
        there = [(mean, weight) for mean, weight in zip(means, live[run], strict=True) if mean is not None and weight]
        values = {f"autointerp_{number}": mean for number, mean in enumerate(means) if mean is not None}
        if "autointerp_0" in values and "autointerp_1" in values:
            values["autointerp_gain"] = values["autointerp_1"] - values["autointerp_0"]
        if there:
            whole = sum(weight for _, weight in there)
            values["autointerp"] = sum(mean * weight for mean, weight in there) / whole
        if "balanced" in result.control and result.control["balanced"].mean.value is not None:
            values["autointerp_control"] = result.control["balanced"].mean.value
        yield run, values


# ---- the page ---------------------------------------------------------------------------------------

SYNTHETIC = "synthetic"
EVERY = "all"  # settings together, in the names of figures
DETAILED = "tables.md"
PAIRS = (("fvu", "probing_5"), ("absorption", "probing_5"), ("fvu", "autointerp"))  # metrics against each other
SHOWN = (*GOAL, "absorption_f1", "over_10_percent", "autointerp", "mmcs_seeds")  # metrics with a figure


def write_results(study: Study, out: Path, page: Path, figures: Path | None = None) -> list[Path]:
    """Write the answer and the tables of `out`/results.jsonl into a page, and figures into a folder; returns the files.

    All tables go to `out`/tables.md. Figures are of the first setting of each model; without a folder,
    the page keeps those that it has. Results of `sampled-sae synthetic` are read from `out`/synthetic/PRESET.json.
    """
    rows = read_rows(out / RESULTS, study.settings)
    beside = [name for name, setting in study.settings.items() if setting.recipe == "paper"]
    models = {name: setting.model for name, setting in study.settings.items()}
    results = Results(rows, models, beside, {name: method.rate_of for name, method in study.methods.items()})
    synthetic = {path.stem: load_results(path) for path in sorted((out / SYNTHETIC).glob("*.json"))}
    roles = {name: method.role for name, method in study.methods.items()}
    drawn = list(_figures(results)) if figures is not None else []
    files = [] if figures is None else write_figures(drawn, make_folder(figures))
    images = [path for path in files if path.suffix == ".png"]
    for path in set(files) - set(images):
        with writing(path):
            path.unlink()
    blocks = page_blocks(results, study.claims, roles, study.needed, synthetic, _link(out / DETAILED, page))
    if figures is not None:
        titles = {name: _title(figure) for name, figure in drawn}
        shown = []
        for setting in (EVERY, *results.goals):
            own = [path for path in images if path.name.startswith(f"{setting}-")]
            links = [f"![{titles[path.stem]}]({_link(path, page)})" for path in own]
            heading = f"### Figures of {'all settings' if setting == EVERY else setting}"
            shown += [heading, *links] if links else []
        blocks.append(("figures", "\n\n".join(shown) or NOT_RUN))
    not_run = {preset: not_run_of(preset, found) for preset, found in synthetic.items()}
    fill_page(page, blocks)
    sections = detailed_sections(results, study.claims, roles, synthetic, not_run)
    write_text(out / DETAILED, detailed_page(sections))
    return [page, out / DETAILED, *images]


def _link(path: Path, page: Path) -> str:
    """A link to a file from a page."""
    return Path(os.path.relpath(path, page.parent)).as_posix()


def not_run_of(preset: str, found: Mapping[str, Any]) -> list[str]:
    """The configurations of a preset of `sampled-sae synthetic` that its results lack."""
    there = {sae.get("label") for sae in found["saes"]}
    cells = grid(EXPERIMENTS[preset]) if preset in EXPERIMENTS else []
    return [cell.label for cell in cells if cell.label not in there]


def _figures(results: Results) -> Iterator[tuple[str, Any]]:
    """Figures by name, those that there are results for: all of the first setting, the main ones of other models', and
    FVU in all settings."""
    for setting in results.goals:
        for x, y in PAIRS:
            if (figure := against(results, setting, x, y)) is not None:
                yield f"{setting}-{x}-{y}", figure
        for metric in SHOWN if setting == results.goals[0] else GOAL[:2]:
            if (figure := forest(results, setting, metric)) is not None:
                yield f"{setting}-{metric}", figure
    if (figure := across(results, "fvu")) is not None:
        yield f"{EVERY}-fvu", figure


def _title(figure: Any) -> str:
    """What a figure shows, from the titles of its axes."""
    x, y = figure.layout.xaxis.title.text, figure.layout.yaxis.title.text
    return (f"{y} against {x}" if y else str(x)).replace("<br>", "; ")
