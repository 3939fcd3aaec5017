"""What MCC on SynthSAEBench depends on: BatchTopK with several recipes on the same samples of a small SynthSAEBench.

    python benchmarks/synthsaebench.py --recipe preset --recipe defaults --seed 0 --out recipes.json
    .peers/saelens/bin/python benchmarks/synthsaebench.py --recipe saelens --seed 0 --out recipes.json

The data follow the specification with 1,024 features in 128 dimensions and 8 trees; SAEs have 256 latents and K = 6,
about the L0 of the 256 most frequent features, and see 256 samples per step. `saelens` trains SAELens's own SAE with
its published settings, `saelens-own` also on SAELens's own generator. Every SAE is measured by the same function:
FVE with the cut over 1,024 samples, MCC as published (mean absolute cosine of the Hungarian matching, over all
latents), and the share of the latents that do not fire on 32,768 held-out samples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import peers
from sampled_sae import Callback, batchtopk, train
from sampled_sae.data.stream import Endless
from sampled_sae.data.synth_sae_bench import SynthSAEBench, SynthSAEBenchConfig
from sampled_sae.evals.similarity.matching import match
from sampled_sae.method.config import AuxKConfig, SAEConfig
from sampled_sae.method.presets import paper_recipe
from sampled_sae.method.rate import default_lr
from sampled_sae.training.run import Run
from sampled_sae.utils.files import write_json

DATA = SynthSAEBenchConfig(d=128, features=1024, roots=8)
LATENTS, K, BATCH, CUT = 256, 6, 256, 1024
MARKS = (1000, 2500, 5000, 10_000, 20_000)
CHUNK = 4096


class Samples(Endless):
    """Training samples in chunks, so that making them takes little of the time."""

    def __init__(self) -> None:
        self.made, self.number, self.chunk = SynthSAEBench(DATA), -1, torch.empty(0)

    def batch(self, index: int, size: int, split: Any = "train") -> Tensor:
        if split == "heldout":
            return self.heldout(size)
        number, part = divmod(index * size, CHUNK)
        if number != self.number:
            self.number, self.chunk = number, self.made.batch(number, CHUNK)
        return self.chunk[part : part + size]

    def heldout(self, size: int) -> Tensor:
        return torch.cat([self.made.batch(i, CHUNK, split="heldout") for i in range(1, 1 + -(-size // CHUNK))])[:size]


@torch.no_grad()
def measured(W_enc: Tensor, b_enc: Tensor, W_dec: Tensor, b_dec: Tensor, x: Tensor, true: Tensor) -> dict[str, float]:
    """FVE, MCC and the share of latents that do not fire; W_enc and W_dec [m, d], W_dec with unit rows, x [n, d]."""
    error, fired = 0.0, torch.zeros(len(W_dec), dtype=torch.bool)
    for part in x.split(CUT):
        z = torch.addmm(b_enc, part - b_dec, W_enc.T).relu_()
        z *= z >= z.flatten().topk(K * len(part)).values[-1]
        fired |= z.any(0)
        error += float((part - z @ W_dec - b_dec).square().sum())
    found = match(W_dec, true)
    mcc = float(found.similarity[found.latent >= 0].mean())
    return {
        "fve": 1 - error / float((x - x.mean(0)).square().sum()),
        "mcc": mcc,
        "dead": float((~fired).float().mean()),
    }


def saelens_samples(seed: int) -> tuple[Iterator[Tensor], Tensor]:
    """Batches of SAELens's own generator, and its true features."""
    from sae_lens import synthetic as theirs
    from sae_lens.synthetic.training import SyntheticActivationIterator

    config = theirs.SyntheticModelConfig(
        num_features=DATA.features,
        hidden_dim=DATA.d,
        firing_probability=theirs.ZipfianFiringProbabilityConfig(exponent=0.5, max_prob=0.4, min_prob=5e-4),
        hierarchy=theirs.HierarchyConfig(
            total_root_nodes=DATA.roots,
            branching_factor=4,
            max_depth=3,
            mutually_exclusive_portion=1.0,
            mutually_exclusive_min_depth=0,
            compensate_probabilities=True,
            scale_children_by_parent=True,
        ),
        orthogonalization=theirs.OrthogonalizationConfig(num_steps=100, lr=3e-4),
        correlation=theirs.LowRankCorrelationConfig(rank=25, correlation_scale=0.1),
        mean_firing_magnitudes=theirs.LinearMagnitudeConfig(start=5.0, end=4.0),
        std_firing_magnitudes=theirs.FoldedNormalMagnitudeConfig(mean=0.5, std=0.5),
        bias=0.5,
        seed=42,
    )
    torch.manual_seed(seed)
    model = theirs.SyntheticModel(config)
    batches = SyntheticActivationIterator(model.feature_dict, model.activation_generator, BATCH)
    return batches, model.feature_dict.feature_vectors.detach()


def run_saelens(recipe: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """SAELens's trainer with the published learning rate of 3e-4; its dead latents are those of 1,000 steps."""
    samples = Samples()
    batches, true, x = (samples.batch(i, BATCH) for i in range(steps)), samples.made.dictionary, samples.heldout(32_768)
    if recipe == "saelens-own":
        batches, true = saelens_samples(seed)
        x = torch.cat([next(batches) for _ in range(128)])
    peer = peers.saelens(DATA.d, LATENTS, K, BATCH, "cpu", peers.Recipe(steps, lr=3e-4, seed=seed), autocast=False)
    found = []
    for step in range(steps):
        peer.step(next(batches), step)
        if step + 1 in MARKS or step + 1 == steps:
            w = peer.finish()
            numbers = measured(w["W_enc"].T, w["b_enc"], w["W_dec"], w["b_dec"], x, true)
            found.append({"recipe": recipe, "seed": seed, "steps": steps, "step": step + 1, **numbers})
    return found


def config_of(recipe: str, steps: int) -> tuple[SAEConfig, str]:
    """A recipe of this package: settings and the scale of the inputs. `-early`: latents are dead after 1,000 steps."""
    name, _, factor = recipe.partition(", rate x ")
    kind, _, early = name.partition("-")
    auxk = AuxKConfig(dead_after=(1000 if early else steps // 2) * BATCH)
    if kind == "preset":
        return batchtopk(LATENTS, K, auxk=auxk, **paper_recipe()), "none"
    lr = float(factor) * default_lr(DATA.d, LATENTS, K, BATCH, steps) if factor else None
    return batchtopk(LATENTS, K, auxk=auxk, lr=lr), "sqrt_d_in"


class Marks(Callback):
    """Measures the SAE at some steps."""

    def __init__(self, about: dict[str, Any], samples: Samples, steps: int) -> None:
        self.about, self.true, self.x, self.steps = about, samples.made.dictionary, samples.heldout(32_768), steps
        self.found: list[dict[str, Any]] = []

    def on_steps(self, run: Run, step: int, stats: Any) -> None:
        if step + 1 in MARKS or step + 1 == self.steps:
            (learner,) = run.learners
            self.found.append(
                {**self.about, "step": step + 1, **measured(*learner.weights, self.x / run.scale, self.true)}
            )


def run_ours(recipe: str, seed: int, steps: int) -> list[dict[str, Any]]:
    samples, (config, norm) = Samples(), config_of(recipe, steps)
    marks = Marks({"recipe": recipe, "seed": seed, "steps": steps}, samples, steps)
    train(
        samples,
        replace(config, seed=seed, name=recipe),
        steps=steps,
        batch_size=BATCH,
        device="cpu",
        heldout=samples.heldout(8192),
        input_norm=norm,
        progress=False,
        callbacks=[marks],
    )
    return marks.found


RECIPES = (
    *("saelens", "saelens-own", "preset", "preset-early"),
    *("defaults", "defaults-early", "defaults-early, rate x 0.25"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, action="append", required=True)
    parser.add_argument("--seed", type=int, action="append", required=True)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, required=True, help="runs are added to those of this file")
    args = parser.parse_args()
    sizes = {"latents": LATENTS, "k": K, "batch_size": BATCH}
    for recipe in args.recipe:
        for seed in args.seed:
            runs = (run_saelens if recipe.startswith("saelens") else run_ours)(recipe, seed, args.steps)
            print(recipe, seed, runs[-1], flush=True)
            before = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
            write_json(args.out, {"data": DATA.to_dict(), "sizes": sizes, "runs": before + runs})


if __name__ == "__main__":
    main()
