"""How a training is divided: over ranks by SAEs or by latents, and into passes where memory is short."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sampled_sae import kernels
from sampled_sae.config import read_file
from sampled_sae.data.stream import ActivationStream
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.latents import check_divided
from sampled_sae.training.estimate import memory_needed
from sampled_sae.utils import system
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.ranks import Ranks

PLAN = "passes.json"
USED = 0.9
"""Share of the free memory that the SAEs of one pass may take."""
EXCHANGE = 30_000
"""What divided latents add to a step, in latents that one rank trains meanwhile: 0.8 ms by docs/scaling.md."""


class Division(NamedTuple):
    """Passes over the activations, each over groups of ranks, each of which divides the latents of its SAEs."""

    passes: list[list[SAEConfig]]
    groups: int
    shards: int


def divide(
    how: str, configs: list[SAEConfig], streams: Sequence[ActivationStream], batch_size: int, ranks: Ranks, out: Path
) -> Division:
    """The division of a training, the same on all ranks; `how` is auto, saes, latents or GROUPSxSHARDS.

    Auto takes the one that should take the least time, of those the one with the fewest shards.
    """
    free = system.available(ranks.device)
    free = int(ranks.all.gather(torch.tensor(-1 if free is None else free)).min())
    fixed, found = as_begun(out, configs), list[tuple[float, Division]]()
    for groups, shards in _candidates(how, configs, ranks.world):
        passes = fixed or split(configs, streams, batch_size, ranks.device, None if free < 0 else free, groups, shards)
        found.append((_time(passes, len(streams), groups, shards), Division(passes, groups, shards)))
    best = min(found, key=lambda item: (item[0], item[1].shards))[1]
    # The first rank's, should their files not be equally up to date.
    sizes, *rest = json.loads(ranks.all.texts(json.dumps([list(map(len, best.passes)), best.groups, best.shards]))[0])
    return Division(_cut(configs, sizes), *rest)


def _candidates(how: str, configs: list[SAEConfig], world: int) -> list[tuple[int, int]]:
    """Groups and shards that may be chosen."""
    fixed = {"saes": f"{world}x1", "latents": f"1x{world}"}.get(how, how)
    if how == "auto":
        every = [(world // shards, shards) for shards in range(1, world + 1) if world % shards == 0]
        return [(groups, shards) for groups, shards in every if shards == 1 or _can_share(configs, shards)]
    if not re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,5}", fixed):
        raise UserError(f"divide = {how!r}: must be auto, saes, latents, or groups of SAEs x parts of latents, as 2x4")
    groups, shards = map(int, fixed.split("x"))
    if groups * shards != world:
        raise UserError(f"divide = {how!r}: is for {groups * shards} ranks, but there are {world}")
    for config in configs:
        check_divided(config, shards)
    return [(groups, shards)]


def _can_share(configs: list[SAEConfig], shards: int) -> bool:
    """Whether the latents of all SAEs can be divided."""
    try:
        for config in configs:
            check_divided(config, shards)
    except UserError:
        return False
    return True


def _time(passes: list[list[SAEConfig]], streams: int, groups: int, shards: int) -> float:
    """Relative time of a step, summed over the passes: that of the group with the most to do."""
    total = 0.0
    for configs in passes:
        costs = [config.d_sae / shards + EXCHANGE * (shards > 1) for config in configs] * streams
        total += max(sum(costs[index] for index in part) for part in shares(costs, groups))
    return total


def shares(costs: Sequence[float], groups: int) -> list[list[int]]:
    """Numbers of the items of each group: from the largest on, each goes to the group with the least so far."""
    found: list[list[int]] = [[] for _ in range(groups)]
    load = [0.0] * groups
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        group = load.index(min(load))
        found[group].append(index)
        load[group] += costs[index]
    return [sorted(part) for part in found]


def own_saes(configs: Sequence[SAEConfig], streams: int, ranks: Ranks) -> list[list[SAEConfig]]:
    """The SAEs that this rank trains on each of the streams."""
    costs = [float(config.d_sae) for _ in range(streams) for config in configs]
    mine = shares(costs, ranks.groups)[ranks.saes]
    return [
        [configs[index % len(configs)] for index in mine if index // len(configs) == stream]
        for stream in range(streams)
    ]


def as_begun(out: Path, configs: list[SAEConfig]) -> list[list[SAEConfig]] | None:
    """The passes of a run that is resumed: free memory may have changed since."""
    if (out / "run.json").exists() or (any(out.glob("*/run.json")) and not any(out.glob("pass-*"))):
        return [configs]
    if not (out / PLAN).exists():
        return None
    sizes: Any = read_file(out / PLAN, "passes").get("sizes")
    whole = isinstance(sizes, list) and all(isinstance(size, int) and size > 0 for size in sizes)
    if not whole or sum(sizes) != len(configs):
        raise UserError(f"{out / PLAN}: is of a run with other SAEs; choose another folder")
    return _cut(configs, sizes)


def _cut(configs: list[SAEConfig], sizes: Sequence[int]) -> list[list[SAEConfig]]:
    each = iter(configs)
    return [list(islice(each, size)) for size in sizes]


def split(
    configs: list[SAEConfig],
    streams: Sequence[ActivationStream],
    batch_size: int,
    device: torch.device,
    free: int | None,
    groups: int = 1,
    shards: int = 1,
) -> list[list[SAEConfig]]:
    """Configurations -> passes whose SAEs fit into the ranks' memory together; one that does not fit is a pass too."""
    if free is None:
        return [configs]
    fast, left = kernels.usable(device, torch.float32), USED * free - sum(each.memory_estimate() for each in streams)
    passes: list[list[SAEConfig]] = [[]]
    for config in configs:
        together = [*passes[-1], config] * len(streams)
        parts = [[together[index] for index in part] for part in shares([c.d_sae for c in together], groups) if part]
        need = (memory_needed(part, streams[0].d_in, batch_size, torch.float32, fast, shards) for part in parts)
        if passes[-1] and max(need) > left:
            passes.append([])
        passes[-1].append(config)
    return passes
