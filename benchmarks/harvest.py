"""Activations of a language model: tokens per second of a plain loop, the harvest, and the compiled harvest.

python benchmarks/harvest.py --model MODEL --text TEXT --layer 12 --context 512 --out harvest.json

The plain loop is a baseline: the whole model under no_grad, 64 contexts at a time, keeping the hidden states of one
layer. The harvest includes tokenizing, leaving out high-norm tokens and shuffling.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sampled_sae.data.buffer import contexts_at_once
from sampled_sae.data.contexts import TextConfig, contexts
from sampled_sae.data.model_source import HarvestStream, model_activations
from sampled_sae.data.text import TextSource
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.models.load import load_model


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rate(tokens: int, work: Callable[[], Any]) -> float:
    """Tokens per second of one piece of work."""
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    return tokens / (time.perf_counter() - begin)


def loop(model: LanguageModel, tokens: torch.Tensor, layer: int, whole: bool) -> None:
    """64 contexts at a time, to the end of the model or to the layer."""
    for part in tokens.split(64):
        if whole:
            with torch.no_grad():
                model.model(input_ids=part.to(model.device), output_hidden_states=True, logits_to_keep=1)
        else:
            model.activations(part, [layer])


def harvest(stream: HarvestStream, first: int, blocks: int) -> float:
    """Tokens per second of some blocks; the first one is started before the measurement."""
    size = stream.harvest.rounds.batches
    stream.batch(first * size)
    return rate(
        blocks * size * stream.batch_size, lambda: [stream.batch((first + 1 + i) * size) for i in range(blocks)]
    )


def measure(model: LanguageModel, a: argparse.Namespace) -> dict[str, float]:
    source = contexts(TextSource(a.text).documents(), model.tokenizer, TextConfig(a.context, bos=model.bos))
    tokens = torch.stack([next(source) for _ in range(a.contexts)])
    activations = model_activations(model, a.text, a.layer, context=a.context, buffer_tokens=a.buffer)
    [stream] = activations.open(4096, a.context * 64, 0).values()
    if a.tokenize_first:
        stream.harvest.bank.has(10**9)
    figures = {}
    for name, whole in (("plain loop through the whole model", True), ("plain loop to the layer", False)):
        loop(model, tokens[:128], a.layer, whole)
        figures[name] = rate(tokens.numel(), lambda w=whole: loop(model, tokens, a.layer, w))  # type: ignore[misc]
    figures["harvest"] = harvest(stream, 1, a.blocks)
    if a.compile:
        model.compile()
        begin = time.perf_counter()
        model.activations(tokens[: contexts_at_once(model, activations.config)], [a.layer])
        synchronize()
        figures["seconds to compile"] = time.perf_counter() - begin
        figures["harvest, compiled"] = harvest(stream, 4 + a.blocks, a.blocks)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default="stdlib")
    for name, default in (("layer", 12), ("context", 512), ("contexts", 2048), ("buffer", 2**19), ("blocks", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true", help="also with the model's blocks compiled")
    parser.add_argument("--tokenize-first", action="store_true", help="tokenize all of the text before the measurement")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    cuda = torch.cuda.is_available()
    model = load_model(a.model, "cuda" if cuda else "cpu", torch.bfloat16 if cuda else torch.float32)
    figures = measure(model, a)
    device = torch.cuda.get_device_name() if cuda else "cpu"
    found = {"settings": {k: str(v) for k, v in vars(a).items() if k != "out"}, "device": device, "figures": figures}
    print(json.dumps(found, indent=1))
    if a.out:
        a.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
