"""Time per step of the paper's sweep on one stream: four scores at twelve multipliers, and BatchTopK.

python benchmarks/sweep.py --steps 60 --out sweep.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from worker import batches

import sampled_sae as ss
from sampled_sae.training.learner import Learner

SCORES = ("l2", "squared_l2", "entropy", "uniform")
MULTIPLIERS = (1, 3, 4, 5, 10, 20, 30, 40, 50, 60, 70, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("d", 768), ("m", 65_536), ("k", 60), ("batch", 4096), ("steps", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=float, default=25e6, help="length of the whole sweep")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    device = torch.device("cuda")
    configs = [ss.batchtopk(a.m, a.k)] + [ss.sampled(a.m, a.k, s, l) for s in SCORES for l in MULTIPLIERS]
    data = batches(a.d, a.batch, "cuda")
    begin = time.perf_counter()
    learners = [Learner(c, a.d, 6103, 0, device, torch.float32) for c in configs]
    for step in range(4):  # compiles and records
        for learner in learners:
            learner.step(data[step], step, measure=False)
    torch.cuda.synchronize()
    setup = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for step in range(4, 4 + a.steps):
        for learner in learners:
            learner.step(data[step % len(data)], step, measure=step % 50 == 0)
    torch.cuda.synchronize()
    each = (time.perf_counter() - begin) / a.steps
    steps = int(a.tokens // a.batch)
    figures = {
        "saes": len(learners),
        "setup_seconds": setup,
        "ms_a_step_of_all": each * 1e3,
        "ms_a_step_of_one": each * 1e3 / len(learners),
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30,
        "measured_steps": a.steps,
        "steps_of_the_sweep": steps,
        "minutes_of_the_sweep": steps * each / 60,
    }
    print(json.dumps(figures, indent=1))
    if a.out:
        a.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
