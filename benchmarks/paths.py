"""Train SAEs on the fast path and on the plain path, on the same activations, and compare them.

python benchmarks/paths.py ACTIVATIONS.npy --m 65536 --k 60 --steps 2000 --out paths.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sampled_sae as ss
from sampled_sae.training.heldout import as_trained, by_threshold


def configs(m: int, k: int, lr: float) -> dict[str, ss.SAEConfig]:
    """The compared configurations, by name."""
    optimizer = ss.OptimizerConfig(lr=lr)
    return {
        "batchtopk": ss.batchtopk(m, k, optimizer=optimizer),
        "batchtopk, AuxK after 2M tokens": ss.batchtopk(
            m, k, optimizer=optimizer, auxk=ss.AuxKConfig(dead_after=2_000_000)
        ),
        "l2 l=100": ss.sampled(m, k, "l2", 100, optimizer=optimizer),
        "topk": ss.topk(m, k, optimizer=optimizer),
    }


def trained(config: ss.SAEConfig, path: str, x: Tensor, heldout: Tensor, steps: int, batch: int) -> dict[str, Any]:
    """Train on one path -> metrics on held-out tokens."""
    os.environ["SAMPLED_SAE_PATH"] = path
    begin = time.perf_counter()
    sae = ss.train(x, config, steps=steps, batch_size=batch, heldout=heldout, device=x.device, progress=False)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    cut, threshold = as_trained(sae, heldout, batch), by_threshold(sae, heldout, batch_size=batch)
    training = sae.cfg.metadata["training"]
    return {
        "path": training["path"],
        "fvu": 1 - cut.fve,
        "fvu_by_threshold": 1 - threshold.fve,
        "l0_by_threshold": threshold.l0,
        "dead": training["dead"],
        "heaviest_latent": float(threshold.frequency.max()),
        "seconds": seconds,
    }


def compare(x: Tensor, heldout: Tensor, m: int, k: int, steps: int, batch: int, lr: float) -> list[dict[str, Any]]:
    """x [n, d] on a GPU, heldout [n, d] -> one line per configuration and path."""
    lines: list[dict[str, Any]] = []
    for name, config in configs(m, k, lr).items():
        for path in ("fast", "plain"):
            lines.append({"config": name, **trained(config, path, x, heldout, steps, batch)})
            print(json.dumps(lines[-1]), flush=True)
        fast, plain = lines[-2:]
        print(f"{name}: FVU of the fast path / FVU of the plain path {fast['fvu'] / plain['fvu']:.4f}", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("activations", type=Path, help=".npy [tokens, d]; the last 65,536 tokens are held out")
    for name, default in (("m", 65_536), ("k", 60), ("steps", 2000), ("batch", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=ss.OptimizerConfig().lr)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    stored = torch.from_numpy(np.load(a.activations, mmap_mode="r"))
    lines = compare(stored[:-65_536].cuda(), stored[-65_536:].float(), a.m, a.k, a.steps, a.batch, a.lr)
    if a.out:
        a.out.write_text(json.dumps({"settings": {k: str(v) for k, v in vars(a).items()}, "runs": lines}, indent=1))


if __name__ == "__main__":
    main()
