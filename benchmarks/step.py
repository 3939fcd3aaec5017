"""Time one training step of sampled-sae and of its peers in one run.

    make bench                                                     two CPU cores, a small shape
    python benchmarks/step.py --device cuda --d 768 --m 65536 --k 60 --batch 4096     the paper's shape

Each program runs in a separate process on the same data. Rounds alternate between the programs, so that a change in
the machine's speed affects all of them. A round is a sequence of steps of about 0.4 s (`--seconds`); the median round
counts. Peers that are not installed are named and left out: tests/peers/setup.sh installs two of them,
benchmarks/carry_peers.sh downloads all three for a machine without internet (add its folder to PYTHONPATH).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OURS_CPU = ("BatchTopK", "TopK", "l2 l=5", "uniform l=10")
OURS_GPU = (
    *("BatchTopK", "TopK", "l2 l=5", "l2 l=100", "entropy l=100", "preactivation_l2 l=5", "preactivation_l2 l=100"),
    *("uniform l=10", "uniform 50%", "groups of 512", "BatchTopK, AuxK with half dead", "16 SAEs, each"),
    "BatchTopK, plain path",
)
PEERS_CPU = ("dictionary_learning BatchTopK, fp32",)
PEERS_GPU = (
    *("SAELens BatchTopK, autocast", "SAELens BatchTopK, fp32"),
    *("dictionary_learning BatchTopK, bf16 autocast", "dictionary_learning BatchTopK, fp32"),
    *("sparsify TopK, bf16", "sparsify TopK, bf16, fused Adam"),
)


def python_for(name: str) -> str:
    """The interpreter of the environment in which the program is installed."""
    own = ROOT / ".peers" / name.split()[0].lower() / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def start(name: str, arguments: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | ({"SAMPLED_SAE_PATH": "plain"} if name.endswith("plain path") else {})
    command = [python_for(name), str(ROOT / "benchmarks" / "worker.py"), name, *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


def answer(worker: subprocess.Popen[str], question: str | None) -> str:
    assert worker.stdin is not None and worker.stdout is not None
    if question is not None:
        worker.stdin.write(question + "\n")
        worker.stdin.flush()
    return worker.stdout.readline().strip()


def running(names: list[str], arguments: list[str]) -> dict[str, subprocess.Popen[str]]:
    """Start all workers; print which are missing."""
    workers = {name: start(name, arguments) for name in names}
    with ThreadPoolExecutor() as threads:
        greetings = dict(zip(workers, threads.map(lambda w: answer(w, None), workers.values()), strict=True))
    for name, greeting in greetings.items():
        if greeting != "ready":
            print(f"{name}: left out ({greeting or 'it stopped'})", file=sys.stderr)
    return {name: worker for name, worker in workers.items() if greetings[name] == "ready"}


def timed(workers: dict[str, subprocess.Popen[str]], rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Milliseconds per step of each worker, by round."""
    figures: dict[str, dict[str, Any]] = {name: {"rounds": []} for name in workers}
    length = dict.fromkeys(workers, 2)
    for number in range(rounds + 2):  # the first two warm up and set the length of a round
        for name, worker in workers.items():
            reply = json.loads(answer(worker, str(length[name])))
            step = reply["seconds"] / length[name]
            length[name] = max(2, round(seconds / step))
            if number > 1:
                figures[name]["rounds"].append(step * 1e3 / (16 if "16 SAEs" in name else 1))
                figures[name]["peak_gib"] = reply["peak_bytes"] / 2**30
    for figure in figures.values():
        figure["ms"] = statistics.median(figure["rounds"])
    return figures


def show(figures: dict[str, dict[str, Any]], gpu: bool) -> None:
    peers = [name for name in figures if not name.startswith("sampled-sae")]
    for name, figure in figures.items():
        low, high = min(figure["rounds"]), max(figure["rounds"])
        memory = f"  {figure['peak_gib']:5.2f} GiB" if gpu else ""
        print(f"{name:48s} {figure['ms']:9.3f} ms per step ({low:.3f} to {high:.3f}){memory}")
    for name in ("BatchTopK", "TopK"):
        mine = figures.get(f"sampled-sae {name}")
        for peer in peers:
            if mine and f" {name}" in peer:
                print(f"our {name} is {figures[peer]['ms'] / mine['ms']:.1f} times as fast as {peer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("d", 512), ("m", 16_384), ("k", 32), ("batch", 2048), ("threads", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=0.4, help="length of a round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="only names that contain this text")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    a = parser.parse_args()
    gpu = a.device == "cuda"
    names = [f"sampled-sae {name}" for name in (OURS_GPU if gpu else OURS_CPU)] + list(PEERS_GPU if gpu else PEERS_CPU)
    workers = running(
        [name for name in names if a.only in name],
        [str(n) for n in (a.d, a.m, a.k, a.batch)] + [a.device, str(a.threads)],
    )
    figures = timed(workers, a.rounds, a.seconds)
    print(f"d={a.d} m={a.m} K={a.k} B={a.batch}, {a.device}, fp32 weights, median of {a.rounds} rounds")
    show(figures, gpu)
    for worker in workers.values():
        worker.kill()
    if a.out:
        a.out.write_text(json.dumps({"settings": vars(a) | {"out": str(a.out)}, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
