"""Time the parts of a training step whose latents are divided over ranks, and count what the ranks exchange.

    python benchmarks/ranks.py --world 2 --m 16384 --batch 1024 --out ranks.jsonl       real processes over gloo
    python benchmarks/ranks.py --device cuda --m 4194304 --shards 8 --out ranks.jsonl    one rank of 8, its own work
    python benchmarks/ranks.py --device cuda --m 1048576 --shards 1 --out ranks.jsonl    one process, the baseline

With `--world`, that many processes share this machine (and its GPU) and exchange over gloo: it proves the path, its
exchange times are those of gloo. With `--shards` alone, one process does the work of one rank of so many. Counts are
then scaled as if the others had the same activations, and exchanges cost nothing.

Each line of `--out` is a JSON object. Fields of all: `part`, `d_sae` (of the whole SAE), `shards`, `batch`, `ms`
(median per step; null: not measured), `bytes` (what each rank contributes to the exchange per step; 0 for work), and
`d_in`, `k`, `method`, `device`, `path`, `exchange` (`none`, `simulated` or `gloo`). The parts:

    step              the whole step as it runs, with its exchanges; also `gib`, this rank's peak memory in training,
                      and `start_gib`, before it, when the start values are drawn
    largest           encode, this rank's own largest activations                            (GPU path)
    counts 0, ties    counts of these by value, and of those tied with the common cut        (GPU path)
    select            drop those below the common cut; order by latent                       (GPU path; CPU: all of it)
    decode            partial reconstructions                                                (GPU path)
    gradients         errors, gradients of this rank's latents                               (GPU path)
    adam              update of the weights                                                  (GPU path)
    update            decode, gradients and Adam together                                    (CPU)
    all_reduce        counts by value: integers, `bytes` is the size of the message
    all_gather        ties per token and small numbers: every rank receives `bytes` from each of the others
    ordered_sum       partial reconstructions and b_dec's gradient: a reduce-scatter and an all-gather of `bytes`

`messages` of the last three is their number per step. Parts are timed one by one, with a wait after each, in a second
pass; so they add up to a little more than `step`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

import sampled_sae as ss
from sampled_sae.method.latents import Shard
from sampled_sae.training.learner import Learner
from sampled_sae.utils.ranks import Group

METHODS: dict[str, Callable[..., Any]] = {"BatchTopK": ss.batchtopk, "TopK": ss.topk, "Matryoshka": ss.matryoshka}


class Clock:
    """Milliseconds of the parts of each step, and bytes and messages exchanged."""

    def __init__(self, device: torch.device):
        self.device, self.on = device, False
        self.ms: dict[str, list[float]] = defaultdict(list)
        self.bytes: dict[str, int] = defaultdict(int)
        self.messages: dict[str, int] = defaultdict(int)
        self.exchanged = 0.0

    def wait(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() * 1e3

    def time(self, part: str, work: Callable[[], Any]) -> Any:
        """What `work` returns; its time, without that of exchanges inside of it, is added to the part's."""
        if not self.on:
            return work()
        before, begin = self.exchanged, self.wait()
        found = work()
        self.ms[part][-1] += self.wait() - begin - (self.exchanged - before)
        return found

    def exchange(self, kind: str, part: Tensor, work: Callable[[], Any]) -> Any:
        """The same for an exchange."""
        if not self.on:
            return work()
        begin = self.wait()
        found = work()
        spent = self.wait() - begin
        self.exchanged += spent
        self.ms[kind][-1] += spent
        self.bytes[kind] += part.nbytes
        self.messages[kind] += 1
        return found


class Counted(Group):
    """A group of ranks whose exchanges are timed; without processes, it answers as if all ranks held the same."""

    clock: Clock

    def gather(self, x: Tensor) -> Tensor:
        return self.clock.exchange(
            "all_gather", x, lambda: self._do(Group.gather, x, lambda: torch.stack([x] * self.size))
        )

    def sum(self, x: Tensor) -> Tensor:
        return self.clock.exchange("all_reduce", x, lambda: self._do(Group.sum, x, lambda: x * self.size))

    def ordered_sum(self, x: Tensor) -> Tensor:
        # The messages inside of it are its own.
        real = Group(self.rank, self.size, self.process_group, self.over_cpu)
        return self.clock.exchange("ordered_sum", x, lambda: x if self.process_group is None else real.ordered_sum(x))

    def _do(self, real: Callable[..., Any], x: Tensor, pretended: Callable[[], Any]) -> Any:
        return pretended() if self.process_group is None else real(self, x)


def batches(d: int, size: int, device: torch.device, count: int = 4) -> list[Tensor]:
    """Tokens with a few directions each, of uneven strength."""
    generator = torch.Generator(device).manual_seed(0)
    directions = torch.randn(4 * d, d, generator=generator, device=device)
    made = []
    for _ in range(count):
        active = torch.rand(size, 4 * d, generator=generator, device=device) < 30 / (4 * d)
        made.append((active * torch.rand(size, 4 * d, generator=generator, device=device)) @ directions)
    return made


def measure(a: argparse.Namespace, group: Group, device: torch.device, exchange: str) -> list[dict[str, Any]]:
    """The lines of one rank."""
    clock = Clock(device)
    counted = Counted(group.rank, group.size, group.process_group, group.over_cpu)
    Counted.clock = clock
    config = METHODS[a.method](a.m, a.k)
    shard = Shard(counted if group.size > 1 else Group())
    learner = Learner(config, a.d, 10**6, 0, device, torch.float32, shard=shard)
    start = _peak(device)
    data = batches(a.d, a.batch, device)
    done = 0

    def step() -> None:
        nonlocal done
        learner.step(data[done % len(data)], done, measure=False)
        done += 1

    for _ in range(6):
        step()
    times = []
    for _ in range(a.steps):
        begin = clock.wait()
        step()
        times.append(clock.wait() - begin)
    gib = _peak(device)
    parts = _parts(learner, clock) if group.size > 1 else ()
    clock.on = True
    for _ in range(a.steps if parts else 0):
        for part in (*parts, "all_reduce", "all_gather", "ordered_sum"):
            clock.ms[part].append(0.0)
        step()
    shared = {"d_sae": a.m, "shards": group.size, "batch": a.batch, "d_in": a.d, "k": a.k, "method": a.method}
    shared |= {"device": _name(device), "path": learner.path.name, "exchange": exchange}
    lines = [{"part": "step", **shared, "ms": statistics.median(times), "bytes": 0, "gib": gib, "start_gib": start}]
    for part, spent in clock.ms.items():
        known = exchange != "simulated" or part in parts
        line = {"part": part, **shared, "ms": statistics.median(spent) if known else None, "bytes": 0}
        if part not in parts:
            line |= {"bytes": clock.bytes[part] // a.steps, "messages": clock.messages[part] / a.steps}
        lines.append(line)
    return lines


def _parts(learner: Learner, clock: Clock) -> tuple[str, ...]:
    """Time the parts of a learner's step path from now on; their names."""
    path: Any = learner.path
    if path.name == "fast":
        run = path._run
        path._run = lambda name, key, part: clock.time(name, lambda: run(name, key, part))
        return ("largest", "counts 0", "ties", "select", "decode", "gradients", "adam")
    for name in ("select", "update"):
        setattr(path, name, _timed(name, getattr(path, name), clock))
    return ("select", "update")


def _timed(name: str, work: Callable[..., Any], clock: Clock) -> Callable[..., Any]:
    return lambda *arguments: clock.time(name, lambda: work(*arguments))


def _peak(device: torch.device) -> float:
    """Peak memory in GiB since the last call; on a CPU, since the process began."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    peak = torch.cuda.max_memory_reserved(device) / 2**30
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def process(rank: int, a: argparse.Namespace, folder: str) -> None:
    """One of `--world` processes."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=a.world)
    lines = measure(a, Group(rank, a.world, dist.group.WORLD, over_cpu=True), torch.device(a.device), "gloo")
    if rank == 0:
        write(a.out, lines)
    dist.destroy_process_group()


def write(out: Path, lines: list[dict[str, Any]]) -> None:
    with out.open("a", encoding="utf-8") as file:
        for line in lines:
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to this file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--method", default="BatchTopK", choices=METHODS)
    parser.add_argument("--d", type=int, default=768)
    parser.add_argument("--m", type=int, default=65_536, help="d_sae of the whole SAE")
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--shards", type=int, default=1, help="do the work of one rank of so many")
    parser.add_argument("--world", type=int, default=1, help="start so many processes on this machine")
    a = parser.parse_args()
    if a.world > 1:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(process, (a, folder), nprocs=a.world)
        return
    exchange = "none" if a.shards == 1 else "simulated"
    write(a.out, measure(a, Group(0, a.shards), torch.device(a.device), exchange))


if __name__ == "__main__":
    main()
