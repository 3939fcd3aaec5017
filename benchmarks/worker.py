"""Time training steps of sampled-sae or of a peer in a separate process, controlled by step.py.

    python benchmarks/worker.py NAME D M K BATCH DEVICE THREADS

Prints "ready" or "missing: REASON". Then, for each line "N" on stdin, runs N steps and prints the seconds they took.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

Step = Callable[[Tensor, int], None]


def batches(d: int, batch: int, device: str, count: int = 8) -> list[Tensor]:
    """Sparse combinations of 4 d random directions, [batch, d] each, mean squared norm 1."""
    generator = torch.Generator(device).manual_seed(0)
    directions = torch.randn(4 * d, d, generator=generator, device=device)
    made = []
    for _ in range(count):
        fires = torch.rand(batch, 4 * d, generator=generator, device=device) < 0.02
        x = (fires * torch.rand(fires.shape, generator=generator, device=device)) @ directions
        made.append(x / x.square().sum(1).mean().sqrt())
    return made


def our_configs(m: int, k: int) -> dict[str, object]:
    """The timed configurations of sampled-sae, by name."""
    import sampled_sae as ss
    from sampled_sae.method.config import AuxKConfig, PoolConfig, SAEConfig, Scope

    return {
        "BatchTopK": ss.batchtopk(m, k),
        "TopK": ss.topk(m, k),
        "Matryoshka BatchTopK": ss.matryoshka(m, k),
        "JumpReLU": ss.jumprelu(m, k),
        "l2 l=5": ss.sampled(m, k, "l2", 5),
        "l2 l=100": ss.sampled(m, k, "l2", 100),
        "entropy l=100": ss.sampled(m, k, "entropy", 100),
        "preactivation_l2 l=5": ss.sampled(m, k, "preactivation_l2", 5),
        "preactivation_l2 l=100": ss.sampled(m, k, "preactivation_l2", 100),
        "uniform l=10": ss.sampled(m, k, "uniform", 10),
        "uniform 50%": ss.released(m, k, "uniform", 0.5, at=1.0),
        "groups of 512": SAEConfig(m, k, pool=PoolConfig(scope=Scope(tokens=512))),
        # Some latents count as dead from the start, see `ours`.
        "BatchTopK, AuxK with half dead": ss.batchtopk(m, k, auxk=AuxKConfig(dead_after=10**8)),
        "BatchTopK, AuxK with a tenth dead": ss.batchtopk(m, k, auxk=AuxKConfig(dead_after=10**8)),
        "16 SAEs, each": ss.batchtopk(m, k),
    }


def ours(name: str, d: int, m: int, k: int, device: str) -> Step:
    """A step of sampled-sae without the measurements of the log, as in most steps of a run."""
    from sampled_sae.training.learner import Learner

    copies = 16 if name.startswith("16") else 1
    config = our_configs(m, k)[name.removesuffix(", plain path")]
    learners = [Learner(config, d, 10**6, seed, torch.device(device), torch.float32) for seed in range(copies)]
    if name.endswith("dead"):
        every, learner = 2 if "half" in name else 10, learners[0]
        with torch.no_grad():  # below the cut, so they never fire
            learner.weights.W_enc[::every] *= 0.02
        learner.path.load_state({})
        learner.tokens_since_fired[::every] = learner.tokens_seen = 10**9

    def step(x: Tensor, i: int) -> None:
        for learner in learners:
            learner.step(x, i, measure=False)

    return step


def main() -> None:
    name = sys.argv[1]
    d, m, k, batch = map(int, sys.argv[2:6])
    device, threads = sys.argv[6], int(sys.argv[7])
    torch.set_num_threads(threads)
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    data = batches(d, batch, device)
    try:
        if name.startswith("sampled-sae "):
            step = ours(name.removeprefix("sampled-sae "), d, m, k, device)
        else:
            from peers import PEERS

            step = PEERS[name](d, m, k, batch, device).step
    except (ImportError, RuntimeError) as error:
        print(f"missing: {error}".splitlines()[0], flush=True)
        return
    done = 0
    for _ in range(4):  # compiles kernels and records graphs
        step(data[done % len(data)], done)
        done += 1
    wait()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    print("ready", flush=True)
    for line in sys.stdin:
        wait()
        begin = time.perf_counter()
        for _ in range(int(line)):
            step(data[done % len(data)], done)
            done += 1
        wait()
        seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_reserved() - sum(x.nbytes for x in data) if device == "cuda" else 0
        print(json.dumps({"seconds": seconds, "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    main()
