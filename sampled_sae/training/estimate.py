"""Time, memory, disk and tokens of a training, before any weights are loaded."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from sampled_sae import kernels
from sampled_sae.method.config import SAEConfig
from sampled_sae.training import memory
from sampled_sae.training.checkpoint import KEEP
from sampled_sae.training.settings import CHECKPOINT_STEPS, TrainConfig
from sampled_sae.utils.cost import SPEEDS, Shape, Workload, product_speed
from sampled_sae.utils.progress import clock
from sampled_sae.utils.system import available, readable

RATES = {"cpu": "two CPU cores", "cuda": "an H200"}
"""Where the rates of `SPEEDS` were measured."""


class Reading(NamedTuple):
    """Activations that a language model makes during training."""

    shape: Shape
    layers: tuple[int, ...]
    context: int
    itemsize: int  # bytes per weight of the model


class Needed(NamedTuple):
    """What a training takes."""

    training: float  # seconds of the SAEs' steps
    reading: float  # seconds of the language model
    memory: int  # bytes on the device, without the buffer of activations
    disk: int  # bytes of the saved SAEs
    checkpoints: int  # further bytes until the training ends


def needed(
    configs: Sequence[SAEConfig],
    shared: TrainConfig,
    d_in: int,
    kind: str,
    rate: float,
    fast: bool,
    *,
    streams: int = 1,
    reading: Reading | None = None,
) -> Needed:
    """Time and space of a training on a kind of device ("cpu", "cuda") whose matrix products run at `rate` FLOP/s."""
    size, steps, speed = shared.batch_size, shared.steps, SPEEDS.get(kind, SPEEDS["cpu"])
    shape = Shape(d_in, 0, 0, 0) if reading is None else reading.shape
    last = max(reading.layers, default=shape.blocks - 1) if reading else 0
    work = Workload(shape, last, reading.context if reading else 0, configs[0].d_sae, len(configs), speed, rate)
    trained = streams * steps * sum(work.step(config.d_sae, d_in, size) for config in configs)
    read = 0.0 if reading is None else work.read(steps * size + shared.heldout_tokens) + speed.load
    need = streams * memory.needed(configs, d_in, size, torch.float32, fast)
    if reading is not None:
        need += reading.itemsize * (shape.blocks * shape.block_weights + 2 * shape.width * shape.vocabulary)
    weights = streams * sum(4 * (2 * config.d_sae * d_in + config.d_sae + d_in) for config in configs)
    # Weights and Adam's two moments; the newest ones and the one that is being written.
    checkpoints = 3 * weights * min(KEEP + 1, -(-steps // (shared.checkpoint_every or CHECKPOINT_STEPS)))
    return Needed(trained, read, need, weights, checkpoints)


def estimate(
    configs: Sequence[SAEConfig],
    shared: TrainConfig,
    d_in: int,
    device: torch.device,
    out: Path,
    *,
    streams: int = 1,
    reading: Reading | None = None,
    tokens_there: int | None = None,
) -> list[str]:
    """Lines for the user. `streams` is the number of hook points, `tokens_there` that of tokens in a file or cache."""
    size, steps, rate = shared.batch_size, shared.steps, product_speed(device)
    fast = kernels.usable(device, torch.float32)
    need = needed(configs, shared, d_in, device.type, rate, fast, streams=streams, reading=reading)
    nearest = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    free, passes = available(device), "" if tokens_there is None else f"; {tokens_there:,} are there"
    parts = (
        ""
        if reading is None
        else f" ({clock(need.training)} for the SAEs, {clock(need.reading)} for the language model)"
    )
    kinds = f"{len(configs)}, d_in {d_in}" + (f", at {streams} hook points" if streams > 1 else "")
    return [
        f"tokens: {steps * size:,} in {steps:,} steps of {size:,}, up to {shared.heldout_tokens:,} held out{passes}",
        f"SAEs: {kinds}",
        f"time: about {clock(need.training + need.reading)}{parts}",
        f"memory: about {readable(need.memory)} on {device}" + ("" if free is None else f", {readable(free)} free"),
        f"disk: {readable(need.disk)} in {out}, and up to {readable(need.checkpoints)} for checkpoints until it ends, "
        f"{readable(shutil.disk_usage(nearest).free)} free",
        f"based on: a matrix product timed on this device ({rate / 1e12:.2g} TFLOP/s) and rates measured on "
        f"{RATES.get(device.type, RATES['cpu'])}; on others the time may be off by a factor of 2. Without downloads"
        + ("" if reading is None else " and the buffer of activations, which adapts to the free memory"),
    ]
