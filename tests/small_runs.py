"""Short runs on the CPU, and whether two of them gave the same."""

from dataclasses import replace
from pathlib import Path

import torch

import sampled_sae as ss

QUIET = {"progress": False, "batch_size": 200, "device": "cpu"}


def same_weights(a: ss.SAE, b: ss.SAE) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return all(torch.equal(mine[name].nan_to_num(-1), other[name].nan_to_num(-1)) for name in mine)


def three_saes(out: Path, resume: bool = False) -> None:
    """200 steps of three SAEs, with a checkpoint every 10."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(4000, 32, generator=generator) < 0.1).float() @ torch.randn(32, 16, generator=generator)
    configs = [
        replace(ss.sampled(48, 4, "uniform", l=3), auxk=ss.AuxKConfig(dead_after=2000)),
        ss.SAEConfig(48, 4, pool=ss.PoolConfig("uniform", ss.Fraction(0.4), refresh=7)),
        ss.topk_then_batchtopk(48, 4),
    ]
    common = {"steps": 200, "batch_size": 200, "checkpoint_every": 10, "log_every": 10, "device": "cpu"}
    ss.train(x, configs, out=out, resume=resume, **common)
