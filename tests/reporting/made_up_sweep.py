"""Folders as training and evaluations leave them, with made-up numbers in the evaluations' own classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sampled_sae.config import plain
from sampled_sae.evals.absorption.schema import AbsorptionConfig, AbsorptionResult
from sampled_sae.evals.autointerp.schema import AutointerpConfig, AutointerpResult, Score
from sampled_sae.evals.bootstrap import Estimate, Spread
from sampled_sae.evals.core.fidelity import Density, Fidelity, Trained
from sampled_sae.evals.core.loss import Loss
from sampled_sae.evals.core.schema import CoreConfig, CoreResult
from sampled_sae.evals.probing.schema import Probes, ProbingConfig, ProbingResult, Summary
from sampled_sae.method import presets
from sampled_sae.method.config import OptimizerConfig, SAEConfig
from sampled_sae.training.settings import TrainConfig

M, K = 64, 4
EDGES = [-7 + i / 4 for i in range(29)]


def filled(kind: Any, **fields: Any) -> Any:
    """A result with these fields; the report does not ask for the others."""
    return kind(**dict.fromkeys(kind._fields) | fields)


def estimate(value: float | None) -> Estimate:
    return Estimate(value, None, None) if value is None else Estimate(value, value - 0.01, value + 0.01)


def core(fvu: float | None = 0.2, alive: int = 60, **loss: float) -> dict[str, Any]:
    near = Fidelity(100, estimate(fvu), estimate(0.7), estimate(4.0), estimate(0.9), estimate(0.95))
    histogram = [0] * 28
    histogram[20], histogram[24] = alive // 2, alive - alive // 2
    density = Density(estimate(0.05), estimate(0.5), alive / M, M - alive, histogram, EDGES, 0.6)
    numbers = dict.fromkeys(Loss._fields, 1.0) | {"ce_recovered": 0.9, "kl_recovered": 0.8} | loss
    found = Loss(**{name: estimate(value) for name, value in numbers.items()})
    trained = Trained(100, estimate(fvu), estimate(4.0))
    parts = dict(measured=near, normal=near, trained=trained, density=density, density_measured=density, loss=found)
    return filled(CoreResult, layer=1, contexts=8, median_norm=3.0, settings=CoreConfig(), **parts).to_dict()


def probing(accuracy: float = 0.8) -> dict[str, Any]:
    def one(value: float) -> Summary:
        return Summary(Spread(value, None), Spread(value, None), Spread(value, None))

    top = {k: one(accuracy + i / 100) for i, k in enumerate((1, 2, 5, 10))}
    summary = Probes(top, one(accuracy + 0.1), top, one(0.95))
    return plain(filled(ProbingResult, model="tiny", layer=1, summary=summary, datasets=[], settings=ProbingConfig()))


def absorption(fraction: float | None = 0.1, why: str | None = None) -> dict[str, Any]:
    spread = None if fraction is None else Spread(fraction, 0.01)
    numbers = {
        "usable_letters": 22,
        "not_evaluable": why,
        **dict.fromkeys(("fraction", "full", "splits", "main_f1"), spread),
    }
    return plain(filled(AbsorptionResult, **numbers, letters=[], settings=AbsorptionConfig()))


def autointerp(score: float = 0.75) -> dict[str, Any]:
    scores = dict.fromkeys(("detection", "balanced", "fuzzing"), Score(estimate(score), 0.1, 10))
    parts = dict(control=scores, skipped={}, latents=[], settings=AutointerpConfig())
    return plain(filled(AutointerpResult, **scores, **parts))


ALL = {"core": core, "probing": probing, "absorption": absorption, "autointerp": autointerp}


def grid(
    scores: Sequence[str] = ("l2", "uniform"), ls: Sequence[float] = (2, 5), seeds: Sequence[int] = (0, 1)
) -> list[SAEConfig]:
    """BatchTopK, TopK, a pool of each score and l, and a released one."""
    made = [presets.batchtopk(M, K), presets.topk(M, K), presets.released(M, K)]
    made += [presets.sampled(M, K, score, l) for score in scores for l in ls]
    rate = OptimizerConfig(lr=1e-3)  # a trained SAE has one
    return presets.named([replace(config, seed=seed, optimizer=rate) for config in made for seed in seeds], 0)


def put(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def write_sae(
    folder: Path, config: SAEConfig, model: str | None = "tiny", layer: int | None = 1, **results: Any
) -> Path:
    """An SAE's folder without weights, as one copies results; `results` by evaluation."""
    training = {
        "steps": 10,
        "batch_size": 8,
        "input_norm": "sqrt_d_in",
        "seed": 0,
        "dead": 0.25,
        "ever_pooled": 0.9,
        "seconds": 3.0,
    }
    metadata = {"model_name": model, "layer": layer, "text": "stdlib", "context_size": 16, "training": training}
    put(folder / "cfg.json", {"d_in": 16, "d_sae": M})
    put(folder / "sampled_sae.json", {"config": config.to_dict(), "threshold_ema": None, "metadata": metadata})
    for name, result in results.items():
        put(folder / "evals" / f"{name}.json", {"result": result, "sae": config.to_dict(), "asked": {"contexts": 8}})
    return folder


def write_run(out: Path, configs: Sequence[SAEConfig], steps: Sequence[int] = (0, 5, 9), finished: bool = True) -> Path:
    """run.json and log.jsonl."""
    described = {"train": TrainConfig(10, 8).to_dict(), "saes": [config.to_dict() for config in configs]}
    put(out / "run.json", {"config": described, "versions": {}, "git_commit": None, "finished": finished})
    numbers = {"loss": 2.0, "fve": 0.5, "dead": 0.1, "churn": 0.2}
    lines = [{"step": step, "sae": config.name, **numbers} for step in steps for config in configs]
    put(out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return out


def write_sweep(out: Path, model: str | None = "tiny", layer: int | None = 1, **shape: Any) -> Path:
    """A finished run with all evaluations; numbers differ from SAE to SAE."""
    configs = grid(**shape)
    write_run(out, configs)
    for i, config in enumerate(configs):
        fvu = 0.1 + 0.02 * (i // 2) + 0.004 * (i % 2)
        results = {
            "core": core(fvu, 60 - i, ce_recovered=1 - fvu / 2),
            "probing": probing(0.7 + 0.01 * (i * 7 % 11)),
            "absorption": absorption(0.3 - 0.02 * (i * 5 % 13)),
            "autointerp": autointerp(0.7 + 0.01 * (i * 3 % 7)),
        }
        write_sae(out / "saes" / str(config.name), config, model, layer, **results)
    return out
