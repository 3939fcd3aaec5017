"""Trains small SAEs with their latents over ranks, each rank a process of its own over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sampled_sae as ss
from sampled_sae.method.config import AuxKConfig, InitConfig, OptimizerConfig, PoolConfig, SAEConfig, Scope, Size
from sampled_sae.method.latents import WHOLE, Shard, is_sliced
from sampled_sae.training.learner import Learner
from sampled_sae.utils.ranks import Group

D, M, K, BATCH, STEPS = 12, 96, 5, 48, 20
LOOK = 4
"""Steps between two looks at what is selected and measured."""
SHORT = {"auxk": AuxKConfig(dead_after=10**9)}
DYING = AuxKConfig(alpha=1 / 8, dead_after=5 * BATCH, k=8)
"""With so few tokens, many latents are dead after a few steps: more than k, on all ranks."""
GROUPS = PoolConfig("l2", Size(20), scope=Scope(tokens=12))
CASES: dict[str, SAEConfig] = {
    "batchtopk": ss.batchtopk(M, K, **SHORT),
    "topk": ss.topk(M, K, **SHORT),
    "topk then batchtopk": ss.topk_then_batchtopk(M, K, until=0.5, **SHORT),
    "groups": SAEConfig(M, K, PoolConfig(scope=Scope(tokens=8)), **SHORT),
    "l2": ss.sampled(M, K, score="l2", l=4, **SHORT),
    "entropy, sampled": ss.sampled(M, K, score="entropy", l=4, pick="sample", **SHORT),
    "uniform, released": ss.released(M, K, **SHORT),
    "uniform, annealed, kept": SAEConfig(
        M, K, PoolConfig("uniform", Size(30), schedule=ss.annealed(M, K).pool.schedule, refresh=4), **SHORT
    ),
    "prefix": ss.sampled(M, K, score="prefix", l=4, **SHORT),
    "input": ss.sampled(M, K, score="preactivation_l2", l=4, **SHORT),
    "gate": ss.sampled(M, K, score="gate", l=4, pick="sample", **SHORT),
    "memory": ss.sampled(M, K, score="l2", l=4, memory=0.9, **SHORT),
    "inference size": ss.sampled(M, K, score="uniform", l=4, inference_size=1.5, **SHORT),
    "pools of groups": SAEConfig(M, K, GROUPS, **SHORT),
    "rows of a pool": SAEConfig(M, K, PoolConfig("l2", Size(20)), cut="token", **SHORT),
    "auxk": ss.batchtopk(M, K, auxk=DYING),
    "auxk, all dead": ss.topk(M, K, auxk=AuxKConfig(alpha=1 / 8, dead_after=5 * BATCH, k=M)),
    "matryoshka": ss.matryoshka(M, K, (7, 30, 50), **SHORT),
    "matryoshka, auxk": ss.matryoshka(M, K, (7, 30, 50), auxk=DYING),
    "clip": ss.batchtopk(M, K, optimizer=OptimizerConfig(gradient="clip", clip=0.1, cautious=False), **SHORT),
    "covariance": ss.batchtopk(M, K, init=InitConfig(decoder="covariance"), **SHORT),
    "jumprelu": ss.jumprelu(M, K, auxk=DYING),
}
"""Every method, and what else depends on latents of other ranks."""
OVER = {3: list(CASES), 2: ["topk", "entropy, sampled", "matryoshka, auxk"]}
"""Cases by number of ranks: all with a rank in the middle, some on two that have other numbers in the world."""


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    directions = torch.randn(3 * D, D, generator=torch.Generator().manual_seed(7))
    active = torch.rand(BATCH, 3 * D, generator=generator) < 0.1
    return (active * torch.rand(BATCH, 3 * D, generator=generator)) @ directions + 0.1


def whole_state(learner: Learner) -> dict[str, torch.Tensor]:
    """The state of all ranks, as one process has it."""
    return {
        name: (learner.shard.rows(value) if is_sliced(name) else value).clone()
        for name, value in learner.state().items()
    }


def part_of(state: dict[str, torch.Tensor], shard: Shard) -> dict[str, torch.Tensor]:
    """One rank's part of a state of all."""
    return {name: value[shard.own(len(value))] if is_sliced(name) else value for name, value in state.items()}


def chosen(learner: Learner, selection: Any) -> torch.Tensor:
    """Kept activations on all ranks [tokens, M], 0 elsewhere."""
    return learner.shard.gather(selection.codes.dense())


def train(config: SAEConfig, shard: Shard = WHOLE) -> dict[str, Any]:
    """What some of the steps selected and measured, and the state at the end."""
    learner = Learner(config, D, STEPS, 3, torch.device("cpu"), torch.float32, shard=shard)
    select, kept, stats = learner.path.select, [], []

    def recorded(*arguments: Any) -> Any:
        selection = select(*arguments)
        if step % LOOK == 0:
            kept.append(chosen(learner, selection))
        return selection

    learner.path.select = recorded  # type: ignore[method-assign]
    for step in range(STEPS):
        measured = learner.step(batch(step), step, measure=step % LOOK == LOOK - 1)
        if measured is not None:
            stats.append([float(value) for value in measured])
    sae = learner.sae()
    return {
        "state": whole_state(learner),
        "kept": torch.stack(kept),
        "stats": torch.tensor(stats, dtype=torch.float64),
        "sae": {name: value.clone() for name, value in sae.state_dict().items()},
        "b_dec": learner.shard.stack(learner.weights.b_dec),
    }


def of_state(config: SAEConfig, state: dict[str, torch.Tensor], x: torch.Tensor, shard: Shard = WHOLE) -> torch.Tensor:
    """What a step selects of a batch, from a state of all ranks."""
    learner = Learner(config, D, STEPS, 3, torch.device("cpu"), torch.float32, shard=shard)
    learner.load_state(part_of(state, shard))
    return chosen(learner, learner.path.select(x, STEPS // 3, learner.pool))


def tied(config: SAEConfig) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A state and a batch of small multiples of 1/8: activations are exact, and most of them equal to others."""
    generator = torch.Generator().manual_seed(5)
    learner = Learner(config, D, STEPS, 3, torch.device("cpu"), torch.float32)
    learner.weights.W_enc.copy_(torch.randint(-1, 2, (M, D), generator=generator))
    learner.weights.b_enc.copy_(torch.randint(-1, 2, (M,), generator=generator) / 8)
    x = torch.randint(-4, 5, (BATCH, D), generator=generator) / 8
    return learner.state(), x.bfloat16().float()


def run(rank: int, world: int, folder: Path, states: dict[str, dict[str, torch.Tensor]]) -> None:
    """One of the processes: the cases over all ranks and over the last two, the results into `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    pair = dist.new_group([world - 2, world - 1])
    groups = {world: Group(rank, world, dist.group.WORLD), 2: Group(rank - world + 2, 2, pair)}
    for number, names in OVER.items():
        shard = Shard(groups[number])
        for name in names if shard.index >= 0 else ():
            found = train(CASES[name], shard)
            found["again"] = of_state(CASES[name], states[name], batch(STEPS), shard)
            if CASES[name].jumprelu is None:
                found["tied"] = of_state(CASES[name], *tied(CASES[name]), shard)
            if shard.index == 0:
                torch.save(found, folder / f"{number} {name}")
    dist.destroy_process_group()
