"""More SAEs than memory holds: as many as fit in one pass over the activations, the rest in further passes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from sampled_sae import kernels, memory
from sampled_sae.config import SAEConfig
from sampled_sae.device import usable_device
from sampled_sae.errors import UserError
from sampled_sae.files import make_folder, read_json, write_json
from sampled_sae.presets import named
from sampled_sae.trainer import train

PLAN = "passes.json"
USED = 0.9
"""Share of the free memory that the SAEs of one pass may take."""


def train_in_passes(
    source: Callable[[], Any], configs: Sequence[SAEConfig], out: Path, *, device: str | None, **settings: Any
) -> list[Path]:
    """Train all SAEs; returns their folders in order. `source()` opens the activations anew for each pass.

    One pass is a run in `out` itself; several are runs in `out`/pass-1, `out`/pass-2 and so on, each resumable.
    """
    place, full = usable_device(device), named(list(configs), settings["seed"])
    activations = source()
    width = getattr(activations, "width", None) or activations.shape[-1]
    groups = _as_begun(out, full) or split(full, width, settings["batch_size"], place)
    folders: list[Path] = []
    for number, group in enumerate(groups, start=1):
        folder = out if len(groups) == 1 else out / f"pass-{number}"
        if len(groups) > 1:
            make_folder(out)
            write_json(out / PLAN, [len(group) for group in groups])
            print(f"pass {number} of {len(groups)}: {len(group)} SAEs", file=sys.stderr)
        train(activations if number == 1 else source(), group, out=folder, device=place, **settings)
        folders += [folder / "saes" / str(config.name) for config in group]
    return folders


def _as_begun(out: Path, configs: list[SAEConfig]) -> list[list[SAEConfig]] | None:
    """The groups of a run that is resumed: free memory may be another today."""
    if (out / "run.json").exists():
        return [configs]
    if not (out / PLAN).exists():
        return None
    sizes = read_json(out / PLAN)
    if not isinstance(sizes, list) or sum(sizes) != len(configs):
        raise UserError(f"{out / PLAN}: is of a run with other SAEs; choose another folder")
    each = iter(configs)
    return [list(islice(each, size)) for size in sizes]


def split(configs: list[SAEConfig], width: int, batch_size: int, device: torch.device) -> list[list[SAEConfig]]:
    """Configurations -> groups that fit into memory together; one that does not fit alone is a group too."""
    free, fast = memory.available(device), kernels.usable(device, torch.float32)
    if free is None:
        return [configs]
    groups: list[list[SAEConfig]] = [[]]
    for config in configs:
        if groups[-1] and memory.needed([*groups[-1], config], width, batch_size, torch.float32, fast) > USED * free:
            groups.append([])
        groups[-1].append(config)
    return groups
