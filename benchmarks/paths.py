"""Train one SAE by the fast path and one by the plain path on the same real activations, and compare them.

python benchmarks/paths.py ACTIVATIONS.npy --m 65536 --k 60 --steps 2000 --out paths.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch

import sampled_sae as ss
from sampled_sae.evals.reconstruction import as_trained, by_threshold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("activations", type=Path, help=".npy [tokens, d]; the last 65,536 tokens are held out")
    for name, default in (("m", 65_536), ("k", 60), ("steps", 2000), ("batch", 4096), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--configs", default="batchtopk,topk,l2-l100")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    stored = torch.from_numpy(np.load(a.activations, mmap_mode="r"))
    x, heldout = stored[:-65_536].to(a.device), stored[-65_536:].float()
    optimizer = ss.OptimizerConfig(lr=a.lr)
    made = {
        "batchtopk": ss.batchtopk(a.m, a.k, optimizer=optimizer),
        "topk": ss.topk(a.m, a.k, optimizer=optimizer),
        "l2-l100": ss.sampled(a.m, a.k, "l2", 100, optimizer=optimizer),
    }
    results = []
    for name in a.configs.split(","):
        for path in ("fast", "plain"):
            os.environ["SAMPLED_SAE_PATH"] = path
            begin = time.perf_counter()
            options = {"steps": a.steps, "batch_size": a.batch, "seed": a.seed, "device": a.device, "progress": False}
            (sae,) = ss.train(x, made[name], heldout=heldout, **options)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            trained, threshold = as_trained(sae, heldout, a.batch), by_threshold(sae, heldout, batch_size=a.batch)
            figures = {"fvu": 1 - trained.fve, "fvu_threshold": 1 - threshold.fve, "l0_threshold": threshold.l0}
            used, dead = sae.metadata["training"]["path"], sae.metadata["training"]["dead"]
            results.append({"config": name, "path": used, **figures, "dead": dead, "seconds": seconds})
            print(json.dumps(results[-1]), flush=True)
    for fast, plain in zip(results[::2], results[1::2], strict=True):
        print(f"{fast['config']}: FVU of fast over plain {fast['fvu'] / plain['fvu']:.4f}")
    if a.out:
        a.out.write_text(json.dumps({"settings": {k: str(v) for k, v in vars(a).items()}, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
