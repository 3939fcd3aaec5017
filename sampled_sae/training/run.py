"""A training run: its learners, its folder, and how far it is."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sampled_sae.config import first_difference, read_file, require, to_dict, whole_numbers, write_file
from sampled_sae.data.harvest import HarvestStopped
from sampled_sae.data.stream import ActivationStream
from sampled_sae.method.config import SAEConfig
from sampled_sae.sae import SAE
from sampled_sae.training import checkpoint
from sampled_sae.training.callbacks import Sink, open_sinks
from sampled_sae.training.heldout import by_threshold, calibrated_threshold
from sampled_sae.training.learner import Learner, Stats
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.system import git_commit, versions


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """What all SAEs of a run share."""

    steps: int
    """Optimiser steps."""
    batch_size: int = 4096
    """Tokens a step."""
    seed: int = 0
    """Seed of the data order, and of each SAE that names none of its own."""
    normalize: bool = True
    """Train on x/c with c the root mean square norm of x; saved SAEs take raw activations all the same."""
    heldout_tokens: int = 65_536
    """Tokens kept out of training to measure c and to calibrate the threshold; of a tensor at most a tenth."""
    log_every: int = 50
    """Steps between two lines of the log."""
    checkpoint_every: int = 1000
    """Steps between two checkpoints."""

    def __post_init__(self) -> None:
        whole_numbers(self, "steps", "batch_size", "seed", "heldout_tokens", "log_every", "checkpoint_every")
        require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "must fit into 64 bits")
        for name in ("steps", "batch_size", "heldout_tokens", "log_every", "checkpoint_every"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")


HOW = "resume (--resume, in Python resume=True)"


class Run:
    """A training run: its learners, its folder and how far it is."""

    def __init__(
        self,
        configs: list[SAEConfig],
        shared: TrainConfig,
        device: torch.device,
        dtype: torch.dtype,
        out: Path | None,
        say: Callable[[str], None],
        source: Mapping[str, Any] | None = None,
    ):
        """`source` says where the activations come from; a run in `out` goes on only with the same."""
        self.configs, self.shared = configs, shared
        self.device, self.dtype = device, dtype
        self.out, self.say = out, say
        self.learners: list[Learner] = []
        self.step = 0
        self.saved_step = -1
        self.scale = 1.0
        self.seconds = 0.0
        self.heldout = ""
        self.restored: checkpoint.Checkpoint | None = None
        self.source = dict(source or {})
        self.sinks: list[Sink] = []
        self.first, self.before, self.begun = 0, 0.0, 0.0
        self.fve = (math.nan, math.nan)

    def describe(self) -> dict[str, Any]:
        """What decides the outcome; a run can only be resumed under the same description."""
        settings = to_dict(self.shared)
        for free in ("log_every", "checkpoint_every"):  # may change between two parts of a run
            settings.pop(free)
        saes = [to_dict(config) for config in self.configs]
        kind = {"dtype": str(self.dtype).removeprefix("torch."), "device": self.device.type}
        return {"train": settings, **kind, "saes": saes}

    def open_folder(self, resume: bool) -> list[SAE] | None:
        """Look at what `out` holds; returns the SAEs if the run there is already finished."""
        if self.out is None:
            if resume:
                raise UserError("resume = True: needs the folder of the run; set out")
            return None
        description, record = self.describe(), self.out / "run.json"
        if not record.exists():
            if self._checkpoints().exists():
                raise UserError(f"out = {str(self.out)!r}: holds checkpoints of another run; choose another folder")
            return None
        if not resume:
            raise UserError(
                f"out = {str(self.out)!r}: holds a run already; {HOW} to go on with it, or choose another folder"
            )
        content = read_file(record, "run")
        if "config" not in content:
            raise UserError(f"{record}: not the record of a training run; choose another folder")
        difference = first_difference(content["config"], description)
        if difference:
            raise UserError(f"{record}: the run there has another configuration: {difference}")
        difference = first_difference(content.get("source") or self.source, self.source)
        if difference:
            raise UserError(f"{record}: the run there is on other activations: {difference}")
        if content.get("finished"):
            checkpoint.remove_all(self._checkpoints())
            return [SAE.load(self._folder(config), self.device) for config in self.configs]
        self.restored = checkpoint.load_latest(self._checkpoints(), description, self.say)
        if self.restored is None:
            self.say(f"{self.out}: no checkpoint of this run is left; it begins again at step 0, with a new log.jsonl")
        return None

    # Whoever collects activations in inference mode, in a generator or around the call, leaves it switched on here.
    @torch.inference_mode(False)
    def begin(self, stream: ActivationStream) -> None:
        """Make the learners, or bring them back from the checkpoint."""
        for config in self.configs:
            assert config.seed is not None
            self.learners.append(Learner(config, stream.d_in, self.shared.steps, config.seed, self.device, self.dtype))
        if self.restored is not None:
            self.step = self.saved_step = self.restored.step
            extra = self.restored.extra
            self.scale, self.seconds = extra["scale"], extra["seconds"]
            if extra["width"] != stream.d_in or extra["heldout"] != fingerprint(stream.heldout):
                raise UserError(
                    f"activations (width {stream.d_in}): not those that the run in {self.out} began with "
                    f"(width {extra['width']}); {HOW} with the same ones"
                )
            self.heldout = extra["heldout"]
            for learner in self.learners:
                learner.load_state(self.restored.states[str(learner.config.name)])
            self.say(f"resumed at step {self.step}")
        else:
            self.heldout = fingerprint(stream.heldout)
            if self.shared.normalize:
                self.scale = input_scale(stream.heldout)
        if self.out is not None and not (self.out / "run.json").exists():
            self._record(finished=False)

    def _record(self, finished: bool) -> None:
        """Write `run.json`: what the run is, and whether it has come to its end."""
        assert self.out is not None
        origin = {"source": self.source, "versions": versions(), "git_commit": git_commit()}
        write_file(self.out / "run.json", "run", {"config": self.describe(), **origin, "finished": finished})

    def open_log(self, log_to: Iterable[str]) -> None:
        self.sinks = open_sinks(self.out, log_to, self.step)
        self.first, self.before, self.begun = self.step, self.seconds, time.monotonic()

    def close_log(self) -> None:
        for sink in self.sinks:
            sink.close()

    def advance(self, stream: ActivationStream) -> None:
        """One step of all SAEs; none if its batch was given up for Ctrl-C, which the caller hears of too."""
        logging = self.step % self.shared.log_every == 0 or self.step == self.shared.steps - 1
        try:
            x = self._scaled(stream.batch(self.step))
            all_stats = [learner.step(x, self.step, measure=logging) for learner in self.learners]
        except HarvestStopped:
            return
        except torch.cuda.OutOfMemoryError:
            raise self._out_of_memory() from None
        if logging:
            speed = (self.step + 1 - self.first) * len(x) / (time.monotonic() - self.begun)
            lines = [self._line(p, s, speed) for p, s in zip(self.learners, all_stats, strict=True) if s]
            for sink in self.sinks:
                for line in lines:
                    sink.write(line)
            self.fve = (min(line["fve"] for line in lines), max(line["fve"] for line in lines))
        self.step += 1
        self.seconds = self.before + time.monotonic() - self.begun

    def checkpoint_if_due(self) -> None:
        """Every so many steps, and after the last."""
        due = self.step % self.shared.checkpoint_every == 0 or self.step == self.shared.steps
        if due and self.saved_step != self.step:
            self.save_checkpoint()

    def _line(self, learner: Learner, stats: Stats, speed: float) -> dict[str, Any]:
        numbers = {name: float(value) for name, value in stats._asdict().items()}
        if not math.isfinite(numbers["loss"]):
            raise self._diverged(learner, f"the loss became {numbers['loss']}")
        return {"step": self.step, "sae": learner.config.name, **numbers, "tokens_per_second": speed}

    def _diverged(self, learner: Learner, what: str) -> UserError:
        kept = f"; the last good checkpoint is of step {self.saved_step}" if self.saved_step >= 0 else ""
        lr = learner.config.optimizer.lr
        return UserError(f"{learner.config.name}: {what} by step {self.step}: try a lower lr than {lr:g}{kept}")

    @torch.inference_mode(False)
    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device, self.dtype) / self.scale

    def _out_of_memory(self) -> UserError:
        kept = f"; the checkpoint of step {self.saved_step} is kept: {HOW}" if self.saved_step >= 0 else ""
        return UserError(
            f"batch_size = {self.shared.batch_size}, {len(self.learners)} SAEs: out of memory on {self.device} at step "
            f"{self.step}: lower contexts_at_once of a harvest, or in a new run batch_size, latents, buffer_tokens or "
            f"the number of SAEs{kept}"
        )

    def _checkpoints(self) -> Path:
        assert self.out is not None
        return self.out / "checkpoints"

    def save_checkpoint(self) -> None:
        """Keep the run as it is now, if it has a folder; weights that are not finite end the run instead."""
        for learner in self.learners:
            if not all(bool(torch.isfinite(weight).all()) for weight in learner.weights):
                raise self._diverged(learner, "the weights are no longer finite")
        if self.out is None:
            return
        states = {str(learner.config.name): learner.state() for learner in self.learners}
        width = len(self.learners[0].weights.b_dec)
        extra = {"scale": self.scale, "seconds": self.seconds, "width": width, "heldout": self.heldout}
        checkpoint.save(self._checkpoints(), checkpoint.Checkpoint(self.step, self.describe(), states, extra))
        self.saved_step = self.step

    @torch.inference_mode(False)
    def finish(self, stream: ActivationStream) -> list[SAE]:
        """Calibrate, fold the input's scale into the weights, save; the SAEs take raw activations."""
        x = stream.heldout.to(self.device, self.dtype)
        saes = []
        for learner in self.learners:
            sae = learner.sae().rescale_(self.scale)
            measured = None
            if len(x):
                sae.threshold.fill_(calibrated_threshold(sae, x, learner.config.k, self.shared.batch_size))
                measured = by_threshold(sae, x, batch_size=self.shared.batch_size)
            sae.cfg.metadata.update(stream.metadata)
            sae.cfg.metadata["training"] = self.describe()["train"] | {
                "scale": self.scale,
                "seconds": self.seconds / len(self.learners),
                "path": learner.path.name,
                "dead": float(learner.dead().float().mean()),
                "ever_pooled": float(learner.ever_pooled.float().mean()),
                "heldout_tokens_used": len(x),
                "heldout": measured and {"fvu": measured.fvu, "l0": measured.l0},
                "versions": versions(),
                "git_commit": git_commit(),
            }
            saes.append(sae)
        if self.out is not None:
            for sae, learner in zip(saes, self.learners, strict=True):
                sae.save(self._folder(learner.config))
            # Only now is the last checkpoint no longer needed.
            self._record(finished=True)
            checkpoint.remove_all(self._checkpoints())
        return saes

    def _folder(self, config: SAEConfig) -> Path:
        assert self.out is not None
        return self.out / "saes" / str(config.name)


def fingerprint(x: torch.Tensor) -> str:
    """A short digest of the first tokens of x [n, d], to tell activations apart."""
    return hashlib.sha256(x[:256].float().cpu().numpy().tobytes()).hexdigest()[:16]


def input_scale(x: torch.Tensor) -> float:
    """c = the root mean square norm of the tokens x [n, d]."""
    if not len(x):
        return 1.0
    c = float(x.double().square().sum(dim=1).mean().sqrt())
    if c == 0:
        raise UserError("activations are all zero: there is nothing to train on")
    return c
