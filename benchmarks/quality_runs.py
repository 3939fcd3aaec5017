"""Bookkeeping of benchmarks/quality.py: its settings, the file of finished runs, and the search for learning rates."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FACTOR = 2.0  # ratio of neighboring rates
FARTHEST = 8  # factors from the first rate in each direction
DIVERGED = 1.5  # times the best FVU: such a neighbor failed, and the rate behind it may be better


@dataclass(frozen=True, slots=True)
class Setting:
    """One comparison: a layer of a model, the size of the SAEs, and the length of the training."""

    model: str = "smollm2"
    layer: int = 12
    d_sae: int = 65_536
    k: int = 60
    batch: int = 4096
    tokens: int = 25_000_000
    select_tokens: int = 5_000_000
    """Tokens of the runs that select a peer's learning rate."""
    context: int = 512
    buffer_tokens: int = 2**19
    """Tokens that are shuffled together."""
    high_norm_factor: float = 10.0
    """Tokens above this multiple of the median norm are left out everywhere."""
    calibration: int = 128
    """Contexts for the threshold."""
    select: int = 256
    """Contexts on which rates are selected."""
    report: int = 128
    """Contexts of the reported numbers."""
    loss: int = 128
    """Contexts of these for CE loss recovered."""
    words: int | None = None
    """Words of the absorption evaluation; None: all, 0: no absorption."""
    start_factor: float = 1.0
    """Factor of the first learning rates; short runs prefer higher ones."""


MAIN = Setting()
SMALL = replace(MAIN, d_sae=16_384, tokens=10_000_000, start_factor=2)
PRESETS = {
    "cpu": Setting(
        d_sae=2048, k=32, batch=256, tokens=49_152, select_tokens=16_384, context=128, buffer_tokens=2**14,
        calibration=32, select=64, report=64, loss=16, words=0, start_factor=4,
    ),
    "main": MAIN,
    "50M": replace(MAIN, tokens=50_000_000),
    "16k": SMALL,
    "16k-50M": replace(SMALL, tokens=50_000_000),
    "16k-k20": replace(SMALL, k=20),
    "16k-k120": replace(SMALL, k=120),
    "16k-layer6": replace(SMALL, layer=6),
    "gemma": replace(SMALL, model="gemma-3-270m", layer=9),
    "gemma-no-sinks": replace(SMALL, model="gemma-3-270m", layer=9, high_norm_factor=3.0),
}  # fmt: skip
"""Settings by name. Those of Gemma need `--model` with the path of the model."""

STARTS = {"saelens": 6e-4, "saelens-raw": 6e-4, "dictionary_learning": 2.4e-3, "dictionary_learning-raw": 6e-4,
          "sparsify": 2.5e-3, "sparsify-adam": 4e-4}  # fmt: skip
"""First learning rate of each peer's search."""


def key(setting: Setting, toolkit: str, lr: float | None, tokens: int, seed: int = 0) -> dict[str, Any]:
    """What identifies a run; settings that differ in their full length alone share the selection."""
    names = ("model", "layer", "d_sae", "k", "batch", "context", "buffer_tokens", "high_norm_factor")
    rate = None if lr is None else float(f"{lr:.6g}")
    settings = {name: value for name, value in asdict(setting).items() if name in names}
    return settings | {"toolkit": toolkit, "lr": rate, "tokens": tokens, "seed": seed}


class Results:
    """Finished runs and evaluations, one line of a JSONL file each."""

    def __init__(self, path: Path):
        self.path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]
            self.lines = [json.loads(line) for line in whole.splitlines()]
            for line in self.lines:  # files from before the factor was a setting
                if "buffer_tokens" in line["key"]:
                    line["key"].setdefault("high_norm_factor", 10.0)
            if whole != text:  # the last line of a killed process
                os.truncate(path, len(whole.encode()))

    def get(self, key: Mapping[str, Any], what: str = "run") -> dict[str, Any] | None:
        """The latest line of a run, if it is finished."""
        return next((line for line in reversed(self.lines) if line["what"] == what and line["key"] == key), None)

    def evaluation(self, key: Mapping[str, Any]) -> dict[str, Any]:
        """The evaluations of a run together; {} if there are none."""
        mine = [line for line in self.lines if line["what"] == "evaluation" and line["key"] == key]
        return {name: value for line in mine for name, value in line.items() if name not in ("what", "key")}

    def rates(self, setting: Setting, toolkit: str, tokens: int) -> dict[float, float]:
        """FVU on `select` by learning rate, of a peer's finished runs of that length with seed 0."""
        wanted = key(setting, toolkit, None, tokens)
        mine = [line for line in self.lines if line["what"] == "run" and {**line["key"], "lr": None} == wanted]
        return {line["key"]["lr"]: line["fvu"]["select"] for line in mine if line["key"]["lr"] is not None}

    def add(self, key: Mapping[str, Any], found: Mapping[str, Any], what: str = "run") -> dict[str, Any]:
        """Write a line, to the disk."""
        line = {"what": what, "key": dict(key), **found}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)
        return line


def next_rate(fvu: Mapping[float, float], start: float, sides: Sequence[int] = (1, -1)) -> float | None:
    """FVU of the finished runs by learning rate -> the next rate to try; None if both neighbors of the best are worse.

    Rates are `start` times powers of `FACTOR`, and `sides` says whether higher or lower ones are tried first; an FVU of
    NaN counts as infinite. Behind a neighbor that diverged one more rate is tried: some toolkits fail at single rates
    between good ones.
    """
    done = {round(math.log(rate / start, FACTOR)): math.inf if math.isnan(v) else v for rate, v in fvu.items()}
    if not done:
        return start
    best = min(done, key=lambda n: (done[n], n))
    for side in sides:
        n = best + side
        if n in done and done[n] > DIVERGED * done[best]:
            n += side
        if n not in done and abs(n) <= FARTHEST:
            return start * FACTOR**n
    return None


def best_rate(fvu: Mapping[float, float]) -> float:
    """The rate of the lowest FVU."""
    return min(fvu, key=lambda rate: (math.inf if math.isnan(fvu[rate]) else fvu[rate], rate))
