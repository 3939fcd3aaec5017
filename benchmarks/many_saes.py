"""Storage, network and GPU hours of 1,000 SAEs of 1M latents on a 70B model, from measured rates.

`python benchmarks/many_saes.py` rewrites the tables of docs/many-saes.md. It is a calculation: nothing of this size was
run. Rates are those of one H200 in docs/speed and docs/language-models.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))  # also when it is imported as benchmarks.many_saes

import scaling
from scaling import figures, table

PAGE = scaling.DOCS / "many-saes.md"
SAES, D_SAE, K, TOKENS = 1000, 2**20, 64, 1_000_000_000
BLOCKS, D_IN, MODEL_WEIGHTS = 80, 8192, 70.6e9  # of Llama-3.1-70B
BATCHES = (4096, 16_384)
BATCH = BATCHES[-1]
GPUS, GPU_BYTES, FILLED = 8, 141e9, 0.9  # of a node; a GPU's memory, and how much of it is used
MODEL_SHARE = 0.18
"""Of the product's speed that a language model reaches, measured with SmolLM2-135M; larger models reach more."""
NODES = (8, 64, 334)


def product_speed() -> float:
    """FLOP/s of the encoder's product."""
    part = _kernel("encoder's product (cuBLAS)")
    return float(part["flop"] / part["ms"] * 1e3)


def _kernel(name: str) -> dict[str, float]:
    return next(part for part in figures("speed/parts")["kernels"] if part["name"] == name)


def _seconds(*names: str) -> float:
    return sum(_kernel(name)["ms"] for name in names) / 1e3


class Step(NamedTuple):
    """Seconds of one step of one SAE on one GPU, if it had the memory."""

    product: float
    adam: float
    selection: float
    sparse: float

    @property
    def total(self) -> float:
        return sum(self)


def step(batch: int, d_in: int = D_IN, d_sae: int = D_SAE, k: int = K) -> Step:
    """From the measured kernels of d_in = 768, d_sae = 65,536, B = 4,096, K = 60, each scaled by what it depends on."""
    z, kept, weights = (
        d_sae * batch / (65_536 * 4096),
        k * batch * d_in / (60 * 4096 * 768),
        d_sae * d_in / (65_536 * 768),
    )
    return Step(
        2 * batch * d_in * d_sae / product_speed(),
        _seconds("Adam, both matrices") * weights,
        _seconds("block maxima: one read of Z", "cut: counting, finding, writing") * z,
        _seconds("gradient rows of both matrices", "value gradients", "decoding", "sorting by latent") * kept,
    )


WEIGHTS = 2 * D_IN * D_SAE
STATE = 16 * WEIGHTS
"""Bytes in training: weights, moments and a 16-bit copy are 14 per weight. Measured without Z: 14.1 with 3M latents on
one GPU, 15.8 with 65,536."""
ACTIVATION = 2 * D_IN  # bytes of a token at one layer


def z_bytes(batch: int) -> float:
    """Bytes of Z: with divided latents, 2.1 to 3.9 per value beyond the 2 of one copy were measured at d_in = 768."""
    return 6.0 * batch * D_SAE


def model_seconds(blocks: float = BLOCKS) -> float:
    """GPU seconds of the language model per token, up to a block."""
    speed = figures("speed/growth")["operations_a_second"] * MODEL_SHARE
    return 2 * MODEL_WEIGHTS * blocks / BLOCKS / speed


class Cluster(NamedTuple):
    """A cluster of nodes that train, with more nodes that run the language model."""

    nodes: int

    @property
    def per_node(self) -> int:
        """SAEs that a node's memory holds, each with its latents over all GPUs of the node."""
        return int((GPUS * GPU_BYTES * FILLED - z_bytes(BATCH)) // STATE)

    @property
    def passes(self) -> int:
        return math.ceil(SAES / (self.per_node * self.nodes))

    @property
    def used(self) -> int:
        """SAEs of one pass, divided evenly."""
        return math.ceil(SAES / self.passes)

    @property
    def rate(self) -> float:
        """Tokens per second of each node."""
        return GPUS * BATCH / (self.per_node * step(BATCH).total)

    @property
    def hours(self) -> float:
        return self.passes * TOKENS / self.rate / 3600

    @property
    def model_nodes(self) -> float:
        """Nodes that run the language model; passes over the first layers stop early."""
        return self.rate * model_seconds(BLOCKS * (self.passes + 1) / (2 * self.passes)) / GPUS

    @property
    def received(self) -> float:
        """Bytes per second into a node whose SAEs are on one layer."""
        return self.rate * ACTIVATION

    @property
    def sent(self) -> float:
        """Bytes per second out of a node of the language model."""
        return self.received * math.ceil(self.used / self.per_node) / max(1.0, self.model_nodes)


def sae_table() -> str:
    rows = [
        ["weights, 2 d_in d_sae", f"{WEIGHTS / 1e9:.1f} billion"],
        ["memory in training, 16 bytes per weight", f"{STATE / 1e9:.0f} GB"],
        [f"activations Z of a batch of {BATCH:,}, with copies", f"{z_bytes(BATCH) / 1e9:.0f} GB"],
        ["saved in float32 / bfloat16", f"{4 * WEIGHTS / 1e9:.0f} / {2 * WEIGHTS / 1e9:.0f} GB"],
        ["checkpoint, weights and moments", f"{12 * WEIGHTS / 1e9:.0f} GB"],
    ]
    return table(["one SAE", ""], rows)


def step_table() -> str:
    rows = []
    for batch in BATCHES:
        one = step(batch)
        hours = TOKENS / batch * one.total / 3600
        parts = [f"{part * 1e3:.0f}" for part in (*one, one.total)]
        rows.append([f"{batch:,}", *parts, f"{one.total / batch * 1e6:.0f}", f"{hours:.1f}", f"{SAES * hours:,.0f}"])
    names = ["product, ms", "Adam", "selection", "sparse products", "step", "us per token"]
    return table(["batch", *names, "GPU hours per SAE", "GPU hours of all"], rows)


def source_table() -> str:
    all_layers, hour = ACTIVATION * BLOCKS * TOKENS, model_seconds() * TOKENS / 3600
    per_layer, passes = all_layers / BLOCKS / 1e12, Cluster(64).passes
    rows = [
        ["each SAE runs the model", f"{SAES * hour / 2:,.0f}", "none", "none"],
        [
            "a cache per layer, one per pass",
            f"{BLOCKS * hour / 2:,.0f}",
            f"{per_layer:.1f} TB per layer",
            "file system",
        ],
        ["a cache of all layers", f"{hour:,.0f}", f"{all_layers / 1e15:.2f} PB", "file system"],
        [f"a stream, {passes} passes (64 nodes)", f"{hour * (passes + 1) / 2:,.0f}", "none", "between nodes"],
    ]
    return table(["activations from", "GPU hours of the model", "disk", "moved over"], rows)


def cluster_table() -> str:
    rows = []
    for nodes in NODES:
        one = Cluster(nodes)
        network = [f"{one.received / 1e9:.1f}", f"{one.sent / 1e9:.1f}"]
        total = one.hours * GPUS * (nodes + one.model_nodes)
        time = f"{one.hours / 24:.1f}"
        held = f"{one.per_node * nodes:,}"
        rows.append(
            [
                nodes,
                held,
                one.passes,
                f"{one.rate / 1e3:.0f}",
                time,
                f"{one.model_nodes:.0f}",
                *network,
                f"{total:,.0f}",
            ]
        )
    head = ["nodes that train", "SAEs at once", "passes", "1,000 tokens/s", "days", "nodes for the model"]
    return table([*head, "GB/s into a node", "GB/s out of a model node", "GPU hours"], rows)


def check_table() -> str:
    points = [p for p in figures("speed/growth")["points"] if p["kind"] == "BatchTopK" and p["axis"] in ("m", "d", "B")]
    rows = []
    for p in points:
        if p["m"] == 2**20 or p["d"] == 4096 or p["B"] == 16_384:
            formula = step(p["B"], p["d"], p["m"], p["K"]).total * 1e3
            rows.append([f"{p['m']:,}", f"{p['d']:,}", f"{p['B']:,}", f"{p['ms']:.1f}", f"{formula:.1f}"])
    return table(["d_sae", "d_in", "batch", "measured, ms", "formula, ms"], rows)


TABLES = {"one": sae_table, "step": step_table, "check": check_table, "source": source_table, "cluster": cluster_table}


def filled(page: str) -> str:
    """The page with its tables made anew."""
    return scaling.filled(page, TABLES)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
