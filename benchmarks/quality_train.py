"""One training run of a peer for benchmarks/quality.py, in this process or, as a program, in the peer's environment.

    python benchmarks/quality_train.py JOB.json        writes the trained SAE where the job says, prints the seconds

Needs torch, numpy, safetensors and the peer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import peers
from peers import Peer, Recipe

DECAY = 0.2  # share of the steps in which the rate falls to 0
WARMUP = 1000  # steps, at most a fifth of a run
SCALE_BATCHES = 20  # batches that give the scale of the inputs


class Toolkit(NamedTuple):
    """A peer with its settings."""

    name: str
    package: str
    make: Callable[..., Peer]
    scaled: bool  # whether inputs are scaled as the peer does it
    topk: bool  # whether each token has its own top K at inference


def toolkits(cuda: bool) -> dict[str, Toolkit]:
    """The compared trainers. On a GPU all of them use bfloat16 autocast, which all of them offer."""
    dtype = torch.bfloat16 if cuda else torch.float32
    lens, learning = partial(peers.saelens, autocast=cuda), partial(peers.dictionary_learning, dtype=dtype)
    return {
        "saelens": Toolkit("SAELens", "saelens", lens, True, False),
        "saelens-raw": Toolkit("SAELens, raw inputs", "saelens", lens, False, False),
        "dictionary_learning": Toolkit("dictionary_learning", "dictionary_learning", learning, True, False),
        "dictionary_learning-raw": Toolkit(
            "dictionary_learning, raw inputs", "dictionary_learning", learning, False, False
        ),
        "sparsify": Toolkit("sparsify", "sparsify", partial(peers.sparsify, optimizer="signum"), False, True),
        "sparsify-adam": Toolkit("sparsify, Adam", "sparsify", partial(peers.sparsify, fused=cuda), False, True),
    }


def train(toolkit: Toolkit, x: Tensor, job: dict[str, Any], device: str) -> tuple[dict[str, Tensor], float]:
    """Train on the rows of x [n, d_in] in their order -> the SAE's tensors and the seconds of the steps."""
    batch, steps = job["batch"], job["tokens"] // job["batch"]

    def rows(i: int) -> Tensor:
        return x[i * batch : (i + 1) * batch].to(device).float()

    def made(steps: int) -> Peer:
        first = [rows(i) for i in range(min(SCALE_BATCHES, steps))] if toolkit.scaled else ()
        recipe = Recipe(steps, job["lr"], min(WARMUP, steps // 5), round(DECAY * steps), first, job["seed"])
        return toolkit.make(x.shape[1], job["d_sae"], job["k"], batch, device, recipe)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    if device == "cuda":  # compile kernels and fill the allocator's cache
        peer = made(10)
        for i in range(3):
            peer.step(rows(i), i)
        del peer
    peer = made(steps)
    wait()
    begin = time.perf_counter()
    for i in range(steps):
        peer.step(rows(i), i)
    wait()
    return peer.finish(), time.perf_counter() - begin


def main() -> None:
    from safetensors.torch import save_file

    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    cuda = job["device"] == "cuda"
    dtype = getattr(torch, job["dtype"])
    x = torch.from_file(job["activations"], shared=False, size=job["rows"] * job["d_in"], dtype=dtype)
    x = x.view(job["rows"], job["d_in"])
    found, seconds = train(toolkits(cuda)[job["toolkit"]], x.cuda() if cuda else x, job, job["device"])
    save_file({name: tensor.cpu().contiguous() for name, tensor in found.items()}, job["out"])
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
