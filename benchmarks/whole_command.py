"""Time from a model's name to an evaluated SAE, by part.

python benchmarks/whole_command.py --model MODEL --text TEXT --heldout TEXT --out FOLDER

Does the same as `sampled-sae train` and `sampled-sae eval` for one BatchTopK SAE, and times each part. Harvest and
steps overlap, so each is also timed alone, on part of the tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

CLOCK: dict[str, float] = {}


@contextmanager
def clock(name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    CLOCK[name] = time.perf_counter() - begin
    print(f"{name}: {CLOCK[name]:.2f} s", flush=True)


with clock("import"):
    import torch

    import sampled_sae as ss
    from sampled_sae.data.contexts import TextConfig, contexts
    from sampled_sae.data.harvest import model_activations
    from sampled_sae.data.text import TextSource
    from sampled_sae.evals.core.evaluate import evaluate_core_many
    from sampled_sae.evals.core.schema import CoreConfig
    from sampled_sae.models.load import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default="stdlib")
    parser.add_argument("--heldout", default="stdlib")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    sizes = {"layer": 12, "context": 512, "m": 65_536, "k": 60, "batch": 4096, "tokens": 25_000_000, "contexts": 64}
    for name, default in (sizes | {"buffer": 2**19, "checkpoint": 1000}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    begin = time.perf_counter()
    with clock("load the model"):
        model = load_model(a.model, device, dtype)
        if a.compile:
            model.compile()
    text = TextConfig(a.context, bos=model.bos)
    with clock("tokenize and hold out"):
        source = model_activations(model, a.text, a.layer, context=a.context, buffer_tokens=a.buffer)
        [stream] = source.open(a.batch, 65_536, 0).values()
    config = ss.batchtopk(a.m, a.k)
    common = {"batch_size": a.batch, "device": device, "checkpoint_every": a.checkpoint}
    with clock("harvest, train, calibrate, save"):
        sae = ss.train(stream, config, steps=a.tokens // a.batch, out=a.out / "run", **common)
    with clock("measure"):
        tokens = torch.stack(
            list(islice(contexts(TextSource(a.heldout).documents(), model.tokenizer, text), a.contexts))
        )
        how = CoreConfig(put_in="normal", contexts_at_once=16)
        [result] = evaluate_core_many([sae], model, a.layer, tokens, how)
    CLOCK["all"] = time.perf_counter() - begin + CLOCK["import"]
    print(f"FVU {result.normal.fvu.value:.4f}, total {CLOCK['all']:.1f} s", flush=True)
    [fresh] = source.open(a.batch, 65_536, 0).values()
    blocks, size = 6, fresh.harvest.rounds.batches
    with clock(f"harvest alone, {blocks * size} batches"):
        for block in range(blocks):
            x = fresh.batch(block * size).float()
        if cuda:
            torch.cuda.synchronize()
    block = torch.cat([fresh.batch((blocks - 1) * size + i) for i in range(size)])
    with clock(f"steps alone, {blocks * size}"):
        ss.train(block, config, steps=blocks * size, progress=False, heldout=x[:512], **common)
    found = {"settings": {k: str(v) for k, v in vars(a).items() if k != "out"}, "seconds": CLOCK}
    found |= {"fvu": result.normal.fvu.value, "device": torch.cuda.get_device_name() if cuda else "cpu"}
    (a.out / "whole_command.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
