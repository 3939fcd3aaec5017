"""Some latents of an SAE in a small file: enough for automated interpretability, which needs firings alone.

An SAE of 65,536 latents has 300 MB, the latents that are explained have less than 1 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sampled_sae.evals.autointerp.evaluate import evaluate_autointerp_many
from sampled_sae.evals.autointerp.schema import CONTEXT, DENSITIES, AutointerpConfig
from sampled_sae.experiments.layer import Layer, read_tokens
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.reporting.study import Run
from sampled_sae.sae import SAE

EDGES = (0.001, 0.1)  # densities between the bins
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
    temporary = path.with_suffix(".tmp")
    save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, temporary, metadata=about)
    temporary.replace(path)
    return live


def read_slice(path: Path, device: torch.device) -> tuple[Run, SAE]:
    """The run, and an SAE of the latents that were kept; it encodes, and does not decode."""
    with safe_open(path, "pt", device=str(device)) as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    d_in, n = tensors["W_enc"].shape
    sae = SAE(InferenceConfig(d_in, n, k=int(about["k"]), apply_b_dec_to_input=bool(int(about["before"]))))
    sae = sae.to(device)
    with torch.no_grad():
        sae.W_enc.copy_(tensors["W_enc"])
        sae.W_dec.copy_(tensors["W_enc"].T)
        sae.b_enc.copy_(tensors["b_enc"])
        sae.b_dec.copy_(tensors["b_dec"])
        sae.threshold = tensors["threshold"]
    return Run(about["setting"], about["method"], float(about["factor"]), int(about["seed"])), sae


def judged(
    saes: Mapping[Run, SAE], layer: Layer, live: Mapping[Run, Sequence[float]], tokens: int, embedder: str | None
) -> Iterator[tuple[Run, dict[str, float]]]:
    """Balanced detection of each slice by the offline judge, by density bin and over live latents.

    `live`: live latents of the whole SAE in each bin.
    """
    config = AutointerpConfig(embedder=embedder, tokens=tokens, max_latents=len(DENSITIES) * EACH, fuzzing_each=0)
    size = min(CONTEXT, layer.model.context or CONTEXT)
    text = read_tokens(layer.material.report, layer.model, layer.named, size, tokens // size, spread=True)
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
