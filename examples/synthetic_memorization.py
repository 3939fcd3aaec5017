"""Why is the FVE on fresh samples negative after training on a small fixed set? A smaller `paper-finite`, on a CPU.

    python examples/synthetic_memorization.py --out memorization.json

With the same number of latents and of passes per training sample as `sampled-sae synthetic --preset paper-finite`, the
script trains SAEs and measures them on fresh samples with several selections: one threshold for all samples, calibrated
on fresh or on training samples, exactly K latents per sample, and the threshold with only the latents that fire on
training samples.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sampled_sae import SAE, train
from sampled_sae.data.synthetic import SyntheticData
from sampled_sae.experiments.synthetic import EXPERIMENTS, grid
from sampled_sae.training.heldout import as_trained, calibrated_threshold
from sampled_sae.utils.files import write_json

FULL = EXPERIMENTS["paper-finite"]
SMALL = replace(FULL, data=replace(FULL.data, d=64, features=256), d_sae=8192, k=15, batch_size=512, samples=1250)
METHODS = ("batchtopk", "topk", "sampled:score=l2,l=20")
FRESH = 4096


def measured(sae: SAE, x: Tensor, codes: Tensor) -> dict[str, float]:
    """FVE, mean and largest L0, norm of the reconstruction over that of x, error of the tenth of the largest norms."""
    error = (x - codes @ sae.W_dec - sae.b_dec).square().sum(1)
    variance = (x - x.mean(0)).square().sum()
    l0 = (codes > 0).sum(1)
    largest = x.norm(dim=1).topk(len(x) // 10).indices
    return {
        "fve": float(1 - error.sum() / variance),
        "l0": float(l0.double().mean()),
        "l0_max": int(l0.max()),
        "norm": float((codes @ sae.W_dec).norm() / (x - sae.b_dec).norm()),
        "error_of_largest_tenth": float(error[largest].sum() / error.sum()),
    }


@torch.no_grad()
def selections(sae: SAE, fixed: Tensor, calibration: Tensor, fresh: Tensor, k: int) -> dict[str, Any]:
    """The SAE on fresh samples with each selection, and with its training-time selection on both sets."""
    batch = SMALL.batch_size
    used = as_trained(sae, fixed, batch).frequency > 0
    z = sae.pre_activations(fresh).relu()
    theta, of_training = (calibrated_threshold(sae, x, k) for x in (calibration, fixed))
    inside = sae.pre_activations(calibration).relu() * used
    of_used = inside.flatten().topk(k * len(inside) + 1).values[-1]
    largest = z.topk(k, dim=1)
    codes = {
        "threshold": z * (z > theta),
        "threshold of training samples": z * (z > of_training),
        "K per sample": torch.zeros_like(z).scatter_(1, largest.indices, largest.values),
        "threshold, latents that fire in training": z * used * (z > of_used),
    }
    return {
        "fve_train": as_trained(sae, fixed, batch).fve,
        "fve_fresh": as_trained(sae, fresh, batch).fve,
        "latents_that_fire_in_training": int(used.sum()),
        "firings_of_others": float((codes["threshold"][:, ~used] > 0).sum() / (codes["threshold"] > 0).sum()),
        **{name: measured(sae, fresh, own) for name, own in codes.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=SMALL.steps)
    parser.add_argument("--out", type=Path, help="JSON file for what is printed")
    given = parser.parse_args()
    data = SyntheticData(SMALL.data)
    fixed, calibration, fresh = data.fixed(SMALL.samples or 0), *data.batch(0, 2 * FRESH, split="heldout").chunk(2)
    cells = {cell.label: replace(cell.config, seed=0, name=cell.name) for cell in grid(SMALL) if cell.label in METHODS}
    saes = train(
        fixed,
        list(cells.values()),
        steps=given.steps,
        batch_size=SMALL.batch_size,
        heldout=calibration,
        input_norm="none",
        device="cpu",
    )
    found = {label: selections(sae, fixed, calibration, fresh, SMALL.k) for label, sae in zip(cells, saes, strict=True)}
    for label, one in found.items():
        print(label)
        for name, value in one.items():
            print(f"    {name}: {value}")
    if given.out:
        about = {"d": SMALL.data.d, "features": SMALL.data.features, "d_sae": SMALL.d_sae, "k": SMALL.k}
        about |= {"samples": SMALL.samples, "steps": given.steps, "batch_size": SMALL.batch_size}
        write_json(given.out, {"setting": about, "saes": found})


if __name__ == "__main__":
    main()
