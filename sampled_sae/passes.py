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
from sampled_sae.trainer import layer_folder, train, train_layers

PLAN = "passes.json"
USED = 0.9
"""Share of the free memory that the SAEs of one pass may take."""


def train_in_passes(
    source: Callable[[], Any], configs: Sequence[SAEConfig], out: Path, *, device: str | None, **settings: Any
) -> list[Path]:
    """Train all SAEs; returns their folders in order. `source()` opens the activations anew for each pass.

    Activations of several layers are a dictionary of them. One pass is a run in `out` itself; several are runs in
    `out`/pass-1, `out`/pass-2 and so on, each resumable; several layers are runs in folders of these, layer-N.
    """
    place, full = usable_device(device), named(list(configs), settings["seed"])
    activations = source()
    groups = _as_begun(out, full) or split(full, activations, settings["batch_size"], place)
    folders: list[Path] = []
    for number, group in enumerate(groups, start=1):
        folder = out if len(groups) == 1 else out / f"pass-{number}"
        if len(groups) > 1:
            make_folder(out)
            write_json(out / PLAN, [len(group) for group in groups])
            print(f"pass {number} of {len(groups)}: {len(group)} SAEs", file=sys.stderr)
        folders += _one_pass(activations if number == 1 else source(), group, folder, place, settings)
        activations = None  # what it holds is wanted for the next pass
    return folders


def _one_pass(
    activations: Any, configs: list[SAEConfig], out: Path, device: torch.device, settings: dict[str, Any]
) -> list[Path]:
    layers = activations if isinstance(activations, dict) else {0: activations}
    if len(layers) == 1:
        train(next(iter(layers.values())), configs, out=out, device=device, **settings)
        folders = [out]
    else:
        train_layers(layers, configs, out=out, device=device, **settings)
        folders = [layer_folder(out, layer) for layer in layers]
    for layer in layers.values():
        if hasattr(layer, "close"):
            layer.close()
    return [folder / "saes" / str(config.name) for folder in folders for config in configs]


def _as_begun(out: Path, configs: list[SAEConfig]) -> list[list[SAEConfig]] | None:
    """The groups of a run that is resumed: free memory may be another today."""
    if (out / "run.json").exists() or any(out.glob("layer-*/run.json")):
        return [configs]
    if not (out / PLAN).exists():
        return None
    sizes = read_json(out / PLAN)
    if not isinstance(sizes, list) or sum(sizes) != len(configs):
        raise UserError(f"{out / PLAN}: is of a run with other SAEs; choose another folder")
    each = iter(configs)
    return [list(islice(each, size)) for size in sizes]


def split(configs: list[SAEConfig], activations: Any, batch_size: int, device: torch.device) -> list[list[SAEConfig]]:
    """Configurations -> groups that fit into memory together; one that does not fit alone is a group too."""
    free, fast = memory.available(device), kernels.usable(device, torch.float32)
    if free is None:
        return [configs]
    layers = list(activations.values()) if isinstance(activations, dict) else [activations]
    width = getattr(layers[0], "width", None) or layers[0].shape[-1]
    left = USED * free - sum(getattr(layer, "memory", 0) for layer in layers)
    groups: list[list[SAEConfig]] = [[]]
    for config in configs:
        together = [*groups[-1], config] * len(layers)
        if groups[-1] and memory.needed(together, width, batch_size, torch.float32, fast) > left:
            groups.append([])
        groups[-1].append(config)
    return groups
