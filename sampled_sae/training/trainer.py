"""The loop over batches: many SAEs on one stream, several streams in step, several passes when memory is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from sampled_sae import kernels
from sampled_sae.config import read_file, write_file
from sampled_sae.data.source import Source, open_source
from sampled_sae.data.stream import ActivationSource, ActivationStream, Endless, IterableStream, Rows
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.presets import named
from sampled_sae.sae import SAE
from sampled_sae.training import memory
from sampled_sae.training.callbacks import ProgressBar, check_wandb, of_run
from sampled_sae.training.resume import begun, keep_record
from sampled_sae.training.run import HOW, Callback, Run, TrainConfig, holds_run
from sampled_sae.utils import system
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.files import alone_in, check_writable, make_folder, remove_leftovers
from sampled_sae.utils.progress import say
from sampled_sae.utils.system import listening, switching_often, usable_device

PLAN = "passes.json"
USED = 0.9
"""Share of the free memory that the SAEs of one pass may take."""


class Trainer:
    """Trains several runs in step with each other."""

    def __init__(self, runs: Sequence[Run], callbacks: Sequence[Callback] = ()):
        """Each run calls its own log and checkpoints, then `callbacks`."""
        self.runs, self.callbacks = list(runs), list(callbacks)

    def fit(self) -> list[list[SAE]]:
        """Every run's SAEs; a finished run's SAEs are loaded, and runs that are behind the others catch up first."""
        with ExitStack() as locks:
            for run in self.runs:
                if run.out is not None:
                    locks.enter_context(alone_in(run.out))
            for run in self.runs:
                run.open()
            if going := [run for run in self.runs if run.saes is None]:
                self._check_memory(going)
                self._train(going)
        return [run.saes or [] for run in self.runs]

    def _check_memory(self, runs: list[Run]) -> None:
        first = runs[0]
        configs = [config for run in runs for config in run.configs]
        beside = sum(run.stream.memory_estimate() for run in runs)
        size = first.shared.batch_size
        first.say(memory.check(configs, first.stream.d_in, size, first.device, first.dtype, beside))

    def _train(self, runs: list[Run]) -> None:
        with ExitStack() as ends:
            for run in runs:
                ends.callback(run.close)
                run.begin()
                run.callbacks = [*of_run(run), *self.callbacks]
                for callback in run.callbacks:
                    ends.callback(lambda callback, run: callback.on_end(run, run.saes), callback, run)
            if any(run.device.type == "cuda" for run in runs):
                ends.enter_context(switching_often())
            with listening(chained=False) as interrupted:  # the step in progress ends first
                while (step := min(run.step for run in runs)) < runs[0].shared.steps:
                    for run in runs:
                        if run.step == step:
                            run.advance()
                    if interrupted.is_set():
                        raise _interrupted(runs)
                for run in runs:
                    run.finish()


def _interrupted(runs: list[Run]) -> Interrupted:
    step, out = runs[0].step, runs[0].out
    if out is None:
        return Interrupted(f"interrupted at step {step}; nothing is kept, because out was not set")
    for run in runs:
        run.save_checkpoint(run.step)
        run.close()
    return Interrupted(f"interrupted at step {step}; saved in {out}, {HOW} to continue")


def run_training(
    activations: Any,
    configs: SAEConfig | Sequence[SAEConfig],
    shared: TrainConfig,
    *,
    out: Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    keep: bool = True,
) -> dict[str, list[SAE]]:
    """Train all SAEs on each stream of `activations`, which `open_source` opens; returns them by hook point.

    One stream is a run in `out`, several are runs in `out`/HOOK, such as layer-12. With `out`, SAEs that do not fit
    into memory together are trained in several passes over the activations, in `out`/pass-1, `out`/pass-2 and so on;
    these SAEs are returned on the CPU. Without `keep`, saved SAEs are returned without their weights, on the device
    `meta`.
    """
    place, full, source = usable_device(device), checked(configs, shared), open_source(activations)
    if out is not None and resume:
        source = source.as_begun(_recorded_source(out))
    settings = (shared.batch_size, shared.heldout_tokens, shared.seed, shared.steps)
    streams, groups = source.open(*settings), [full]
    again = _opens_again(source, streams)
    if out is not None:
        groups = _as_begun(out, full) or split(full, list(streams.values()), shared.batch_size, place)
    if len(groups) > 1 and not (again and _repeats(source, settings, streams)):
        raise UserError(
            f"configs: {len(full)} SAEs do not fit into memory together and would take {len(groups)} passes, but the "
            "activations do not repeat themselves: give an array, a file or a list, or train fewer SAEs at once"
        )

    if out is not None:
        keep_record(out, source, full, shared, place, dtype)

    def one_pass(
        streams: Mapping[str, ActivationStream], group: list[SAEConfig], folder: Path | None
    ) -> list[list[SAE]]:
        runs = []
        for name, stream in streams.items():
            own = folder if folder is None or len(streams) == 1 else folder / name
            report = say if progress else _silent
            runs.append(Run(stream, group, shared, place, dtype, out=own, resume=resume, say=report))
        try:
            return Trainer(runs, [*callbacks, *([ProgressBar()] if progress else [])]).fit()
        finally:
            for stream in streams.values() if again else ():
                stream.close()

    if out is None or len(groups) == 1:
        return dict(zip(streams, one_pass(streams, full, out), strict=True))
    found: dict[str, list[SAE]] = {name: [] for name in streams}
    source = source.as_begun(next(iter(streams.values())).identity)  # every pass sees the same batches
    remove_leftovers(make_folder(out), PLAN)
    write_file(out / PLAN, "passes", {"sizes": [len(group) for group in groups]})
    for number, group in enumerate(groups, start=1):
        say(f"pass {number} of {len(groups)}: {len(group)} SAEs")
        trained = one_pass(streams or source.open(*settings), group, out / f"pass-{number}")
        for name, saes in zip(found, trained, strict=True):
            found[name] += [sae.cpu() if keep else sae.to("meta") for sae in saes]
        streams = {}  # its memory is needed for the next pass
    return found


def _silent(line: str) -> None:
    pass


def _repeats(source: ActivationSource, settings: Any, streams: Mapping[str, ActivationStream]) -> bool:
    """Whether iterables begin with the same tokens when they are opened again, unlike a loader that shuffles."""
    if not any(isinstance(stream, IterableStream) for stream in streams.values()):
        return True
    pairs = zip(streams.values(), source.open(*settings).values(), strict=True)
    return all(torch.equal(stream.heldout, other.heldout) for stream, other in pairs)


def _opens_again(source: ActivationSource, streams: Mapping[str, ActivationStream]) -> bool:
    """Whether a source can be opened for another pass; a stream or an iterable may be readable only once."""
    if not isinstance(source, Source):
        return True
    return all(
        isinstance(part, Rows | Endless) or (isinstance(stream, IterableStream) and stream.again)
        for part, stream in zip(source.parts.values(), streams.values(), strict=True)
    )


def checked(configs: SAEConfig | Sequence[SAEConfig], shared: TrainConfig) -> list[SAEConfig]:
    """The configurations with names and seeds filled in."""
    listed = [configs] if isinstance(configs, SAEConfig) else list(configs)
    if not listed:
        raise UserError("configs = []: must hold at least one SAEConfig")
    full, size = named(listed, shared.seed), shared.batch_size
    for config in full:
        for tokens in (config.pool.scope.tokens, config.pool.scope.then):
            if tokens is not None and size % min(tokens, size):
                raise UserError(f"{config.name}: scope of {tokens} tokens: must divide batch_size = {size}")
    return full


def _recorded_source(out: Path) -> Mapping[str, Any]:
    """The identity of the activations that the run in `out` began with; empty if there is no run."""
    found = next((read_file(record, "run").get("source") for record in begun(out)), None)
    return found if isinstance(found, dict) else {}


def _as_begun(out: Path, configs: list[SAEConfig]) -> list[list[SAEConfig]] | None:
    """The passes of a run that is resumed: free memory may have changed since."""
    if (out / "run.json").exists() or (any(out.glob("*/run.json")) and not any(out.glob("pass-*"))):
        return [configs]
    if not (out / PLAN).exists():
        return None
    sizes: Any = read_file(out / PLAN, "passes").get("sizes")
    whole = isinstance(sizes, list) and all(isinstance(size, int) and size > 0 for size in sizes)
    if not whole or sum(sizes) != len(configs):
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


def steps_of(steps: int | None, tokens: int | None, batch_size: int) -> int:
    """Number of steps from `steps` or `tokens`, of which one must be given: whole batches in so many tokens."""
    if (steps is None) == (tokens is None):
        raise UserError(f"steps = {steps}, tokens = {tokens}: give one of the two")
    if tokens is not None and not tokens >= batch_size:
        raise UserError(f"tokens = {tokens}: must be at least batch_size = {batch_size}")
    return steps if steps is not None else int(tokens or 0) // batch_size


def check_start(configs: Sequence[SAEConfig], shared: TrainConfig, out: Path, resume: bool) -> None:
    """Raise the errors of a run that need no activations, before these are opened."""
    checked(configs, shared)
    if not resume and (out / "run.json").exists():
        raise holds_run(out)
    check_writable(out)
    if "wandb" in shared.log_to:
        check_wandb()
