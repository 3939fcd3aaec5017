"""A training run: its settings, its learners, its folder, and how far it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sampled_sae.config import Config, Count, Positive, Seed, first_difference, read_file, require, write_file
from sampled_sae.data.harvest import HarvestStopped
from sampled_sae.data.stream import ActivationStream, bad_value
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.rate import as_begun, summary, with_lr
from sampled_sae.sae import SAE
from sampled_sae.training import checkpoint
from sampled_sae.training.heldout import InputNorm, by_threshold, calibrated_threshold, fingerprint, input_scale
from sampled_sae.training.learner import Learner, Stats
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import remove_leftovers
from sampled_sae.utils.system import git_commit, versions


@dataclass(frozen=True, slots=True)
class TrainConfig(Config):
    """Settings that all SAEs of a run share."""

    steps: Positive
    """Optimizer steps."""
    batch_size: Positive = 4096
    """Tokens per step."""
    seed: Seed = 0
    """Seed of the data order, and of each SAE without a seed of its own."""
    input_norm: InputNorm = "sqrt_d_in"
    """Root mean square norm that the inputs are scaled to in training; saved SAEs take raw activations all the same."""
    heldout_tokens: Positive = 65_536
    """Tokens kept out of training to measure c and to calibrate the threshold; at most a tenth of a tensor."""
    log_every: Positive = 50
    """Steps between two lines of the log."""
    checkpoint_every: Positive | None = None
    """Steps between two checkpoints; none means 1,000, and a minute at least."""
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where else the log goes."""
    extends: Count = 0
    """Steps of the finished training that this one extends; 0 for a training of its own."""

    def check(self) -> None:
        require(self.extends < self.steps, "extends", self.extends, f"must be less than steps = {self.steps}")


class Callback:
    """What to do at each step, checkpoint and end of a run; every method is optional."""

    def needs_stats(self, step: int) -> bool:
        """Whether this step must be measured."""
        return False

    def on_batch(self, run: Run, step: int, x: Tensor) -> None:
        """Before the steps of all SAEs on x [batch, d_in], in the units of training."""

    def on_step(self, run: Run, learner: Learner, step: int, stats: Stats | None) -> None:
        """After each SAE's step; `stats` are floats if any callback needs them. May raise `Interrupted`."""

    def on_checkpoint(self, run: Run, step: int, folder: Path) -> None:
        """After a checkpoint of `step` steps is complete."""

    def on_end(self, run: Run, saes: list[SAE] | None) -> None:
        """Always called once a run has begun; None if it stopped early."""


CHECKPOINT_STEPS, CHECKPOINT_SECONDS = 1000, 60.0
"""Least steps and seconds between two checkpoints if no number of steps is set: they cost more than what they save."""
FREE = ("log_every", "checkpoint_every", "log_to")
"""Settings that may change when a run is resumed."""
HOW = "resume (--resume, in Python resume=True)"


def holds_run(out: Path) -> UserError:
    """The error for a folder with a run that is not to be resumed."""
    return UserError(f"out = {str(out)!r}: holds a run already; {HOW} to continue it, or choose another folder")


class Run:
    """All SAEs on one stream of activations: learners, folder, and the step that they have reached."""

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
    ):
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
        self._writer = None if out is None else checkpoint.Writer(out / "checkpoints", device)
        self._writing: tuple[int, Future[Path]] | None = None  # a step, and the checkpoint of it that is being written
        self.scale, self.heldout = 1.0, ""
        self.source: dict[str, Any] = {} if out is None else dict(stream.identity)
        self.unchecked: list[tuple[int, Tensor]] = []
        """Steps and the largest value of each row of their batches, on the device."""
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

    # ---- folder and start ---------------------------------------------------------------------------

    def open(self) -> None:
        """Read the folder: `saes` if the run there is finished, else its last checkpoint, if there is one."""
        if self.out is None:
            if self.resume:
                raise UserError("resume = True: needs the folder of the run; set out")
            return
        for folder, name in ((self.out, "run.json"), (self.out, "log.jsonl"), (self.out / "saes", "*")):
            remove_leftovers(folder, name)
        record = self.out / "run.json"
        if not record.exists():
            if self._checkpoints.exists():
                raise UserError(f"out = {str(self.out)!r}: holds checkpoints of another run; choose another folder")
            return
        if not self.resume:
            raise holds_run(self.out)
        content = read_file(record, "run")
        if not isinstance(content.get("config"), dict):
            raise UserError(f"{record}: not the record of a training run; choose another folder")
        self.configs = as_begun(self.given, self.configs, content["config"].get("saes"))
        description = self.describe()
        recorded, self.extending = content["config"], self._extends(content)
        if self.extending:
            length = {name: description["train"][name] for name in ("steps", "extends")}
            recorded = {**recorded, "train": {**recorded["train"], **length}}
        if difference := first_difference(recorded, description):
            raise UserError(f"{record}: the run there has another configuration: {difference}")
        if difference := first_difference(content.get("source") or self.source, self.source):
            raise UserError(f"{record}: the run there is on other activations: {difference}")
        if self.extending:
            return
        if content.get("finished"):
            checkpoint.remove_all(self._checkpoints)
            self.saes = [SAE.load(self._folder(config), self.device) for config in self.configs]
            self.say(f"{self.out}: this run is finished; its SAEs are loaded")
            return
        self.restored = checkpoint.load_latest(self._checkpoints, description, self.say)
        if self.restored is None:
            start = f"it begins again at step {self.shared.extends}, with a new log.jsonl"
            self.say(f"{self.out}: no checkpoint of this run is left; {start}")

    def _extends(self, content: Mapping[str, Any]) -> bool:
        """Whether the record is that of the finished run that this one extends."""
        train = content["config"].get("train")
        before = train.get("steps") if isinstance(train, dict) else None
        return content.get("finished") is True and self.shared.extends > 0 and before == self.shared.extends

    # Activations may be collected in inference mode, in a generator or around the call, which leaves it on here.
    @torch.inference_mode(False)
    def begin(self) -> None:
        """Create the learners or restore them from the checkpoint."""
        x = self.stream.heldout
        for config in self.configs:
            assert config.seed is not None
            self.learners.append(
                Learner(
                    *(config, self.stream.d_in, self.shared.steps, config.seed, self.device, self.dtype),
                    extends=self.shared.extends,
                )
            )
        self.heldout = fingerprint(x)
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
            self.scale = input_scale(x, self.shared.input_norm)
        self.say(summary(self.given, self.configs))
        self.first, self.begun = self.step, time.monotonic()
        if self.out is not None and (self.extending or not (self.out / "run.json").exists()):
            self._record(finished=False)

    def _restore(self, from_: checkpoint.Checkpoint) -> None:
        extra, d_in = from_.extra, self.stream.d_in
        if extra["width"] != d_in or extra["heldout"] != self.heldout:
            raise UserError(
                f"activations (width {d_in}): not those that the run in {self.out} began with "
                f"(width {extra['width']}); {HOW} with the same ones"
            )
        self.step = self.saved_step = from_.step
        self.scale, self.before = float(extra["scale"]), float(extra["seconds"])
        for learner in self.learners:
            learner.load_state(from_.states[str(learner.config.name)])

    def _extend(self) -> None:
        """Begin an extension: with the saved SAEs, the same input scale, and a new optimizer."""
        for learner in self.learners:
            sae = SAE.load(self._folder(learner.config), self.device)
            training = sae.cfg.metadata["training"]
            self.scale, self.before = float(training["scale"]), float(training["seconds"]) * len(self.learners)
            learner.begin_with(sae.rescale_(1 / self.scale))
        self.step = self.shared.extends
        self.say(f"extending from step {self.step} to {self.shared.steps}")

    def _record(self, finished: bool) -> None:
        """Write `run.json`: the configuration of the run, and whether it is finished."""
        assert self.out is not None
        origin = {"source": self.source, "versions": versions(), "git_commit": git_commit()}
        write_file(self.out / "run.json", "run", {"config": self.describe(), **origin, "finished": finished})

    # ---- steps --------------------------------------------------------------------------------------

    def logs_at(self, step: int) -> bool:
        """Whether this step gets lines in the log."""
        return step % self.shared.log_every == 0 or step == self.shared.steps - 1

    def advance(self) -> None:
        """One step of all SAEs, or none if its batch was given up for an interrupt, which the trainer sees too."""
        step = self.step
        if self._writing is not None and self._writing[1].done():
            self._written()
        try:
            x = self._scaled(self.stream.batch(step))
            for callback in self.callbacks:
                callback.on_batch(self, step, x)
            measure = self.logs_at(step) or any(callback.needs_stats(step) for callback in self.callbacks)
            for learner in self.learners:
                stats = learner.step(x, step, measure)
                floats = None if stats is None else self._checked(learner, Stats(*map(float, stats)))
                for callback in self.callbacks:
                    callback.on_step(self, learner, step, floats)
        except HarvestStopped:
            return
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                f"batch_size = {self.shared.batch_size}, {len(self.learners)} SAEs: out of memory on {self.device} at "
                f"step {step}: lower contexts_at_once of a harvest, or in a new run batch_size, d_sae, buffer_tokens "
                f"or the number of SAEs{self._kept()}"
            ) from None
        self.step += 1

    @torch.inference_mode(False)
    def _scaled(self, x: Tensor) -> Tensor:
        """The batch in the units of training. Overflow is checked at once, on a GPU when the next line is logged."""
        x = x.to(self.device, self.dtype) / self.scale
        self.unchecked.append((self.step, torch.linalg.vector_norm(x, torch.inf, dim=1)))
        if self.device.type == "cpu" or len(self.unchecked) == 256:
            self._check_overflow()
        return x

    def _check_overflow(self) -> None:
        """Raise if a value in a batch since the last check is too large to be squared; this waits for the GPU."""
        batches, self.unchecked = self.unchecked, []
        limit = max(1e3, torch.finfo(self.dtype).max ** 0.5 / 1e3)  # room for sums of squares
        largest = torch.stack([values.max() for _, values in batches]).tolist() if batches else []
        for (step, values), worst in zip(batches, largest, strict=True):
            if not worst <= limit:
                position = int((~(values <= limit)).nonzero()[0])
                row = self.stream.row(step, position)
                error = bad_value(float(values[position]) * self.scale, f"activations: batch {step}", row)
                raise UserError(f"{error}{self._kept()}")

    def _checked(self, learner: Learner, stats: Stats) -> Stats:
        self._check_overflow()
        if not math.isfinite(stats.loss):
            raise self._diverged(learner, f"the loss became {stats.loss}", self.step)
        return stats

    def _diverged(self, learner: Learner, what: str, step: int) -> UserError:
        lr = learner.config.optimizer.lr or 0.0
        kept = f"; the last good checkpoint is of step {self.saved_step}" if self.saved_step >= 0 else ""
        return UserError(f"{learner.config.name}: {what} by step {step}: try a lower lr than {lr:g}{kept}")

    def _kept(self) -> str:
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
        self._check_overflow()
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
        extra = {"scale": self.scale, "seconds": self.seconds(), "width": self.stream.d_in, "heldout": self.heldout}
        made = checkpoint.Checkpoint(step, self.describe(), states, extra)
        self._writing = (step, self._writer.write(made))
        if self._writing[1].done():
            self._written()

    def _written(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and report it."""
        if self._writing is not None:
            (step, future), self._writing = self._writing, None
            folder = future.result()
            self.saved_step = step
            for callback in self.callbacks:
                callback.on_checkpoint(self, step, folder)

    def close(self) -> None:
        """Wait until the last checkpoint is complete; one of a finished run is given up."""
        if self._writer is not None:
            self._writer.close(give_up=self.saes is not None)
            if self.saes is None:
                self._written()

    @torch.inference_mode(False)
    def finish(self) -> None:
        """Calibrate the threshold, fold the input's scale into the weights, save; `saes` take raw activations."""
        x, seconds = self.stream.heldout.to(self.device, self.dtype), self.seconds()
        saes = []
        for learner in self.learners:
            sae = learner.sae().rescale_(self.scale)
            measured = None
            if len(x):
                theta = calibrated_threshold(sae, x, learner.config.k, self.shared.batch_size)
                sae.threshold.mul_(theta) if sae.threshold.ndim else sae.threshold.fill_(theta)
                measured = by_threshold(sae, x, batch_size=self.shared.batch_size)
            sae.cfg.metadata.update(self.stream.metadata)
            sae.cfg.metadata["training"] = self.describe()["train"] | {
                "scale": self.scale,
                "seconds": seconds / len(self.learners),
                "path": learner.path.name,
                "dead": float(learner.dead_share()),
                "ever_pooled": float(learner.ever_pooled.float().mean()),
                "heldout_tokens_used": len(x),
                "heldout": measured and {"fvu": measured.fvu, "l0": measured.l0},
                "versions": versions(),
                "git_commit": git_commit(),
            }
            saes.append(sae)
        if self.out is not None:
            for sae, config in zip(saes, self.configs, strict=True):
                sae.save(self._folder(config))
            self._record(finished=True)
        self.saes = saes
        self.close()
        if self.out is not None:
            checkpoint.remove_all(self._checkpoints)  # no longer needed only now

    @property
    def _checkpoints(self) -> Path:
        assert self.out is not None
        return self.out / "checkpoints"

    def _folder(self, config: SAEConfig) -> Path:
        assert self.out is not None
        return self.out / "saes" / str(config.name)
