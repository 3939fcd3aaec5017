"""The GPU path with latents over two ranks: processes over gloo, kernels in Triton's interpreter or on one GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are made

from sampled_sae.kernels.path import FastPath
from sampled_sae.kernels.ranks import DividedPath
from sampled_sae.method import presets
from sampled_sae.method.config import AuxKConfig, SAEConfig
from sampled_sae.method.latents import WHOLE, Shard, is_sliced
from sampled_sae.method.parameters import Parameters, start_parameters
from sampled_sae.method.selection import Dead
from sampled_sae.utils.ranks import Group

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
M, K, B, D = 32, 3, 8, 20
STEPS = 4 if DEVICE.type == "cuda" else 1
"""On a GPU the first two run as they are, and the third is recorded; in the interpreter each takes seconds."""
CONFIGS: dict[str, SAEConfig] = {
    "batchtopk": presets.batchtopk(M, K),
    "topk": presets.topk(M, K),
    "pool": presets.sampled(M, K, "l2", 5),
    "one rank has none": presets.sampled(M, K, "prefix", 4),
    "matryoshka": presets.matryoshka(M, K, (5, 0.3, 25)),
    "auxk": presets.batchtopk(M, K, auxk=AuxKConfig(alpha=0.5, k=3)),
}


def weights(whole: bool, seed: int, shard: Shard) -> Parameters:
    """Values that bfloat16 holds; whole numbers give exact products, and many ties."""
    generator = torch.Generator().manual_seed(seed)
    made = start_parameters(D, M, generator, torch.float32)
    made.b_enc.copy_(0.05 * torch.randn(M, generator=generator))
    if whole:
        made = Parameters(*(torch.randint(-1, 2, w.shape, generator=generator).float() for w in made))
    own = shard.own(M)
    parts = (w if name == "b_dec" else w[own] for name, w in made._asdict().items())
    return Parameters(*(w.bfloat16().float().to(DEVICE) for w in parts))


def batch(whole: bool, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, D, generator=generator) / D**0.5
    if whole:
        x = torch.randint(-2, 3, (B, D), generator=generator).float()
    return x.bfloat16().float().to(DEVICE)


def kept_by(selection: Any, shard: Shard) -> torch.Tensor:
    """Kept values [B, M] on all ranks."""
    codes, m = selection.codes, M // shard.number
    found = torch.zeros(B, m, device=DEVICE)
    if hasattr(codes, "f"):
        found[:, codes.columns] = codes.f[:, : len(codes.columns)].float()
    else:
        there = codes.latent < m
        found[codes.kept.token[there].long(), codes.latent[there].long()] = codes.kept.value[there]
    return shard.gather(found).cpu()


def steps(config: SAEConfig, shard: Shard = WHOLE) -> dict[str, Any]:
    """Selections from exact products, and steps with others; what they kept, measured, and made of the weights."""
    found: dict[str, Any] = {}
    for whole in (True, False):
        own, generator = weights(whole, 1, shard), torch.Generator(DEVICE).manual_seed(0)
        path: FastPath = (
            FastPath(own, config, 10, generator)
            if shard.number == 1
            else DividedPath(own, config, 10, generator, shard)
        )
        pool, kept, counted, moves = torch.zeros(M, dtype=torch.bool, device=DEVICE), [], [], []
        for step in range(STEPS):
            selection = path.select(batch(whole, step), step, pool)
            kept.append(kept_by(selection, shard))
            fired = shard.rows(selection.fired)
            counted.append([float(selection.smallest()), selection.kept(), *map(float, fired)])
            if whole:
                continue
            dead = None
            if config.auxk.alpha == 0.5:
                silent = ~selection.fired & (torch.arange(M, device=DEVICE)[shard.own(M)] % 3 > 0)
                dead = Dead(silent, int(shard.stack(silent.sum()).max()))
            moved = path.update(selection, dead, 0.01)
            moves.append([float(value) for value in moved])
        found[f"kept {whole}"], found[f"counted {whole}"] = torch.stack(kept), torch.tensor(counted)
    named = {f"weights.{name}": value for name, value in path.weights._asdict().items()}
    named |= {f"adam.{name}": value for name, value in path.state().items()}
    found["moved"] = torch.tensor(moves)
    found["state"] = {name: (shard.rows(value) if is_sliced(name) else value).cpu() for name, value in named.items()}
    return found


def run(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    shard = Shard(Group(rank, world, dist.group.WORLD, over_cpu=True))
    for name, config in CONFIGS.items():
        found = steps(config, shard)
        if rank == 0:
            torch.save(found, folder / name)
    dist.destroy_process_group()
