"""A training run: its settings, its learners, its folder, and how far it is."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sampled_sae.data.harvest import HarvestStopped
from sampled_sae.data.stream import ActivationStream
from sampled_sae.formats import describe
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.latents import Shard
from sampled_sae.method.presets import spec
from sampled_sae.method.rate import as_begun, summary, with_lr
from sampled_sae.sae import SAE
from sampled_sae.training import checkpoint, folder
from sampled_sae.training.folder import HOW
from sampled_sae.training.heldout import fingerprint
from sampled_sae.training.learner import Learner, Stats
from sampled_sae.training.settings import FREE, TrainConfig
from sampled_sae.training.units import Inputs, finished, input_scale
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.ranks import Ranks
from sampled_sae.utils.watch import patient


class Callback:
    """What to do at each step, checkpoint and end of a run; every method is optional. Of several ranks, each calls its
    own callbacks."""

    def needs_stats(self, step: int) -> bool:
        """Whether this step must be measured."""
        return False

    def on_batch(self, run: Run, step: int, x: Tensor) -> None:
        """Before the steps of all SAEs on x [batch, d_in], in the units of training."""

    def on_step(self, run: Run, learner: Learner, step: int, stats: Stats | None) -> None:
        """After each SAE's step; `stats` are floats if any callback needs them. May raise `Interrupted`."""

    def on_steps(self, run: Run, step: int, stats: Mapping[str, Stats] | None) -> None:
        """After the steps of all SAEs; `stats` by name, those of SAEs on other ranks too, if the step is logged."""

    def on_checkpoint(self, run: Run, step: int, folder: Path) -> None:
        """After a checkpoint of `step` steps is complete."""

    def on_end(self, run: Run, saes: list[SAE] | None) -> None:
        """Always called once a run has begun; None if it stopped early."""


class Run:
    """All SAEs on one stream of activations: learners, folder, and the step that they have reached.

    Of several ranks, each has learners for its own SAEs, and the first one writes the folder's records and log.
    """

    def __init__(
        self,
        stream: ActivationStream,
        configs: list[SAEConfig],
        shared: TrainConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        out: Path | None = None,
        resume: bool = False,
        say: Callable[[str], None] = lambda line: None,
        ranks: Ranks | None = None,
        own: Collection[str] | None = None,
    ):
        """`own` are the names of the SAEs that this rank trains; all of them by default."""
        self.ranks = ranks or Ranks()
        self.own = [str(config.name) for config in configs if own is None or config.name in own]
        self.stream, self.given, self.shared = stream, configs, shared
        self.configs = [with_lr(config, stream.d_in, shared.batch_size, shared.steps) for config in configs]
        self.device, self.dtype = device, dtype
        self.out, self.resume, self.say = out, resume, say
        self.restored: checkpoint.Checkpoint | None = None
        self.callbacks: list[Callback] = []
        self.learners: list[Learner] = []
        self.saes: list[SAE] | None = None
        """The trained SAEs once the run is finished."""
        self.step, self.saved_step = 0, -1
        self.extending = False
        self._writer = None if out is None else checkpoint.Writer(out / "checkpoints", device, self.ranks)
        self._writing: tuple[int, Future[Path]] | None = None  # a step, and the checkpoint of it that is being written
        self.inputs, self.heldout = Inputs(stream, device, dtype), ""
        self.source: dict[str, Any] = {} if out is None else dict(stream.identity)
        self.first, self.before, self.begun = 0, 0.0, 0.0
        if shared.log_to and out is None:
            raise UserError(f"log_to = {shared.log_to[0]!r}: needs a folder; set out")

    def describe(self) -> dict[str, Any]:
        """Everything that decides the result; a run can only be resumed under the same description."""
        settings = {name: value for name, value in self.shared.to_dict().items() if name not in FREE}
        if not self.shared.extends:
            del settings["extends"]  # as in the records of earlier versions
        kind = {"dtype": str(self.dtype).removeprefix("torch."), "device": self.device.type}
        return {"train": settings, **kind, "saes": [config.to_dict() for config in self.configs]}

    @property
    def scale(self) -> float:
        """What the inputs are divided by in training."""
        return self.inputs.scale

    # ---- folder and start ---------------------------------------------------------------------------

    # A training may be called in inference mode, in which its tensors could not be changed later.
    @torch.inference_mode(False)
    def open(self) -> None:
        """Read the folder: `saes` if the run there is finished, else its last checkpoint, if there is one."""
        if self.out is None:
            if self.resume:
                raise UserError("resume = True: needs the folder of the run; set out")
            return
        content = folder.read_run(self.out, self.resume, self.ranks)
        if content is None:
            return
        self.configs = as_begun(self.given, self.configs, content["config"].get("saes"))
        description = self.describe()
        self.extending = folder.is_extended(content, self.shared)
        folder.check_same(self.out, content, description, self.source, self.extending)
        if self.extending:
            return
        if content.get("finished"):
            if self.ranks.first:
                checkpoint.remove_all(self._checkpoints)
            self.saes = [self._loaded(config) for config in self.configs]
            self.say(f"{self.out}: this run is finished; its SAEs are loaded")
            return
        self.restored = checkpoint.load_latest(self._checkpoints, description, self.say, self.ranks, self.own)
        if self.restored is None:
            start = f"it begins again at step {self.shared.extends}, with a new log.jsonl"
            self.say(f"{self.out}: no checkpoint of this run is left; {start}")

    @torch.inference_mode(False)
    def begin(self) -> None:
        """Create the learners or restore them from the checkpoint."""
        x = self.stream.heldout
        if self.shared.extends and self.out is not None:
            folder.check_replaceable(self.out, [str(config.name) for config in self.configs])
        for config in [config for config in self.configs if config.name in self.own]:
            assert config.seed is not None
            self.learners.append(
                Learner(
                    *(config, self.stream.d_in, self.shared.steps, config.seed, self.device, self.dtype),
                    extends=self.shared.extends,
                    shard=Shard(self.ranks.latents),
                )
            )
        self.heldout = fingerprint(x)
        self._check_ranks()
        if self.restored is not None:
            try:
                self._restore(self.restored)
            except (KeyError, TypeError, RuntimeError) as error:  # one of version 0, which had no checksums
                where = f"{self._checkpoints}: the checkpoint of step {self.restored.step}"
                raise UserError(f"{where} does not fit this run ({type(error).__name__}: {error})") from None
            self.restored = None  # its memory is free again
            self.say(f"resumed at step {self.step}")
        elif self.shared.extends:
            self._extend()
        else:
            self.inputs.scale = input_scale(x, self.shared.input_norm)
        self.say(summary(self.given, self.configs))
        self.first, self.begun = self.step, time.monotonic()
        if not self.learners:
            self.stream.leave_out()
        if self.out is not None and self.ranks.first and (self.extending or not (self.out / "run.json").exists()):
            self._record(finished=False)

    def _check_ranks(self) -> None:
        """Raise if ranks have other settings or activations than the first one, such as random ones without a seed."""
        own = {"activations": [self.stream.d_in, self.heldout], "settings": self.describe()}
        every = [json.loads(text) for text in self.ranks.all.texts(json.dumps(own))]
        for rank, other in enumerate(every):
            for name in own:
                if other[name] != every[0][name]:
                    raise UserError(f"{name}: rank {rank} has others than rank 0; all ranks must have the same ones")

    def _restore(self, from_: checkpoint.Checkpoint) -> None:
        extra, d_in = from_.extra, self.stream.d_in
        if extra["width"] != d_in or extra["heldout"] != self.heldout:
            raise UserError(
                f"activations (width {d_in}): not those that the run in {self.out} began with "
                f"(width {extra['width']}); {HOW} with the same ones"
            )
        self.step = self.saved_step = from_.step
        self.inputs.scale, self.before = float(extra["scale"]), float(extra["seconds"])
        for learner in self.learners:
            learner.load_state(from_.states[str(learner.config.name)])

    def _extend(self) -> None:
        """Begin an extension: with the saved SAEs, the same input scale, and a new optimizer."""
        training = describe(self._folder(self.configs[0])).metadata["training"]
        self.inputs.scale, self.before = float(training["scale"]), float(training["seconds"]) * len(self.configs)
        for learner in self.learners:
            learner.begin_with(SAE.load(self._folder(learner.config), self.device).rescale_(1 / self.inputs.scale))
        self.step = self.shared.extends
        self.say(f"extending from step {self.step} to {self.shared.steps}")

    def _record(self, finished: bool) -> None:
        assert self.out is not None
        methods = {str(config.name): spec(config) for config in self.configs}
        folder.write_run(self.out, methods, self.describe(), self.source, finished)

    # ---- steps --------------------------------------------------------------------------------------

    def logs_at(self, step: int) -> bool:
        """Whether this step gets lines in the log."""
        return step % self.shared.log_every == 0 or step == self.shared.steps - 1

    def advance(self) -> bool:
        """One step of all SAEs; False if its batch was given up for an interrupt, on all ranks alike."""
        step = self.step
        if self._writing is not None and self._writing[1].done():
            self._written()
        try:
            measured = self._steps()
            stats = self._of_all(measured) if self.logs_at(step) else None
            for callback in self.callbacks:
                callback.on_steps(self, step, stats)
        except HarvestStopped:
            return False
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                f"batch_size = {self.shared.batch_size}, {len(self.learners)} SAEs: out of memory on {self.device} at "
                f"step {step}: lower contexts_at_once of a harvest, or in a new run batch_size, d_sae, buffer_tokens "
                f"or the number of SAEs{self.kept()}"
            ) from None
        self.step += 1
        return True

    def _steps(self) -> dict[str, Stats]:
        """One step of each learner on the next batch; returns what was measured."""
        step, found = self.step, dict[str, Stats]()
        if not self.learners:
            self.stream.batch(step)
            return found
        x = self.inputs.batch(step, self.kept())
        for callback in self.callbacks:
            callback.on_batch(self, step, x)
        measure = self.logs_at(step) or any(callback.needs_stats(step) for callback in self.callbacks)
        for learner in self.learners:
            stats = learner.step(x, step, measure)
            floats = None if stats is None else self._checked(learner, Stats(*map(float, stats)))
            if floats is not None:
                found[str(learner.config.name)] = floats
            for callback in self.callbacks:
                callback.on_step(self, learner, step, floats)
        return found

    def _of_all(self, own: Mapping[str, Stats]) -> dict[str, Stats]:
        """What was measured on all ranks, in the order of the SAEs."""
        names = [str(config.name) for config in self.configs]
        table = torch.zeros(len(names), len(Stats._fields), dtype=torch.float64)
        for name, stats in own.items() if self.ranks.shard == 0 else ():
            table[names.index(name)] = torch.tensor(stats, dtype=torch.float64)
        return dict(zip(names, (Stats(*row) for row in self.ranks.all.sum(table).tolist()), strict=True))

    def _checked(self, learner: Learner, stats: Stats) -> Stats:
        self.inputs.check(self.kept())
        if not math.isfinite(stats.loss):
            raise self._diverged(learner, f"the loss became {stats.loss}", self.step)
        return stats

    def _diverged(self, learner: Learner, what: str, step: int) -> UserError:
        lr = learner.config.optimizer.lr or 0.0
        kept = f"; the last good checkpoint is of step {self.saved_step}" if self.saved_step >= 0 else ""
        return UserError(f"{learner.config.name}: {what} by step {step}: try a lower lr than {lr:g}{kept}")

    def kept(self) -> str:
        """What is left of the run after an error, for its line."""
        return f"; the checkpoint of step {self.saved_step} is kept: {HOW}" if self.saved_step >= 0 else ""

    def seconds(self) -> float:
        """Training time so far, in all parts of the run."""
        return self.before + time.monotonic() - self.begun

    def tokens_per_second(self) -> float:
        """Mean speed since the run began or was resumed, during a step."""
        tokens = (self.step + 1 - self.first) * self.shared.batch_size
        return tokens / (time.monotonic() - self.begun)

    # ---- checkpoints and end ------------------------------------------------------------------------

    def check_weights(self, step: int) -> None:
        """Raise if the weights after `step` steps, or a batch before, are not finite."""
        self.inputs.check(self.kept())
        for learner in self.learners:
            if not all(bool(torch.isfinite(weight).all()) for weight in learner.weights):
                raise self._diverged(learner, "the weights are no longer finite", step)

    def save_checkpoint(self, step: int) -> None:
        """Write a checkpoint of `step` complete steps, if there is a folder; non-finite weights are an error.

        On a GPU this may happen beside the next steps.
        """
        self._written()
        if self.saved_step == step:
            return
        self.check_weights(step)
        if self._writer is None:
            return
        states = {str(learner.config.name): learner.state() for learner in self.learners}
        extra = {
            "scale": self.inputs.scale,
            "seconds": self.seconds(),
            "width": self.stream.d_in,
            "heldout": self.heldout,
        }
        made = checkpoint.Checkpoint(step, self.describe(), states, extra)
        with patient():
            self._writing = (step, self._writer.write(made))
        if self._writing[1].done():
            self._written()

    def _written(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and report it."""
        if self._writing is not None:
            (step, future), self._writing = self._writing, None
            written = future.result()
            self.saved_step = step
            for callback in self.callbacks:
                callback.on_checkpoint(self, step, written)

    def close(self) -> None:
        """Wait until the last checkpoint is complete; one of a finished run is given up."""
        if self._writer is not None:
            self._writer.close(give_up=self.saes is not None)
            if self.saes is None:
                self._written()

    @torch.inference_mode(False)
    def finish(self) -> None:
        """Calibrate the SAEs and save them; `saes` take raw activations, those of other ranks are without weights."""
        x, seconds = self.stream.heldout.to(self.device, self.dtype), self.seconds() / len(self.configs)
        train, metadata = self.describe()["train"], self.stream.metadata
        own = {
            learner.config.name: finished(
                *(learner, x, self.shared.batch_size, self.inputs.scale), seconds, train, metadata
            )
            for learner in self.learners
        }
        if self.out is None:
            self.saes = list(own.values())
            return
        with self.ranks.all.together():
            for config in self.configs if self.ranks.shard == 0 else ():
                if config.name in own:
                    own[config.name].save(self._folder(config))
        if self.ranks.first:
            self._record(finished=True)
        own = {name: sae for name, sae in own.items() if not sae.W_dec.is_meta}
        self.saes = [own.get(config.name) or self._loaded(config) for config in self.configs]
        self.close()
        self.ranks.all.barrier()
        if self.ranks.first:
            checkpoint.remove_all(self._checkpoints)  # no longer needed only now

    def _loaded(self, config: SAEConfig) -> SAE:
        """A saved SAE; one that this rank does not have as a whole is without its weights."""
        if config.name in self.own and self.ranks.shards == 1:
            return SAE.load(self._folder(config), self.device)
        sae = SAE(describe(self._folder(config)), self.dtype, "meta")
        sae.folder = self._folder(config)
        return sae

    @property
    def _checkpoints(self) -> Path:
        assert self.out is not None
        return self.out / "checkpoints"

    def _folder(self, config: SAEConfig) -> Path:
        assert self.out is not None
        return self.out / "saes" / str(config.name)
