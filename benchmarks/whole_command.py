"""Time from a model's name to an evaluated SAE, by part.

python benchmarks/whole_command.py --model MODEL --text TEXT --heldout TEXT --out FOLDER

Does the same as `sampled-sae train` and `sampled-sae eval` for one SAE of the default method, and times each part.
Harvest, steps and checkpoints overlap, so harvest and steps are also timed alone, on part of the tokens, and so are the
writing of checkpoints and their checksums. "at_step" has the seconds from the beginning of the training to the end of
some steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

CLOCK: dict[str, float] = {}


@contextmanager
def clock(name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    CLOCK[name] = CLOCK.get(name, 0) + time.perf_counter() - begin


def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, whose time is added up under a name."""

    def call(*arguments: Any, **named: Any) -> Any:
        with clock(name):
            return function(*arguments, **named)

    return call


with clock("import"):
    import torch

    import sampled_sae as ss
    from sampled_sae.data.contexts import TextConfig, contexts
    from sampled_sae.data.model_source import model_activations
    from sampled_sae.data.text import TextSource
    from sampled_sae.evals.core.evaluate import evaluate_core_many
    from sampled_sae.evals.core.schema import CoreConfig
    from sampled_sae.method.presets import DEFAULT_METHODS, parse_methods
    from sampled_sae.models.load import load_model
    from sampled_sae.training import checkpoint, run, units


class Times(run.Callback):
    """When some steps have ended."""

    def __init__(self) -> None:
        self.begin, self.at_step = time.perf_counter(), dict[int, float]()

    def on_batch(self, run: run.Run, step: int, x: torch.Tensor) -> None:
        if step == 0:
            CLOCK["of that, until the first batch"] = time.perf_counter() - self.begin

    def on_step(self, run: run.Run, learner: Any, step: int, stats: Any) -> None:
        if stats is not None and step % 250 in (0, 50):  # measured: the host has waited for it
            self.at_step[step] = round(time.perf_counter() - self.begin, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default="stdlib")
    parser.add_argument("--heldout", default="stdlib")
    parser.add_argument("--compile", choices=("auto", "True", "False"), default="auto", help="the model's blocks")
    parser.add_argument("--buffer", type=int, help="tokens of the buffer; by default as many as memory allows")
    parser.add_argument("--out", type=Path, required=True)
    sizes = {"layer": 12, "context": 512, "m": 65_536, "k": 60, "batch": 4096, "tokens": 25_000_000, "contexts": 64}
    for name, default in (sizes | {"checkpoint": None, "alone": 2, "heldout-tokens": 65_536}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    steps, compiled = a.tokens // a.batch, {"auto": "auto", "True": True, "False": False}[a.compile]
    checkpoint.save = timed(checkpoint.save, "checkpoints, beside the steps on a GPU")
    checkpoint.checksum = timed(checkpoint.checksum, "their checksums")
    for name in ("calibrated_threshold", "by_threshold"):
        setattr(units, name, timed(getattr(units, name), f"of that, {name}"))
    ss.SAE.save = timed(ss.SAE.save, "of that, save")  # type: ignore[method-assign]
    begin = time.perf_counter()
    with clock("load the model"):
        model = load_model(a.model, device, dtype)
    text = TextConfig(a.context, bos=model.bos)
    with clock("tokenize and hold out"):
        settings = {"context": a.context, "buffer_tokens": a.buffer, "compile": compiled}
        source = model_activations(model, a.text, a.layer, **settings)
        [stream] = source.open(a.batch, a.heldout_tokens, 0, steps).values()
    (config,) = parse_methods(DEFAULT_METHODS, d_sae=a.m, k=a.k)
    common = {"batch_size": a.batch, "device": device, "checkpoint_every": a.checkpoint}
    with clock("harvest, train, calibrate, save"):
        times = Times()
        sae = ss.train(stream, config, steps=steps, out=a.out / "run", progress=False, callbacks=[times], **common)
        stream.close()
    with clock("measure"):
        tokens = torch.stack(
            list(islice(contexts(TextSource(a.heldout).documents(), model.tokenizer, text), a.contexts))
        )
        how = CoreConfig(put_in="normal", contexts_at_once=16)
        [result] = evaluate_core_many([sae], model, a.layer, tokens, how)
    CLOCK["all"] = time.perf_counter() - begin + CLOCK["import"]
    log = [json.loads(line) for line in (a.out / "run" / "log.jsonl").read_text().splitlines()]
    found = {"settings": {k: str(v) for k, v in vars(a).items() if k != "out"}, "seconds": CLOCK}
    found |= {"fvu": result.normal.fvu.value, "device": torch.cuda.get_device_name() if cuda else "cpu"}
    found |= {"buffer_tokens": stream.harvest.config.buffer_tokens, "compiled": stream.harvest.config.compile}
    found |= {"at_step": times.at_step, "dead": {line["step"]: line["dead"] for line in log[1::20]}}
    found |= {
        "tokens_per_second": log[-1]["tokens_per_second"],
        "training_seconds": sae.cfg.metadata["training"]["seconds"],
    }
    print(json.dumps(found), flush=True)
    if a.alone:
        [fresh] = source.open(a.batch, a.heldout_tokens, 0, steps).values()
        size = fresh.harvest.rounds.batches
        fresh.batch(0)
        with clock(f"harvest alone, {a.alone * size} batches"):
            for number in range(a.alone):
                x = fresh.batch((number + 1) * size).float()
            if cuda:
                torch.cuda.synchronize()
        rows = torch.cat([fresh.batch(a.alone * size + i) for i in range(size)])
        fresh.close()
        with clock(f"steps alone, {a.alone * size}"):
            ss.train(rows, config, steps=a.alone * size, progress=False, heldout=x[:512], **common)
        print(json.dumps(found), flush=True)
    (a.out / "whole_command.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
