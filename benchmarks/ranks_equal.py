"""Latents over two ranks on one device against one process: what one step changes, and what a training makes of it.

    python benchmarks/ranks_equal.py --out equal.jsonl                 30 s on an H200
    python benchmarks/ranks_equal.py --out equal.jsonl --device cpu    90 s

Two processes exchange over gloo. For BatchTopK, TopK and a scored pool, both train: `ranks`, latents divided over the
two; `lockstep`, the same, but each step that is looked at begins with the state of one process; and on one process
`perturbed`, activations times (1 + 1e-6 noise), also in `lockstep perturbed`; and `seed`, with other start values.

Lines with `step` compare what was kept: `kept` values, `differing` (kept by one of the two only), `values_differing`
(kept by both, with other values), `moved_differs` (weights after the step, relative to what the step changed: W_enc,
b_enc, W_dec, b_dec). Lines without have the FVU on held-out tokens at the end.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import sampled_sae as ss
from sampled_sae.method.latents import WHOLE, Shard, is_sliced
from sampled_sae.training.learner import Learner
from sampled_sae.utils.ranks import Group

LOOK = (1, 2, 3, 5, 10, 20, 40, 60)
"""Steps that are looked at."""
SIZES = {"cuda": (768, 16_384, 4096, 32), "cpu": (64, 2048, 512, 8)}
"""d_in, d_sae, batch, K."""


def kept_by(codes: Any, batch: int, m: int, device: torch.device) -> Tensor:
    """Kept values [batch, m] from the codes of any step path."""
    found = torch.zeros(batch, m + 1, device=device)
    if hasattr(codes, "f"):
        found[:, codes.columns] = codes.f[:, : len(codes.columns)].float().clamp_min(0)
    elif hasattr(codes, "kept"):
        found[codes.kept.token.long(), codes.latent.long()] = codes.kept.value
    else:
        found[codes.token, codes.latent] = codes.value
    return found[:, :m]


class Watched(Learner):
    """A learner that remembers what it kept."""

    kept: Tensor

    def watch(self) -> Watched:
        inner = self.path.select

        def select(x: Tensor, step: int, pool: Tensor) -> Any:
            selection = inner(x, step, pool)
            if step + 1 in LOOK:
                self.kept = kept_by(selection.codes, len(x), len(self.weights.b_enc), x.device)
            return selection

        self.path.select = select  # type: ignore[method-assign]
        return self

    def put(self, state: dict[str, Tensor], own: slice) -> None:
        """Take over a state of one process, where recorded parts of a step read it."""
        state = {name: (value[own] if is_sliced(name) else value).clone() for name, value in state.items()}
        for name, value in self.weights._asdict().items():
            value.copy_(state[f"weights.{name}"])
        self.path.load_state({key[5:]: value for key, value in state.items() if key.startswith("adam.")})
        for name in ("tokens_since_fired", "pool", "ever_pooled"):
            getattr(self, name).copy_(state[name])
        self.threshold = state["threshold"]
        self.tokens_seen, self.most_dead = int(state["tokens_seen"]), int(state["most_dead"])


def fvu(weights: Any, x: Tensor, k: int, shard: Shard) -> float:
    """On x [n, d_in], with the largest n * k activations kept."""
    W_enc, b_enc, W_dec = (shard.rows(w) for w in weights[:3])
    z = torch.addmm(b_enc, x - weights.b_dec, W_enc.T).relu_()
    z *= z >= z.view(-1).topk(k * len(x)).values.min()
    return float((x - weights.b_dec - z @ W_dec).square().sum() / (x - x.mean(0)).square().sum())


def work(rank: int, device_name: str, out: Path, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    device, (d, m, batch, k) = torch.device(device_name), SIZES[device_name]
    shard = Shard(Group(rank, 2, dist.group.WORLD, over_cpu=device.type == "cuda"))
    own, everything = shard.own(m), slice(None)
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(21 * batch, 256, generator=generator) < 0.05).float() @ torch.randn(256, d, generator=generator)
    x = (x / x.square().mean().sqrt()).to(device)
    near = x * (1 + 1e-6 * torch.randn(x.shape, generator=generator).to(device))
    heldout, steps = x[20 * batch :], max(LOOK)

    def tell(**line: Any) -> None:
        if rank == 0:
            print(json.dumps(line), flush=True)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    for name, config in {
        "batchtopk": ss.batchtopk(m, k),
        "topk": ss.topk(m, k),
        "pool l2": ss.sampled(m, k, "l2", 5),
    }.items():

        def new(part: Shard = WHOLE, seed: int = 0, config: ss.SAEConfig = config) -> Watched:
            return Watched(config, d, steps, seed, device, torch.float32, shard=part).watch()

        one, near_locked, locked = new(), new(), new(shard)
        others = {
            "ranks": (new(shard), x, own),
            "perturbed": (new(), near, everything),
            "seed": (new(seed=1), x, everything),
        }
        looked = {"lockstep": (locked, x, own), "lockstep perturbed": (near_locked, near, everything)}
        for step in range(steps):
            rows = slice(step % 20 * batch, (step % 20 + 1) * batch)
            before = {key: value.clone() for key, value in one.state().items()} if step + 1 in LOOK else {}
            one.step(x[rows], step, measure=False)
            for learner, source, _ in others.values():
                learner.step(source[rows], step, measure=False)
            for run, (learner, source, part) in {**others, **looked}.items() if before else ():
                if run in looked:
                    if step:
                        learner.put(before, part)
                    learner.step(source[rows], step, measure=False)
                if run != "seed":
                    total = shard.count if part == own else lambda count: count
                    tell(sae=name, step=step + 1, run=run, **differences(one, learner, before, part, total))
        for run, (learner, *_) in {"one process": (one, x, everything), **others}.items():
            number = fvu(learner.weights, heldout, k, shard if run == "ranks" else WHOLE)
            tell(sae=name, run=run, heldout_fvu=number, threshold=float(learner.threshold))
    dist.destroy_process_group()


def differences(
    one: Watched, other: Watched, before: dict[str, Tensor], part: slice, total: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """How another learner's step differs from that of one process; it has the `part` of the latents."""
    a, b, rows = one.kept[:, part], other.kept, {}
    for name, w in one.weights._asdict().items():
        cut = slice(None) if name == "b_dec" else part
        moved = w[cut] - before[f"weights.{name}"][cut]
        rows[name] = float((w[cut] - getattr(other.weights, name)).norm() / moved.norm().clamp_min(1e-30))
    counts = [(a > 0).sum(), ((a > 0) != (b > 0)).sum(), ((a != b) & (a > 0) & (b > 0)).sum()]
    kept, differing, values = (int(total(count)) for count in counts)
    return {"kept": kept, "differing": differing, "values_differing": values, "moved_differs": list(rows.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to this file")
    parser.add_argument("--device", default="cuda", choices=SIZES)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (asked.device, asked.out, folder), nprocs=2)


if __name__ == "__main__":
    main()
