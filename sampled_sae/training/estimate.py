"""What a training takes, estimated before it begins: memory, time, disk and tokens."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from sampled_sae import kernels
from sampled_sae.method.config import SAEConfig, Scope
from sampled_sae.method.jumprelu import fine
from sampled_sae.method.scores import get_score
from sampled_sae.training.checkpoint import KEEP
from sampled_sae.training.settings import CHECKPOINT_STEPS, TrainConfig
from sampled_sae.utils.cost import SPEEDS, Shape, Workload, product_speed
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.progress import clock
from sampled_sae.utils.system import available, readable

LIBRARIES = 64 * 2**20
"""Measured size of torch's own buffers."""


def memory_needed(
    configs: Sequence[SAEConfig], d: int, batch_size: int, dtype: torch.dtype, fast: bool = False, shards: int = 1
) -> int:
    """Peak bytes of training these SAEs side by side, without the activations themselves.

    With `shards`, of a rank that has only one part of so many of their latents.
    """
    if not configs:
        return LIBRARIES
    plain: list[SAEConfig] = []
    quick: list[SAEConfig] = []
    for config in configs:
        (quick if fast and not kernels.lacking(config, shards) else plain).append(config)
    # Kept for every SAE: weights and Adam's two moments; on the fast path also a copy of both matrices in 16 bits.
    values = sum((3 * (2 * c.d_sae * d + c.d_sae) + 3 * c.d_sae) / shards + 3 * d for c in plain)
    kept = 1.1 * dtype.itemsize * values + 1.05 * sum(28 * c.d_sae * d + 32 * c.d_sae for c in quick) / shards
    kept += sum(4 * c.d_sae * batch_size for c in quick if c.jumprelu is not None)  # the last step's activations
    # Held for one SAE at a time: gradients with one working copy, activations, dead latents' copies.
    working = [1.1 * dtype.itemsize * _working(c, d, batch_size, shards) for c in plain]
    working += [1.05 * _fast_working(c, d, batch_size, shards) for c in quick]
    return int(kept + max(working)) + LIBRARIES


def _working(config: SAEConfig, d: int, batch_size: int, shards: int) -> int:
    m, scope = config.d_sae // shards, config.pool.scope
    activations = 1.6 * m * batch_size  # values, masks of one byte each, positions of candidates
    if config.jumprelu is not None:
        activations *= 2  # before and after the thresholds
    if config.pool.restricts:
        activations += batch_size * config.pool.size.latents(config.k, config.d_sae) // shards
        if get_score(config.pool.score).reads_activations:
            activations += batch_size * m  # a score's working copy
        smallest = min(batch_size, scope.tokens or batch_size, scope.then or batch_size)
        activations += 8 * m * (batch_size // smallest)  # scores, keys and masks of every group's pool
        if config.pool.score == "leverage":
            activations += 3 * batch_size * smallest
    auxk = (2 * m * d + 3 * m * batch_size) if config.auxk.alpha > 0 else 0
    kept = 6 * config.k * batch_size
    errors = (2 + 4 * len(config.prefixes or (m,))) * batch_size * d
    return int(3 * m * d + max(activations + kept, auxk) + errors)


def _fast_working(config: SAEConfig, d: int, batch_size: int, shards: int) -> int:
    """Bytes that the GPU's path holds for one SAE at a time."""
    m, pool, active = config.d_sae // shards, config.pool, float(config.k)
    z = 2 * m * batch_size
    if pool.restricts:
        z += 2 * batch_size * pool.size.latents(config.k, config.d_sae) // shards
        if pool.scope != Scope() or get_score(pool.score).reads_activations:
            z += 8 * m * batch_size  # what a score of the user's own takes: it sees all of Z in 32 bits
    if config.jumprelu is not None:
        z += 4 * m * batch_size  # which are above their thresholds, gradients of all
        if fine(config.jumprelu):
            z += 2 * m * batch_size  # values of 32 bits
        if config.jumprelu.variant == "dictionary_learning":
            active = m / 2  # the first steps keep half of them
    # Partial sums of long lists: a row for each 128 entries.
    lists = (60 + d / 16) * active * batch_size + batch_size * ((6 + 2 * len(config.prefixes or (m,))) * d + m // 8)
    gradients = 8 * m * d + lists
    # AuxK may find every latent dead, and works outside of the recorded part of a step.
    auxk = 4 * m * batch_size + 20 * m * d if config.auxk.alpha > 0 else 0
    return int(max(z + lists, gradients) + auxk)


def check_memory(
    configs: Sequence[SAEConfig],
    d: int,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    beside: int = 0,
    shards: int = 1,
) -> str:
    """One line on the memory needed, an error if it is not free. `beside` are the bytes of the activations."""
    need = memory_needed(configs, d, batch_size, dtype, kernels.usable(device, dtype), shards) + beside
    free = available(device)
    line = f"memory: about {readable(need)} on {device}" + (
        f", {readable(beside)} of them for activations" * bool(beside)
    )
    if free is None:
        return line
    if need > free:
        lower = ", or lower buffer_tokens and contexts_at_once of the harvest" if beside else ""
        raise UserError(
            f"{line} needed for {len(configs)} SAEs at batch_size = {batch_size}, but only {readable(free)} are "
            f"free: lower batch_size or d_sae, or train fewer SAEs at once{lower}"
        )
    return f"{line}, {readable(free)} free"


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
    need = streams * memory_needed(configs, d_in, size, torch.float32, fast)
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
