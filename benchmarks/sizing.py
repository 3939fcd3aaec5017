"""Memory, time and disk of usual trainings on an H200, as Markdown for docs/sizing.md: `python benchmarks/sizing.py`.

The numbers are those of `sampled-sae train --dry-run` on that GPU: the same function with the same measured rates.
"""

from __future__ import annotations

from typing import NamedTuple

from sampled_sae.method.presets import batchtopk
from sampled_sae.training.estimate import Needed, Reading, needed
from sampled_sae.training.run import TrainConfig
from sampled_sae.utils.cost import Shape

RATE = 713e12
"""FLOP/s of the encoder's product on an H200, measured: docs/speed.md."""
TOKENS, BATCH, CONTEXT = 100_000_000, 4096, 1024
GPUS = (24, 40, 80, 141)
"""GB of usual GPUs."""
BUFFER = 2**17
"""Tokens of the smallest buffer of activations."""


class Model(NamedTuple):
    name: str
    layer: int
    shape: Shape
    d_sae: tuple[int, ...]


MODELS = (
    Model("SmolLM2-135M", 12, Shape(576, 30, 3_538_944, 49_152), (16_384, 65_536)),
    Model("Pythia-160M", 6, Shape(768, 12, 7_077_888, 50_304), (16_384, 65_536)),
    Model("Gemma-2-2B", 12, Shape(2304, 26, 77_856_768, 256_000), (16_384, 65_536, 131_072)),
    Model("Llama-3.1-8B", 16, Shape(4096, 32, 218_103_808, 128_256), (32_768, 131_072)),
)
"""Sizes as in the models' configurations."""


def of(model: Model, d_sae: int) -> Needed:
    """What one BatchTopK SAE takes."""
    shared = TrainConfig(TOKENS // BATCH, batch_size=BATCH)
    reading = Reading(model.shape, (model.layer,), CONTEXT, 2)
    return needed([batchtopk(d_sae, 64)], shared, model.shape.width, "cuda", RATE, True, reading=reading)


def row(model: Model, d_sae: int) -> str:
    """A row of the table."""
    need = of(model, d_sae)
    usable = need.memory + 2 * BUFFER * model.shape.width
    smallest = next((f"{size} GB" for size in GPUS if usable <= 0.9 * size * 1e9), "several GPUs")
    minutes = [f"{max(1, round(seconds / 60))} min" for seconds in (need.training, need.reading)]
    memory = f"{need.memory / 2**30:.1f} GiB"
    disk = [f"{size / 2**30:.1f} GiB" for size in (need.disk, need.checkpoints)]
    return f"| {model.name}, {model.layer} | {d_sae:,} | {memory} | {smallest} | {' | '.join([*minutes, *disk])} |"


HEADER = """| model, layer | d_sae | GPU memory | smallest GPU | SAE steps | language model | saved SAE | checkpoints |
|---|---|---|---|---|---|---|---|"""


def table() -> str:
    """The table of docs/sizing.md."""
    return "\n".join([HEADER, *(row(model, d_sae) for model in MODELS for d_sae in model.d_sae)])


if __name__ == "__main__":
    print(table())
