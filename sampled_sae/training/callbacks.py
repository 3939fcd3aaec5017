"""The log: one JSON object a line, and on request the same numbers to TensorBoard or Weights & Biases."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import write_text, writing


class Sink(Protocol):
    """Something that takes lines of the log."""

    def write(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """`log.jsonl`. On resume, lines after the checkpoint are dropped: their steps are about to be redone."""

    def __init__(self, path: Path, from_step: int):
        if path.exists():
            write_text(path, "".join(f"{json.dumps(line)}\n" for line in read_log(path) if line["step"] < from_step))
        with writing(path):
            self.path, self.file = path, path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        with writing(self.path):
            self.file.write(json.dumps(finite) + "\n")
            self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Event files in `out/tensorboard`, one run an SAE."""

    def __init__(self, out: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("log_to = 'tensorboard': not installed; pip install 'sampled-sae[tensorboard]'") from None
        self.make, self.out, self.writers = SummaryWriter, out / "tensorboard", {}  # type: ignore[var-annotated]

    def write(self, line: dict[str, Any]) -> None:
        name = line["sae"]
        if name not in self.writers:
            self.writers[name] = self.make(str(self.out / name))
        for key, value in line.items():
            if isinstance(value, (int, float)) and key != "step":
                self.writers[name].add_scalar(key, value, line["step"])

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


class Wandb:
    """One wandb run; each SAE's numbers under its name."""

    def __init__(self, out: Path):
        try:
            import wandb
        except ImportError:
            raise UserError("log_to = 'wandb': not installed; pip install 'sampled-sae[wandb]'") from None
        self.run = wandb.init(project="sampled-sae", name=out.name, dir=str(out))

    def write(self, line: dict[str, Any]) -> None:
        numbers = {f"{line['sae']}/{key}": v for key, v in line.items() if isinstance(v, (int, float))}
        self.run.log(numbers, step=line["step"])

    def close(self) -> None:
        self.run.finish()


SINKS: dict[str, Callable[[Path], Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def open_sinks(out: Path | None, log_to: Iterable[str], from_step: int) -> list[Sink]:
    """The JSON log in `out` if there is an `out`, and what `log_to` names."""
    names = list(log_to)
    for name in names:
        if name not in SINKS:
            raise UserError(f"log_to = {name!r}: must be one of {', '.join(SINKS)}")
    if out is None:
        if names:
            raise UserError(f"log_to = {names[0]!r}: needs a folder; set out")
        return []
    return [JsonLines(out / "log.jsonl", from_step), *(SINKS[name](out) for name in names)]


def read_log(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a log; a last line cut off by a kill is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines
