"""Callbacks of the trainer: logs (JSON lines, TensorBoard, Weights & Biases), the progress bar and checkpoints."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sampled_sae.config import versioned
from sampled_sae.sae import SAE
from sampled_sae.training.learner import Learner, Stats
from sampled_sae.training.run import Callback, Run
from sampled_sae.training.settings import CHECKPOINT_SECONDS, CHECKPOINT_STEPS
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import parse_json, write_text, writing
from sampled_sae.utils.progress import Progress, show
from sampled_sae.utils.third_party import package, require_package


class Log(Callback):
    """Base of the logs: one line of numbers per SAE at each step that is logged."""

    def on_steps(self, run: Run, step: int, stats: Mapping[str, Stats] | None) -> None:
        for name, numbers in (stats or {}).items():
            self.write({"step": step, "sae": name, **numbers._asdict(), "tokens_per_second": run.tokens_per_second()})

    def write(self, line: dict[str, Any]) -> None:
        """Write one line."""


class JsonLines(Log):
    """`log.jsonl`; its first line has the format version."""

    def __init__(self, path: Path, from_step: int):
        """On resume, lines from `from_step` on are removed: their steps are repeated."""
        kept = [line for line in read_log(path) if line["step"] < from_step] if path.exists() else []
        write_text(path, "".join(f"{json.dumps(line)}\n" for line in kept))
        self.path, self.header = path, {} if kept else versioned("log", {})

    def write(self, line: dict[str, Any]) -> None:
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        # Closed after each line: nothing is left in a buffer that a full disk could refuse later.
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**self.header, **finite}) + "\n")
        self.header = {}


class TensorBoard(Log):
    """Event files in `out/tensorboard`, one run per SAE."""

    def __init__(self, out: Path):
        require_package("tensorboard", "tensorboard", "log_to = 'tensorboard'")
        from torch.utils.tensorboard import SummaryWriter

        self.make, self.folder = SummaryWriter, out / "tensorboard"
        self.writers: dict[str, Any] = {}

    def write(self, line: dict[str, Any]) -> None:
        name = line["sae"]
        with writing(self.folder):
            if name not in self.writers:
                self.writers[name] = self.make(str(self.folder / name))
            for key, value in line.items():
                if isinstance(value, (int, float)) and key != "step":
                    self.writers[name].add_scalar(key, value, line["step"])

    def on_end(self, run: Run, saes: list[SAE] | None) -> None:
        with writing(self.folder):
            for writer in self.writers.values():
                writer.close()


class Wandb(Log):
    """One wandb run; each SAE's numbers under its name."""

    def __init__(self, out: Path):
        wandb = package("wandb", "log_to = 'wandb'", "wandb")
        try:
            self.run = wandb.init(project="sampled-sae", name=out.name, dir=str(out))
        except wandb.Error as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"log_to = 'wandb': cannot start ({reason}); run wandb login, or WANDB_MODE=offline"
            ) from None

    def write(self, line: dict[str, Any]) -> None:
        numbers = {f"{line['sae']}/{key}": v for key, v in line.items() if isinstance(v, (int, float))}
        self.run.log(numbers, step=line["step"])

    def on_end(self, run: Run, saes: list[SAE] | None) -> None:
        self.run.finish()


def check_wandb() -> None:
    """Raise an error if wandb is not installed, or plainly has no key to log in with."""
    require_package("wandb", "wandb", "log_to = 'wandb'")
    logins = [Path(os.environ.get("NETRC", "~/.netrc")), Path("~/_netrc"), Path("~/.config/wandb/settings")]
    known = {"WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"} & os.environ.keys()
    if not known and not sys.stdin.isatty() and not any(path.expanduser().exists() for path in logins):
        raise UserError("log_to = 'wandb': there is no API key; run wandb login, or set WANDB_MODE=offline")


LOGS: dict[str, Callable[[Path], Log]] = {"tensorboard": TensorBoard, "wandb": Wandb}
"""Values of `log_to`."""


class Checkpoints(Callback):
    """A checkpoint every `checkpoint_every` steps and after the last; if that is unset, none soon after another."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def on_steps(self, run: Run, step: int, stats: Mapping[str, Stats] | None) -> None:
        every = run.shared.checkpoint_every
        if (step + 1) % (every or CHECKPOINT_STEPS) and step + 1 != run.shared.steps:
            return
        late = every is not None or time.monotonic() - self.last >= CHECKPOINT_SECONDS
        if run.ranks.all.any(late):
            run.save_checkpoint(step + 1)
            self.last = time.monotonic()
        else:
            run.check_weights(step + 1)


class ProgressBar(Callback):
    """The step that all runs have reached, and the range of FVU over all SAEs, each on its last measured batch."""

    SECONDS = 5.0  # between two measurements, if the log's are further apart

    def __init__(self, often: bool = True) -> None:
        """`often`: between the steps that are logged, too; with latents over ranks, all ranks must measure a step."""
        self.bar: Progress | None = None
        self.fvu: dict[tuple[int, str], float] = {}
        self.measured, self.often = time.monotonic(), often

    def needs_stats(self, step: int) -> bool:
        due = self.bar is not None and self.bar.due(step + 1)
        return self.often and (due or time.monotonic() - self.measured > self.SECONDS)

    def on_batch(self, run: Run, step: int, x: Tensor) -> None:
        self.bar = self.bar or show(run.shared.steps, step, each=(run.shared.batch_size, "tokens"))

    def on_step(self, run: Run, learner: Learner, step: int, stats: Stats | None) -> None:
        if stats is not None:
            self.fvu[id(run), str(learner.config.name)], self.measured = 1 - stats.fve, time.monotonic()

    def on_steps(self, run: Run, step: int, stats: Mapping[str, Stats] | None) -> None:
        self.fvu |= {(id(run), name): 1 - numbers.fve for name, numbers in (stats or {}).items()}
        if self.bar is not None:
            ends = [f"{end(self.fvu.values()):.3f}" for end in (min, max) if self.fvu]
            self.bar.update(step + 1, f"batch FVU {' to '.join(dict.fromkeys(ends))}" if ends else "")

    def on_end(self, run: Run, saes: list[SAE] | None) -> None:
        if self.bar is not None:
            self.bar.close()


def of_run(run: Run) -> list[Callback]:
    """The log, which the first of several ranks writes, and the checkpoints of a run that has just begun."""
    if run.out is None or not run.ranks.first:
        return [Checkpoints()]
    logs = [LOGS[name](run.out) for name in run.shared.log_to]
    return [JsonLines(run.out / "log.jsonl", run.step), *logs, Checkpoints()]


def read_log(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a log; a last line cut off by a kill is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = parse_json(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
