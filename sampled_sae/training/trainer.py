"""`train`: many SAEs, one pass over one stream of activations; `train_layers`: the same for several layers at once."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from sampled_sae import kernels
from sampled_sae.data.source import open_source
from sampled_sae.data.stream import ActivationSource, ActivationStream
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.presets import named
from sampled_sae.sae import SAE
from sampled_sae.training import memory
from sampled_sae.training.run import HOW, Run, TrainConfig
from sampled_sae.utils import system
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.files import alone_in, make_folder, read_json, write_json
from sampled_sae.utils.progress import show
from sampled_sae.utils.system import stop_on_interrupt, usable_device


def train(
    activations: Any,
    configs: Sequence[SAEConfig] | SAEConfig,
    *,
    steps: int,
    batch_size: int = 4096,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    heldout: Any | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    normalize: bool = True,
    heldout_tokens: int = 65_536,
    log_every: int = 50,
    checkpoint_every: int = 1000,
    log_to: Iterable[str] = (),
    progress: bool = True,
) -> list[SAE]:
    """Train one SAE for each configuration, all of them on the same batches, and return them in order.

    `activations` is a tensor, a memory map or any iterable of [B, d] or [B, L, d] batches. With `out`
    the run keeps a log and checkpoints there and saves each SAE in `out`/saes/NAME; `resume=True` goes on
    from the last checkpoint and ends with the same weights as if nothing had happened. `heldout` gives
    tokens for calibration; otherwise some of the activations are set aside. Input units do not matter:
    the returned SAEs take raw activations.
    """
    shared = TrainConfig(steps, batch_size, seed, normalize, heldout_tokens, log_every, checkpoint_every)
    parts = [(activations, None if out is None else Path(out), heldout)]
    return _train(parts, configs, shared, resume, device, dtype, tuple(log_to), progress)[0]


def train_layers(
    activations: Mapping[Any, Any],
    configs: Sequence[SAEConfig] | SAEConfig,
    *,
    steps: int,
    batch_size: int = 4096,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    normalize: bool = True,
    heldout_tokens: int = 65_536,
    log_every: int = 50,
    checkpoint_every: int = 1000,
    log_to: Iterable[str] = (),
    progress: bool = True,
) -> dict[Any, list[SAE]]:
    """The same for several layers, in step with each other: each layer is a run of its own, in `out`/layer-N."""
    shared = TrainConfig(steps, batch_size, seed, normalize, heldout_tokens, log_every, checkpoint_every)
    parts = [
        (part, None if out is None else layer_folder(Path(out), layer), None) for layer, part in activations.items()
    ]
    if not parts:
        raise UserError("activations = {}: must hold at least one layer")
    found = _train(parts, configs, shared, resume, device, dtype, tuple(log_to), progress)
    return dict(zip(activations, found, strict=True))


def layer_folder(out: Path, layer: int | str) -> Path:
    """Folder of the run on one of several layers or hook points."""
    return out / (f"layer-{layer}" if isinstance(layer, int) else layer)


def _train(
    parts: list[tuple[Any, Path | None, Any]],
    configs: Sequence[SAEConfig] | SAEConfig,
    shared: TrainConfig,
    resume: bool,
    device: str | torch.device | None,
    dtype: torch.dtype,
    log_to: tuple[str, ...],
    progress: bool,
) -> list[list[SAE]]:
    """Train all configurations on each part (activations, folder, held-out tokens); returns its SAEs for each part."""
    full, place = _checked(configs, shared), usable_device(device)
    say: Callable[[str], None] = (lambda line: print(line, file=sys.stderr)) if progress else (lambda line: None)
    streams = [_open(activations, heldout, shared) for activations, _, heldout in parts]
    runs = [
        Run(full, shared, place, dtype, folder, say, None if folder is None else stream.identity)
        for stream, (_, folder, _) in zip(streams, parts, strict=True)
    ]
    with ExitStack() as locks:
        for run in runs:
            if run.out is not None:
                locks.enter_context(alone_in(run.out))
        finished = [run.open_folder(resume) for run in runs]
        going: list[tuple[Run, ActivationStream]] = []
        for run, saes, stream in zip(runs, finished, streams, strict=True):
            if saes is None:
                going.append((run, stream))
            else:
                say(f"{run.out}: this run is finished; its SAEs are loaded")
        if going:
            finished = _finish(going, full, finished, place, dtype, log_to, progress, say)
        return [saes or [] for saes in finished]


def _open(activations: Any, heldout: Any, shared: TrainConfig) -> ActivationStream:
    source = open_source(activations, heldout=heldout)
    [stream] = source.open(shared.batch_size, shared.heldout_tokens, shared.seed, shared.steps).values()
    return stream


def _finish(
    going: list[tuple[Run, ActivationStream]],
    configs: list[SAEConfig],
    finished: list[list[SAE] | None],
    device: torch.device,
    dtype: torch.dtype,
    log_to: tuple[str, ...],
    progress: bool,
    say: Callable[[str], None],
) -> list[list[SAE] | None]:
    """Bring the runs that are not finished to their end."""
    width, batch_size = going[0][1].d_in, going[0][0].shared.batch_size
    beside = sum(stream.memory_estimate() for _, stream in going)
    say(memory.check(configs * len(going), width, batch_size, device, dtype, beside))
    for run, stream in going:
        run.begin(stream)
    with stop_on_interrupt() as stopped:
        _advance(going, log_to, progress, stopped)
        ends = iter([run.finish(stream) for run, stream in going])
    return [next(ends) if saes is None else saes for saes in finished]


def _checked(configs: Sequence[SAEConfig] | SAEConfig, shared: TrainConfig) -> list[SAEConfig]:
    listed = [configs] if isinstance(configs, SAEConfig) else list(configs)
    if not listed:
        raise UserError("configs = []: must hold at least one SAEConfig")
    full, size = named(listed, shared.seed), shared.batch_size
    for config in full:
        for tokens in (config.pool.scope.tokens, config.pool.scope.then):
            if tokens is not None and size % min(tokens, size):
                raise UserError(f"{config.name}: scope of {tokens} tokens: must divide batch_size = {size}")
    return full


def _advance(
    going: list[tuple[Run, ActivationStream]], log_to: tuple[str, ...], progress: bool, stopped: Callable[[], bool]
) -> None:
    """Train until the last step, or until the user interrupts. Runs that are behind the others catch up first."""
    runs, steps = [run for run, _ in going], going[0][0].shared.steps
    with ExitStack() as open_:
        for run in runs:
            run.open_log(log_to)
            open_.callback(run.close_log)
        bar = show(steps, min(run.step for run in runs), enabled=progress)
        open_.callback(bar.close)
        while (step := min(run.step for run in runs)) < steps:
            for run, stream in going:
                if run.step == step:
                    run.advance(stream)
            bar.update(step + 1, _note(runs))
            if stopped():
                raise _interrupted(runs)
            for run in runs:
                run.checkpoint_if_due()


def _note(runs: list[Run]) -> str:
    """How well the SAEs do; nothing before the first line of the log."""
    lowest, highest = min(run.fve[0] for run in runs), max(run.fve[1] for run in runs)
    return f"FVE {lowest:.3f} to {highest:.3f}" if math.isfinite(lowest) else ""


def _interrupted(runs: list[Run]) -> Interrupted:
    step, out = runs[0].step, runs[0].out
    if out is None:
        return Interrupted(f"interrupted at step {step}; nothing is kept, because out was not set")
    for run in runs:
        run.save_checkpoint()
    return Interrupted(f"interrupted at step {step}; saved in {out}, {HOW} to go on")


PLAN = "passes.json"
USED = 0.9
"""Share of the free memory that the SAEs of one pass may take."""


def train_in_passes(
    source: ActivationSource, configs: Sequence[SAEConfig], out: Path, *, device: str | None, **settings: Any
) -> list[Path]:
    """Train all SAEs; returns their folders in order. `source` is opened anew for each pass.

    One pass is a run in `out` itself; several are runs in
    `out`/pass-1, `out`/pass-2 and so on, each resumable; several layers are runs in folders of these, layer-N.
    """
    place, full = usable_device(device), named(list(configs), settings["seed"])
    names = ("batch_size", "heldout_tokens", "seed", "steps")
    opening = {name: settings[name] for name in names if name in settings}
    streams = source.open(**{"heldout_tokens": 65_536} | opening)
    groups = _as_begun(out, full) or split(full, list(streams.values()), settings["batch_size"], place)
    folders: list[Path] = []
    for number, group in enumerate(groups, start=1):
        folder = out if len(groups) == 1 else out / f"pass-{number}"
        if len(groups) > 1:
            make_folder(out)
            write_json(out / PLAN, [len(group) for group in groups])
            print(f"pass {number} of {len(groups)}: {len(group)} SAEs", file=sys.stderr)
        if number > 1:
            streams = source.open(**{"heldout_tokens": 65_536} | opening)
        folders += _one_pass(streams, group, folder, place, settings)
    return folders


def _one_pass(
    streams: Mapping[str, ActivationStream],
    configs: list[SAEConfig],
    out: Path,
    device: torch.device,
    settings: dict[str, Any],
) -> list[Path]:
    if len(streams) == 1:
        train(next(iter(streams.values())), configs, out=out, device=device, **settings)
        folders = [out]
    else:
        train_layers(streams, configs, out=out, device=device, **settings)
        folders = [out / name for name in streams]
    for stream in streams.values():
        stream.close()
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


def split(
    configs: list[SAEConfig], streams: list[ActivationStream], batch_size: int, device: torch.device
) -> list[list[SAEConfig]]:
    """Configurations -> groups that fit into memory together; one that does not fit alone is a group too."""
    free, fast = system.available(device), kernels.usable(device, torch.float32)
    if free is None:
        return [configs]
    left = USED * free - sum(stream.memory_estimate() for stream in streams)
    groups: list[list[SAEConfig]] = [[]]
    for config in configs:
        together = [*groups[-1], config] * len(streams)
        if groups[-1] and memory.needed(together, streams[0].d_in, batch_size, torch.float32, fast) > left:
            groups.append([])
        groups[-1].append(config)
    return groups
