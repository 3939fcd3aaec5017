"""What would a perfect dictionary do? Start BatchTopK from the true features and train on.

    python examples/synthetic_ceiling.py --steps 1500 --out ceiling.json

Half of the latents start as the true features with both signs, encoder and decoder alike. If training kept
them and gained by it, the low-amplitude features would be within reach of better training. The script
prints the held-out FVE and, for each bucket, the share of its latents that still fire and the amplitude
with which a feature stands out against the others in the encoder.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from sampled_sae import batchtopk
from sampled_sae.data.synthetic import BUCKETS, SyntheticData
from sampled_sae.experiments.synthetic import EXPERIMENTS
from sampled_sae.method.presets import paper_recipe
from sampled_sae.training.heldout import by_threshold, calibrated_threshold
from sampled_sae.training.learner import Learner
from sampled_sae.utils.files import write_json


def from_truth(data: SyntheticData, latents: int, k: int, lr: float, steps: int) -> Learner:
    """A BatchTopK learner whose first latents are the true features, plus and minus."""
    config = batchtopk(latents, k, **paper_recipe(lr))
    learner = Learner(config, data.config.d, steps, 0, data.dictionary.device, torch.float32)
    truth = torch.cat([data.dictionary, -data.dictionary])
    learner.weights.W_dec[: len(truth)] = truth
    learner.weights.W_enc[: len(truth)] = truth
    return learner


def report(learner: Learner, data: SyntheticData, k: int, step: int, heldout: torch.Tensor) -> dict[str, Any]:
    """Held-out FVE at the threshold, and the share of each bucket's true latents that fire."""
    calibration, test = heldout.chunk(2)
    sae = learner.sae()
    sae.threshold.fill_(calibrated_threshold(sae, calibration, k))
    result = by_threshold(sae, test)
    fires = (result.frequency[: 2 * data.config.features] > 1e-4).view(2, -1).float().mean(0)
    shares = {name: float(fires[data.bucket == b].mean()) for b, name in enumerate(BUCKETS)}
    printed = "  ".join(f"{name} {share:.2f}" for name, share in shares.items())
    print(f"step {step:5d}: held-out FVE {result.fve:.4f}, true latents that fire: {printed}", flush=True)
    return {"step": step, "fve": result.fve, "fire": shares}


def interference(data: SyntheticData, n: int = 8192) -> dict[str, Any]:
    """How strongly a feature's own coefficient shows in the product with x, against everything else."""
    x, codes = data.sample_with_codes(n, torch.Generator(data.dictionary.device).manual_seed(0))
    rest = x @ data.dictionary.T - codes
    found = {}
    for b, name in enumerate(BUCKETS):
        mine = data.bucket == b
        own, others = float(codes[:, mine][codes[:, mine] != 0].std()), float(rest[:, mine].std())
        print(f"{name}: a coefficient has size {own:.2f}, what the others add to it {others:.2f}")
        found[name] = {"own": own, "others": others}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file for what is printed")
    a = parser.parse_args()
    table = EXPERIMENTS["paper-table"]
    data = SyntheticData(table.data, device=a.device)
    heldout = data.batch(0, 32_768, split="heldout")
    found: dict[str, Any] = {"steps": a.steps, "lr": a.lr, "interference": interference(data), "training": []}
    learner = from_truth(data, table.d_sae, table.k, a.lr, a.steps)
    for step in range(a.steps):
        if step % max(1, a.steps // 5) == 0:
            found["training"].append(report(learner, data, table.k, step, heldout))
        learner.step(data.batch(step, table.batch_size), step, measure=False)
    found["training"].append(report(learner, data, table.k, a.steps, heldout))
    if a.out:
        write_json(a.out, found)


if __name__ == "__main__":
    main()
