"""`train`: many SAEs, one pass over one stream of activations; `train_layers`: the same for several layers at once."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from sampled_sae import memory
from sampled_sae.config import SAEConfig, TrainConfig
from sampled_sae.data.stream import Stream, open_stream
from sampled_sae.device import usable_device
from sampled_sae.errors import Interrupted, UserError
from sampled_sae.files import alone_in
from sampled_sae.interrupt import stop_on_interrupt
from sampled_sae.presets import named
from sampled_sae.progress import show
from sampled_sae.run import HOW, Run
from sampled_sae.sae import SAE


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
    activations: Mapping[int, Any],
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
) -> dict[int, list[SAE]]:
    """The same for several layers, in step with each other: each layer is a run of its own, in `out`/layer-N."""
    shared = TrainConfig(steps, batch_size, seed, normalize, heldout_tokens, log_every, checkpoint_every)
    parts = [
        (part, None if out is None else layer_folder(Path(out), layer), None) for layer, part in activations.items()
    ]
    if not parts:
        raise UserError("activations = {}: must hold at least one layer")
    found = _train(parts, configs, shared, resume, device, dtype, tuple(log_to), progress)
    return dict(zip(activations, found, strict=True))


def layer_folder(out: Path, layer: int) -> Path:
    """Where the run of one of several layers is."""
    return out / f"layer-{layer}"


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
    runs = [
        Run(full, shared, place, dtype, folder, say, getattr(activations, "identity", None))
        for activations, folder, _ in parts
    ]
    with ExitStack() as locks:
        for run in runs:
            if run.out is not None:
                locks.enter_context(alone_in(run.out))
        finished = [run.open_folder(resume) for run in runs]
        going: list[tuple[Run, Stream]] = []
        for run, saes, (activations, folder, heldout) in zip(runs, finished, parts, strict=True):
            if saes is None:
                stream = open_stream(activations, shared.batch_size, shared.heldout_tokens, shared.seed, heldout)
                going.append((run, stream))
            else:
                say(f"{folder}: this run is finished; its SAEs are loaded")
        if going:
            finished = _finish(going, full, finished, place, dtype, log_to, progress, say)
        return [saes or [] for saes in finished]


def _finish(
    going: list[tuple[Run, Stream]],
    configs: list[SAEConfig],
    finished: list[list[SAE] | None],
    device: torch.device,
    dtype: torch.dtype,
    log_to: tuple[str, ...],
    progress: bool,
    say: Callable[[str], None],
) -> list[list[SAE] | None]:
    """Bring the runs that are not finished to their end."""
    width, batch_size = going[0][1].width, going[0][0].shared.batch_size
    # A stream that collects activations as it goes says what it takes; others have theirs already.
    beside = sum(getattr(stream, "memory", 0) for _, stream in going)
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
    going: list[tuple[Run, Stream]], log_to: tuple[str, ...], progress: bool, stopped: Callable[[], bool]
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
