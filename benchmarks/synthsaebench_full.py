"""The preset `synthsaebench` within a time limit: several methods on samples that are made once and kept on the GPU.

    python benchmarks/synthsaebench_full.py --seconds 120 --seed 0 --seed 1 --out synthsaebench.json

The methods of `METHODS` are trained with the preset's recipe, BatchTopK also with the package's defaults. The file has
the format of `sampled-sae synthetic` and is written again after each training; a training that would not end in time
is left out, and one that takes longer than expected is given up and named under `stopped`. The first training makes
the samples, 63 GB in float32, while the next ones read them. Matchings take seconds each and run beside the training.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from sampled_sae import Callback, train
from sampled_sae.config import write_file
from sampled_sae.data.stream import Endless
from sampled_sae.data.synth_sae_bench import SynthSAEBench, SynthSAEBenchConfig
from sampled_sae.experiments.synthetic import EXPERIMENTS, Cell, Experiment, Measurement, grid
from sampled_sae.method.config import AuxKConfig
from sampled_sae.method.presets import batchtopk
from sampled_sae.training.run import Run
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.system import git_commit, usable_device, versions

START = time.monotonic()
METHODS = (
    *("batchtopk", "topk", "topk_then_batchtopk:until=0.7"),
    *("sampled:score=l2,l=30", "sampled:score=l2,l=100", "released"),
)
TOGETHER = 3
"""Methods in the training that makes the samples: a GPU makes them while the host is busy with several SAEs."""
CHUNK = 16_384
AFTER, SPARE = 500, 4.0
"""Steps after which speed is measured, when most kernels are compiled, and seconds to compile and to measure SAEs."""


class Kept(Endless):
    """Samples that are made when they are first read, and kept."""

    def __init__(self, made: SynthSAEBench, samples: int) -> None:
        self.made, self.number = made, 0
        self.rows = torch.empty(-(-samples // CHUNK) * CHUNK, made.config.d, device=made.device)

    def batch(self, index: int, size: int, split: Any = "train") -> Tensor:
        if split == "heldout":
            return self.made.batch(index, size, split)
        while self.number < (index + 1) * size:
            self.rows[self.number : self.number + CHUNK] = self.made.batch(self.number // CHUNK, CHUNK)
            self.number += CHUNK
        return self.rows[index * size : (index + 1) * size]


class Watch(Callback):
    """Gives up when the time is over, and measures the speed."""

    def __init__(self, end: float) -> None:
        self.end, self.since, self.first, self.step, self.ms = end, 0.0, 0, 0, 0.0

    def on_steps(self, run: Run, step: int, stats: Any) -> None:
        self.step = step + 1
        if step % 100 == 0 and time.monotonic() > self.end:
            raise Interrupted(f"time is over at step {step}")
        if self.step in (1, AFTER, run.shared.steps):
            if run.device.type == "cuda":
                torch.cuda.synchronize()
            now, steps = time.monotonic(), self.step - self.first
            self.ms = 1000 * (now - self.since) / steps / len(run.learners)
            self.since, self.first = now, self.step


class Job(NamedTuple):
    """SAEs that are trained together."""

    cells: list[Cell]
    norm: str  # of the inputs
    seed: int


def jobs(experiment: Experiment, seeds: list[int]) -> list[Job]:
    """The most important ones first: a seed of each method, then the next seed."""
    cells = grid(replace(experiment, only=METHODS))
    cells.sort(key=lambda cell: METHODS.index(cell.label))
    own = batchtopk(experiment.d_sae, experiment.k, auxk=AuxKConfig(dead_after=experiment.auxk.dead_after))
    defaults = Job([Cell("batchtopk", "batchtopk, default recipe", own)], "sqrt_d_in", seeds[0])
    found = [Job(cells[:TOGETHER], "none", seeds[0]), defaults]
    found += [Job([cell], "none", seeds[0]) for cell in cells[TOGETHER:]]
    for seed in seeds[1:]:
        found += [Job(cells[:1], "none", seed), defaults._replace(seed=seed)]
        found += [Job([cell], "none", seed) for cell in cells[1:]]
    return found


class Benchmark:
    """Trains and measures jobs, and writes what is known after each."""

    def __init__(self, experiment: Experiment, device: torch.device, end: float, out: Path) -> None:
        assert isinstance(experiment.data, SynthSAEBenchConfig)
        self.experiment, self.end, self.out = experiment, end, out
        self.data = SynthSAEBench(experiment.data, device)
        self.samples = Kept(self.data, experiment.steps * experiment.batch_size)
        self.measure = Measurement(self.data, experiment)
        self.heldout = self.samples.batch(0, experiment.heldout, "heldout")
        self.pool, self.matchings = ThreadPoolExecutor(4), dict[str, Future[dict[str, Any]]]()
        self.ms: list[float] = []  # per step of one SAE, of each training
        self.results: dict[str, Any] = {
            "preset": "synthsaebench",
            "data": {"config": experiment.data.to_dict(), **self.data.statistics()},
            "train": {name: getattr(experiment, name) for name in ("steps", "batch_size", "samples", "normalize")},
            "device": str(device),
            "versions": versions(),
            "git_commit": git_commit(),
            "sample_ms": self.sample_ms(),
            "stopped": [],
            "saes": [],
        }

    def sample_ms(self) -> float:
        """Milliseconds to make the samples of a step."""
        begun, chunks = time.monotonic(), min(4, len(self.samples.rows) // CHUNK)
        for chunk in range(chunks):
            self.samples.batch(chunk, CHUNK)
        self.samples.rows[:1].cpu()  # waits for the device
        return 1000 * (time.monotonic() - begun) / (chunks * CHUNK / self.experiment.batch_size)

    def run(self, job: Job) -> None:
        names = [f"{cell.name}-s{job.seed}" for cell in job.cells]
        expected = max(self.ms[1:] or self.ms, default=0.0) / 1000 * self.experiment.steps * len(job.cells)
        if time.monotonic() + expected + SPARE > self.end:
            self.results["stopped"].append({"names": names, "step": 0})
            return
        watch, making = Watch(self.end), not self.ms
        try:
            saes = train(
                self.samples,
                [replace(c.config, seed=job.seed, name=name) for c, name in zip(job.cells, names, strict=True)],
                steps=self.experiment.steps,
                batch_size=self.experiment.batch_size,
                device=self.data.device,
                heldout=self.heldout,
                input_norm=job.norm,
                log_every=1000,
                progress=False,
                callbacks=[watch],
            )
        except Interrupted:
            self.results["stopped"].append({"names": names, "step": watch.step})
            return
        # The first training makes samples, some of it beside the host's work for the SAEs.
        self.ms.append(watch.ms - making * self.results["sample_ms"] / len(saes))
        for cell, name, sae in zip(job.cells, names, saes, strict=True):
            about = {"name": name, "label": cell.label, "group": cell.group, "l": cell.l, "seed": job.seed}
            numbers, frequency = self.measure.firing(sae)
            speed = {"step_ms": watch.ms, "input_norm": job.norm, "together": len(saes)}
            assert sae.cfg.training is not None
            self.results["saes"].append(about | {"config": sae.cfg.training.to_dict()} | numbers | speed)
            decoder = sae.W_dec.detach().cpu()
            self.matchings[name] = self.pool.submit(self.matched, name, decoder, frequency)

    def matched(self, name: str, decoder: Tensor, frequency: Tensor) -> dict[str, Any]:
        try:
            return self.measure.matched(decoder, frequency)
        except UserError as error:  # without scipy: the matching can be made elsewhere
            torch.save(decoder.half(), self.out.with_name(f"{name}.pt"))
            return {"mcc": None, "note": str(error)}

    def write(self, wait: bool = False) -> None:
        """The file, with the matchings that are there."""
        for sae in self.results["saes"]:
            if wait or self.matchings[sae["name"]].done():
                sae.update(self.matchings[sae["name"]].result())
        self.results["elapsed"] = time.monotonic() - START
        write_file(self.out, "synthetic", self.results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True, help="time limit, without the last matchings")
    parser.add_argument("--seed", type=int, action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, help="default: those of the preset")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--device")
    args = parser.parse_args()
    experiment = EXPERIMENTS["synthsaebench"]
    if args.tiny:
        data = SynthSAEBenchConfig(d=64, features=512, roots=4)
        experiment = replace(experiment, data=data, d_sae=128, k=4, steps=1000, heldout=8192)
    experiment = replace(experiment, steps=args.steps or experiment.steps)
    bench = Benchmark(experiment, usable_device(args.device), START + args.seconds, args.out)
    sample_ms = bench.results["sample_ms"]
    print(f"{time.monotonic() - START:.0f} s: ready; {sample_ms:.2f} ms per step for samples", flush=True)
    for job in jobs(experiment, args.seed):
        before = len(bench.results["saes"])
        bench.run(job)
        bench.write()
        for sae in bench.results["saes"][before:]:
            keys = ("fve_heldout", "fve_heldout_threshold", "dead", "step_ms")
            shown = " ".join(f"{key} {sae[key]:.4f}" for key in keys)
            print(f"{time.monotonic() - START:.0f} s: {sae['name']} {shown}", flush=True)
    bench.write(wait=True)
    for sae in bench.results["saes"]:
        print(sae["name"], "mcc", sae["mcc"], flush=True)
    print("not trained:", bench.results["stopped"], flush=True)


if __name__ == "__main__":
    main()
