"""Time one training step, ours beside dictionary_learning's, in one run.

    make bench          the peers' environments are made first
    python benchmarks/step.py --d 512 --m 16384 --k 32 --batch 2048

Each side runs in a process of its own with the same data; rounds alternate between the two, so that a
change in the machine's speed hits both. The median of all timed steps counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PEER = ROOT / ".peers" / "dictionary_learning" / "bin" / "python"

WORKER = """
import json, sys, time, torch
side, d, m, k, batch, threads, device = sys.argv[1], *map(int, sys.argv[2:7]), sys.argv[7]
torch.set_num_threads(threads)
generator = torch.Generator().manual_seed(0)
directions = torch.randn(2 * d, d, generator=generator)
fires = [torch.rand(batch, 2 * d, generator=generator) < 0.02 for _ in range(4)]
data = [((f * torch.rand(f.shape, generator=generator)) @ directions).to(device) for f in fires]
if side == "ours":
    import sampled_sae as ss
    from sampled_sae.learner import Learner
    made = {"batchtopk": ss.batchtopk(m, k), "topk": ss.topk(m, k), "l2 l=5": ss.sampled(m, k, "l2", 5),
            "uniform l=10": ss.sampled(m, k, "uniform", 10)}
    learners = {n: Learner(c, d, 10**6, 0, torch.device(device), torch.float32) for n, c in made.items()}
    steps = {n: (lambda x, i, l=l: l.step(x, i, measure=False)) for n, l in learners.items()}
else:
    from dictionary_learning.trainers.batch_top_k import BatchTopKTrainer
    trainer = BatchTopKTrainer(steps=10**6, activation_dim=d, dict_size=m, k=k, layer=0, lm_name="x", lr=3e-4,
                               device=device, seed=0)
    steps = {"batchtopk": lambda x, i: trainer.update(i, x)}
wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
count = {n: 0 for n in steps}
print("ready", flush=True)
for line in sys.stdin:  # one line a round: the number of steps to time
    times = {n: [] for n in steps}
    for name, step in steps.items():
        for _ in range(int(line)):
            wait(); begin = time.perf_counter()
            step(data[count[name] % 4], count[name]); wait()
            times[name].append(time.perf_counter() - begin)
            count[name] += 1
    print(json.dumps(times), flush=True)
"""


def start(python: str | Path, side: str, sizes: list[str]) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [str(python), "-c", WORKER, side, *sizes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=None,
    )
    assert worker.stdout is not None
    if worker.stdout.readline().strip() != "ready":
        sys.exit(f"{side} did not start")
    return worker


def time_round(worker: subprocess.Popen[str], steps: int) -> dict[str, list[float]]:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(f"{steps}\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("d", 512), ("m", 16_384), ("k", 32), ("batch", 2048), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    a = parser.parse_args()
    if not PEER.exists():
        sys.exit("the peer is not installed: bash tests/peers/setup.sh")
    sizes = [str(n) for n in (a.d, a.m, a.k, a.batch, a.threads)] + [a.device]
    workers = {
        "sampled-sae": start(sys.executable, "ours", sizes),
        "dictionary_learning": start(PEER, "peer", sizes),
    }
    times: dict[str, list[float]] = {}
    for number in range(a.rounds + 1):  # the first round warms up
        for side, worker in workers.items():
            for name, seconds in time_round(worker, a.steps).items():
                if number:
                    times.setdefault(f"{side} {name}", []).extend(seconds)
    medians = {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}
    peer = medians["dictionary_learning batchtopk"]
    print(f"d={a.d} m={a.m} K={a.k} B={a.batch}, {a.device}, {a.threads} threads, fp32; ms a step, median")
    for name, ms in medians.items():
        low, high = min(times[name]) * 1e3, max(times[name]) * 1e3
        print(f"{name:32s} {ms:9.1f}   ({low:.1f} to {high:.1f})   {peer / ms:5.2f} times dictionary_learning's speed")
    if a.out:
        a.out.write_text(json.dumps({"settings": vars(a) | {"out": str(a.out)}, "ms": medians}, indent=2) + "\n")


if __name__ == "__main__":
    main()
