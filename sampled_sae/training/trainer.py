"""The loop over batches: many SAEs on one stream, several streams in step, several ranks, several passes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from sampled_sae.config import hints, require, write_file
from sampled_sae.data.source import Source, open_source
from sampled_sae.data.stream import ActivationSource, ActivationStream, Endless, IterableStream, Rows
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.presets import named
from sampled_sae.sae import SAE
from sampled_sae.training import division, folder
from sampled_sae.training.callbacks import ProgressBar, check_wandb, of_run
from sampled_sae.training.estimate import check_memory
from sampled_sae.training.run import Callback, Run
from sampled_sae.training.settings import TrainConfig
from sampled_sae.utils.errors import Interrupted, UserError
from sampled_sae.utils.files import alone_in, check_writable, make_folder, remove_leftovers
from sampled_sae.utils.progress import say
from sampled_sae.utils.ranks import Group, RankLost, Ranks, join
from sampled_sae.utils.system import listening, switching_often, usable_device
from sampled_sae.utils.watch import patient, tick, watching

MEET = 0.5
"""Seconds between two times that the ranks ask each other whether to stop."""


class Trainer:
    """Trains several runs in step with each other."""

    def __init__(self, runs: Sequence[Run], callbacks: Sequence[Callback] = ()):
        """Each run calls its own log and checkpoints, then `callbacks`."""
        self.runs, self.callbacks, self.ranks = list(runs), list(callbacks), runs[0].ranks

    def fit(self) -> list[list[SAE]]:
        """Every run's SAEs; a finished run's SAEs are loaded, and runs that are behind the others catch up first."""
        with ExitStack() as locks:
            with self.ranks.all.together():
                for run in self.runs:
                    if run.out is not None and self.ranks.first:
                        locks.enter_context(alone_in(run.out))
            for run in self.runs:
                run.open()
            if going := [run for run in self.runs if run.saes is None]:
                with self.ranks.all.together():
                    self._check_memory(going)
                self._train(going)
        return [run.saes or [] for run in self.runs]

    def _check_memory(self, runs: list[Run]) -> None:
        first = runs[0]
        configs = [config for run in runs for config in run.configs if config.name in run.own]
        beside = sum(run.stream.memory_estimate() for run in runs)
        size, shards = first.shared.batch_size, self.ranks.shards
        first.say(check_memory(configs, first.stream.d_in, size, first.device, first.dtype, beside, shards))

    def _train(self, runs: list[Run]) -> None:
        with ExitStack() as ends, watching(runs[0].kept, self.ranks.world):
            for run in runs:
                ends.callback(run.close)
                run.begin()
                run.callbacks = [*of_run(run), *self.callbacks]
                for callback in run.callbacks:
                    ends.callback(lambda callback, run: callback.on_end(run, run.saes), callback, run)
            if any(run.device.type == "cuda" for run in runs):
                ends.enter_context(switching_often())
            try:
                with listening(chained=False, insisted=self.ranks.world == 1) as interrupted:
                    self._loop(runs, interrupted)
            except RankLost as lost:
                raise RankLost(f"{lost}{runs[0].kept()}") from lost

    def _loop(self, runs: list[Run], interrupted: threading.Event) -> None:
        meetings, begun = Meetings(self.ranks.all), False
        while (step := min(run.step for run in runs)) < runs[0].shared.steps:
            with nullcontext() if begun else patient():  # the first step may compile its kernels
                done = [run.advance() for run in runs if run.step == step]
            begun = True
            tick()
            if not all(done) or meetings.stop(interrupted.is_set()):
                raise _interrupted(runs)  # only now: the step in progress ends first
        with patient():
            for run in runs:
                run.finish()


class Meetings:
    """Ranks ask each other whether to stop, at the same steps on all of them, about every MEET seconds."""

    def __init__(self, group: Group):
        self.group, self.every, self.left, self.last = group, 1, 1, time.monotonic()

    def stop(self, asked: bool) -> bool:
        """Called once per step: whether any rank was asked to stop."""
        if self.group.size == 1:
            return asked
        self.left -= 1
        if self.left:
            return False
        pace = MEET * self.every / max(time.monotonic() - self.last, 1e-6)
        found = self.group.gather(torch.tensor([asked, min(max(1, int(pace)), 2 * self.every)]))
        self.every = self.left = int(found[:, 1].min())
        self.last = time.monotonic()
        return bool(found[:, 0].any())


def _interrupted(runs: list[Run]) -> Interrupted:
    step, out = runs[0].step, runs[0].out
    if out is None:
        return Interrupted(f"interrupted at step {step}; nothing is kept, because out was not set")
    for run in runs:
        run.save_checkpoint(run.step)
        run.close()
    return Interrupted(f"interrupted at step {step}; saved in {out}, {folder.HOW} to continue")


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
    divide: str = "auto",
) -> dict[str, list[SAE]]:
    """Train all SAEs on each stream of `activations`, which `open_source` opens; returns them by hook point.

    One stream is a run in `out`, several are runs in `out`/HOOK, such as layer-12. With `out`, SAEs that do not fit
    into memory together are trained in several passes over the activations, in `out`/pass-1, `out`/pass-2 and so on;
    these SAEs are returned on the CPU. Without `keep`, saved SAEs are returned without their weights, on the device
    `meta`; so are those that other ranks have trained. `divide` says how several ranks share the work (see
    `division.divide`); "none" leaves each process to itself.
    """
    right = "must be torch.float32, torch.bfloat16 or torch.float64; Adam's moments leave the range of float16"
    require(dtype in (torch.float32, torch.bfloat16, torch.float64), "dtype", dtype, right)
    ranks = join(device) if divide != "none" else Ranks(device=usable_device(device))
    full, source = checked(configs, shared), open_source(activations)
    if out is None and ranks.world > 1:
        raise UserError(f"out = None: {ranks.world} ranks need a folder for the SAEs, the same one for all of them")
    resume = resume if out is None else folder.resumes(out, resume)
    if out is not None and resume:
        source = source.as_begun(folder.recorded_source(out))
    settings = (shared.batch_size, shared.heldout_tokens, shared.seed, shared.steps)
    streams, passes = source.open(*settings), [full]
    again = _opens_again(source, streams)
    if out is not None:
        how = "auto" if divide == "none" else divide
        passes, *shape = division.divide(how, full, list(streams.values()), shared.batch_size, ranks, out)
        ranks = ranks.divided(*shape)
    if len(passes) > 1 and not (again and _repeats(source, settings, streams)):
        raise UserError(
            f"configs: {len(full)} SAEs do not fit into memory together and would take {len(passes)} passes, but the "
            "activations do not repeat themselves: give an array, a file or a list, or train fewer SAEs at once"
        )
    told: Callable[[str], None] = say if progress and ranks.first else (lambda line: None)
    if out is not None and ranks.first:
        folder.keep_record(out, source, full, shared, ranks.device, dtype)
        folder.note_begun(out)

    def one_pass(streams: Mapping[str, ActivationStream], group: list[SAEConfig], into: Path | None) -> list[list[SAE]]:
        runs, own = [], division.own_saes(group, len(streams), ranks)
        for (name, stream), mine in zip(streams.items(), own, strict=True):
            runs.append(
                Run(
                    *(stream, group, shared, ranks.device, dtype),
                    out=into if into is None or len(streams) == 1 else into / name,
                    resume=resume,
                    say=told,
                    ranks=ranks,
                    own=[str(config.name) for config in mine],
                )
            )
        bar = [ProgressBar(often=ranks.shards == 1)] if progress and ranks.first else []
        try:
            return Trainer(runs, [*callbacks, *bar]).fit()
        finally:
            for stream in streams.values() if again else ():
                stream.close()

    found: dict[str, list[SAE]] = {name: [] for name in streams}
    if out is None or len(passes) == 1:
        found = dict(zip(streams, one_pass(streams, full, out), strict=True))
    else:
        source = source.as_begun(next(iter(streams.values())).identity)  # every pass sees the same batches
        if ranks.first:
            remove_leftovers(make_folder(out), division.PLAN)
            write_file(out / division.PLAN, "passes", {"sizes": [len(group) for group in passes]})
        for number, group in enumerate(passes, start=1):
            told(f"pass {number} of {len(passes)}: {len(group)} SAE{'s' * (len(group) > 1)}")
            trained = one_pass(streams or source.open(*settings), group, out / f"pass-{number}")
            for name, saes in zip(found, trained, strict=True):
                found[name] += [sae.cpu() if keep and not sae.W_dec.is_meta else sae.to("meta") for sae in saes]
            streams = {}  # its memory is needed for the next pass
    if out is not None and ranks.first:
        folder.note_ended(out)
    return found


def resume_training(
    out: Path, extend: int | None = None, device: str | torch.device | None = None, **settings: Any
) -> dict[str, list[SAE]]:
    """Continue the training in `out`, or extend it by so many steps; `settings` are those of `run_training`."""
    require(extend is None or extend >= 1, "extend", extend, "must be at least 1")
    ranks = join(device or folder.read_record(out).device)
    with ranks.all.together():
        if extend is not None and ranks.first:
            folder.extend_record(out, extend)
    record, place = folder.read_record(out), str(device or ranks.device)
    with folder.inside(Path(record.folder)):
        origin = record.file or record.model
        if origin is None:
            why = "its activations were given in memory; call ss.train with the same ones and resume=True"
            raise UserError(f"folder = {str(out)!r}: {why}")
        settings |= {"out": out, "resume": True, "device": place, "dtype": getattr(torch, record.dtype)}
        return run_training(origin.reopen(place), list(record.saes), record.train, **settings)


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


def steps_of(steps: int | None, tokens: int | None, batch_size: int) -> int:
    """Number of steps from `steps` or `tokens`, of which one must be given: whole batches in so many tokens."""
    if (steps is None) == (tokens is None):
        raise UserError(f"steps = {steps}, tokens = {tokens}: give one of the two")
    if tokens is not None:
        TrainConfig(1, batch_size)  # reports a wrong batch size
        require(isinstance(tokens, Real) and math.isfinite(tokens), "tokens", tokens, "must be a number")
        require(tokens >= batch_size, "tokens", tokens, f"must be at least batch_size = {batch_size}")
    return steps if steps is not None else int(tokens or 0) // batch_size


def train_config(steps: int | None, tokens: int | None, settings: Mapping[str, Any]) -> TrainConfig:
    """The settings of a training of so many steps or tokens; a name that is no setting is an error."""
    known = [name for name in hints(TrainConfig) if name != "steps"]
    if unknown := [name for name in settings if name not in known]:
        raise UserError(f"{unknown[0]}: is no setting of training; must be one of {', '.join(known)}")
    return TrainConfig(steps_of(steps, tokens, settings.get("batch_size", TrainConfig(1).batch_size)), **settings)


def check_start(configs: Sequence[SAEConfig], shared: TrainConfig, out: Path, resume: bool) -> None:
    """Raise the errors of a run that need no activations, before these are opened."""
    checked(configs, shared)
    if not folder.resumes(out, resume) and (out / "run.json").exists():
        raise folder.holds_run(out)
    check_writable(out)
    if "wandb" in shared.log_to:
        check_wandb()
