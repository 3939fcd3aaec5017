"""Steer a language model with a latent of an SAE.

    python examples/steering.py --out runs/example

Trains an SAE of SmolLM2's layer 12 on Python's standard library, or loads the one that examples/train_and_evaluate.py
left in the folder, finds the latent that fires on the given words and not on others, and prints how the model continues
a prompt without and with it. Needs no network; takes a few minutes on two cores without a trained SAE.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import sampled_sae as ss
from sampled_sae.models.language_model import LanguageModel


def find_latent(sae: ss.SAE, model: LanguageModel, words: str, others: str) -> int:
    """The latent whose mean code on the words exceeds that on the others most."""
    means = []
    for text in (words, others):
        tokens = torch.tensor([model.tokenizer(text)["input_ids"]])
        # The first token has a norm far above the others, on which many latents fire.
        means.append(sae.encode(model.activations(tokens, [12])[12][0, 1:]).mean(0))
    return int((means[0] - means[1]).argmax())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/example"))
    parser.add_argument("--words", default="raise ValueError, raise TypeError, raise KeyError, an exception, an error")
    parser.add_argument("--others", default="The weather is nice today and we went for a walk along the river.")
    parser.add_argument("--prompt", default="When I woke up this morning, I")
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.0, 10.0, 20.0, 30.0])
    a = parser.parse_args()

    model = ss.load_model("smollm2")
    folder = a.out / "saes" / "topk-then-batch-at5-s0"
    if folder.exists():
        sae = ss.SAE.load(folder)
    else:
        acts = ss.activations(model, "stdlib", layer=12, context=128, buffer_tokens=32_768)
        size = {"tokens": 60_000, "batch_size": 1024, "heldout_tokens": 8192}
        sae = ss.train(acts, ss.topk_then_batchtopk(d_sae=2048, k=32), out=a.out, resume=True, **size)

    latent = find_latent(sae, model, a.words, a.others)
    print(f"latent {latent}")
    for strength in a.strengths:
        with sae.attached(model, steer={latent: strength}):
            print(f"{strength:+.0f}: {a.prompt}{model.generate(a.prompt, max_new_tokens=30)!r}")


if __name__ == "__main__":
    main()
