"""Time per step against d_sae (m), d_in (d), batch size (B) and K, with a lower bound from the hardware.

    python benchmarks/growth.py --out growth.json

The lower bound is the time, at this machine's measured rates, of the encoder's product, one read of Z (if there is a
selection from Z), and one pass of Adam over both matrices with their gradients and 16-bit copies.
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

BASE = {"m": 65_536, "d": 768, "B": 4096, "K": 60}
AXES = {
    "m": (16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576),
    "d": (512, 768, 1024, 2048, 3072, 4096),
    "B": (512, 1024, 2048, 4096, 8192, 16_384),
    "K": (15, 30, 60, 120, 240),
}


def rates() -> tuple[float, float]:
    """Bytes per second of a copy, operations per second of a product in bfloat16."""
    big = torch.rand(2**28, device="cuda")
    other = torch.empty_like(big)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * big.nbytes / seconds(lambda: other.copy_(big)), 2 * 8192**3 / seconds(lambda: a @ a)


def seconds(work, repeat: int = 10) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeat):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeat


def floor(kind: str, m: int, d: int, B: int, K: int, bandwidth: float, speed: float) -> float:
    """Lower bound of a step, in seconds."""
    encoded = {"uniform l=10": 10 * K, "l2 l=5": m + 5 * K}.get(kind, m)
    product = 2 * B * encoded * d / speed
    read = 0.0 if kind == "uniform l=10" else 2 * B * m / bandwidth
    touched = {"uniform l=10": 10 * K, "l2 l=5": 5 * K}.get(kind, min(m, K * B))
    adam = (2 * m * d * 26 + 2 * touched * d * 8) / bandwidth
    return product + read + adam


def step_ms(kind: str, m: int, d: int, B: int, K: int) -> dict[str, float]:
    """Milliseconds and peak memory of one step."""
    make = {
        "BatchTopK": lambda: ss.batchtopk(m, K),
        "TopK": lambda: ss.topk(m, K),
        "l2 l=5": lambda: ss.sampled(m, K, "l2", 5),
        "uniform l=10": lambda: ss.sampled(m, K, "uniform", 10),
    }
    torch.cuda.empty_cache()
    data = batches(d, B, "cuda", count=4)
    learner = Learner(make[kind](), d, 10**6, 0, torch.device("cuda"), torch.float32)
    done = 0

    def step() -> None:
        nonlocal done
        learner.step(data[done % 4], done, measure=False)
        done += 1

    for _ in range(6):
        step()
    torch.cuda.reset_peak_memory_stats()
    once = seconds(step, 5)
    return {
        "ms": seconds(step, max(5, min(60, int(0.3 / once)))) * 1e3,
        "gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", default="BatchTopK,TopK,l2 l=5,uniform l=10")
    a = parser.parse_args()
    bandwidth, speed = rates()
    result = {"bytes_a_second": bandwidth, "operations_a_second": speed, "base": BASE, "points": []}
    for axis, values in AXES.items():
        for value in values:
            for kind in a.kinds.split(","):
                shape = BASE | {axis: value}
                low = floor(kind, **shape, bandwidth=bandwidth, speed=speed) * 1e3
                point = {"axis": axis, "kind": kind, **shape, **step_ms(kind, **shape), "floor_ms": low}
                result["points"].append(point)
                print(json.dumps(point), flush=True)
                a.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
