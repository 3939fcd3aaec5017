"""What MCC on SynthSAEBench depends on: BatchTopK with several recipes on the same samples of a small SynthSAEBench.

    python benchmarks/synthsaebench.py --recipe preset --recipe defaults --seed 0 --out recipes.json
    .peers/saelens/bin/python benchmarks/synthsaebench.py --recipe saelens --seed 0 --out recipes.json

The data follow the specification with 1,024 features in 128 dimensions and 8 trees; SAEs have 256 latents and K = 6,
about the L0 of the 256 most frequent features, and see 256 samples per step. `saelens` trains SAELens's own SAE with
its published settings, `saelens-own` also on SAELens's own generator. `OURS` and `THEIRS` list the other recipes.
Every SAE is measured by the same functions: FVE with the cut over 1,024 samples, MCC as published (mean absolute cosine
of the Hungarian matching, over all latents), the share of the latents that do not fire on 32,768 held-out samples, and
at the end which features the latents stand for. benchmarks/synthsaebench_full.py is the benchmark at its full size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import peers
from sampled_sae import Callback, batchtopk, matryoshka, topk, train
from sampled_sae.data.stream import Endless
from sampled_sae.data.synth_sae_bench import SynthSAEBench, SynthSAEBenchConfig
from sampled_sae.evals.similarity.matching import match
from sampled_sae.method.config import AuxKConfig, OptimizerConfig, Rates, SAEConfig
from sampled_sae.method.parameters import Weights
from sampled_sae.method.presets import paper_recipe, parse_methods
from sampled_sae.method.rate import default_lr
from sampled_sae.training.run import Run
from sampled_sae.utils.files import write_json

DATA = SynthSAEBenchConfig(d=128, features=1024, roots=8)
LATENTS, K, BATCH, CUT = 256, 6, 256, 1024
MARKS = (1000, 2500, 5000, 10_000, 15_000, 20_000, 40_000, 60_000)
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


@torch.no_grad()
def anatomy(W_dec: Tensor, data: SynthSAEBench) -> dict[str, Any]:
    """Latents by the level of the feature that they are matched with, and what those of the leaves consist of.

    `levels`: number and mean cosine. `leaf`: mean coefficients of the leaf, its parent, grandparent and so on, by least
    squares, and the norm of what is left of the unit decoder row.
    """
    found = match(W_dec, data.dictionary)
    features = (found.latent >= 0).nonzero()[:, 0]
    cosine, level = found.similarity[features], data.bucket[features]
    levels = {
        name: [int((level == i).sum()), float(cosine[level == i].mean())]
        for i, name in enumerate(data.names)
        if (level == i).any()
    }
    leaves = features[level == data.config.depth]
    path, member = [leaves], leaves
    for parents, children in reversed(data._families()):
        member = parents.start + (member - children.start) // data.config.branching
        path.append(member)
    basis = data.dictionary[torch.stack(path, 1)].mT
    rows = torch.nn.functional.normalize(W_dec, dim=1)[found.latent[leaves]]
    parts = torch.linalg.lstsq(basis, rows.unsqueeze(2)).solution
    rest = (rows - (basis @ parts)[:, :, 0]).norm(dim=1).mean()
    parts = (parts * parts[:, :1].sign())[:, :, 0].mean(0)
    return {"levels": levels, "leaf": [*parts.tolist(), float(rest)]}


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


@torch.no_grad()
def saelens_start(sae: Any, recipe: str, x: Tensor) -> None:
    """Other initial values: b_dec as the mean of the first batch x [n, d], not 0; decoder rows of norm 1, not 0.1."""
    if "b_dec mean" in recipe:
        sae.b_dec.copy_(x.mean(0))
    if "unit rows" in recipe:
        sae.W_dec /= sae.W_dec.norm(dim=1, keepdim=True)
        sae.W_enc.copy_(sae.W_dec.T)


def run_saelens(recipe: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """SAELens's trainer with the published learning rate of 3e-4; its dead latents are those of 1,000 steps."""
    samples = Samples()
    batches: Iterator[Tensor] = (samples.batch(i, BATCH) for i in range(steps))
    true, x = samples.made.dictionary, samples.heldout(32_768)
    if recipe == "saelens-own":
        batches, true = saelens_samples(seed)
        x = torch.cat([next(batches) for _ in range(128)])
    start = partial(saelens_start, recipe=recipe, x=samples.batch(0, BATCH))
    plan = peers.Recipe(steps, lr=3e-4, seed=seed)
    peer = peers.saelens(DATA.d, LATENTS, K, BATCH, "cpu", plan, autocast=False, start=start)
    found = []
    for step in range(steps):
        peer.step(next(batches), step)
        if step + 1 in MARKS or step + 1 == steps:
            w = peer.finish()
            numbers = measured(w["W_enc"].T, w["b_enc"], w["W_dec"], w["b_dec"], x, true)
            parts = anatomy(w["W_dec"], samples.made) if recipe != "saelens-own" and step + 1 == steps else {}
            found.append({"recipe": recipe, "seed": seed, "steps": steps, "step": step + 1, **numbers, **parts})
    return found


@dataclass(frozen=True)
class Recipe:
    """Settings of this package; by default latents are dead after 1,000 steps and inputs have norm sqrt(d)."""

    config: Callable[..., SAEConfig] = batchtopk
    settings: dict[str, Any] = field(default_factory=dict)
    norm: str = "sqrt_d_in"
    rate: float = 1  # times the default
    late: bool = False  # latents are dead after half of the steps
    start: Callable[[Weights, Tensor], None] | None = None
    """Changes the weights after the first step; takes them and the true features."""

    def made(self, steps: int) -> SAEConfig:
        auxk = AuxKConfig(dead_after=(steps // 2 if self.late else 1000) * BATCH)
        lr = None if self.rate == 1 else self.rate * default_lr(DATA.d, LATENTS, K, BATCH, steps)
        return self.config(LATENTS, K, auxk=auxk, **({} if lr is None else {"lr": lr}), **self.settings)


def zero_b_dec(weights: Weights, true: Tensor) -> None:
    weights.b_dec.zero_()


def few_active(weights: Weights, true: Tensor) -> None:
    """As many latents as with SAELens do not fire at first: a tenth of the encoder, so that AuxK has to revive them."""
    weights.W_enc[round(0.18 * LATENTS) :] *= 0.1


def both(weights: Weights, true: Tensor) -> None:
    zero_b_dec(weights, true)
    few_active(weights, true)


def true_features(weights: Weights, true: Tensor) -> None:
    """The most frequent features, in encoder and decoder."""
    weights.W_dec.copy_(true[:LATENTS])
    torch.mul(weights.W_dec, 0.7, out=weights.W_enc)


PAPER: dict[str, Any] = {"settings": paper_recipe(), "norm": "none"}


def adam(**settings: Any) -> dict[str, Any]:
    return {"optimizer": OptimizerConfig(**settings)}


METHODS = (
    *("topk_then_batchtopk", "topk_then_batchtopk:until=0.7", "sampled:score=l2,l=5", "sampled:score=l2,l=20"),
    *("sampled:score=entropy,l=20", "sampled:score=prefix,l=20", "sampled:score=uniform,l=20"),
    *("released", "released:score=l2", "released:score=entropy", "released:score=prefix"),
    "released:score=l2,prefixes=8+24+56+120+256",  # with Matryoshka's prefixes
)
"""Methods with the package's defaults, as on the command line. The first is the default method."""


def method(spec: str, d_sae: int, k: int, **settings: Any) -> SAEConfig:
    return parse_methods([spec], d_sae=d_sae, k=k, **settings)[0]


OURS = {
    "preset": Recipe(late=True, **PAPER),
    "preset-early": Recipe(**PAPER),
    "preset-early, b_dec 0": Recipe(start=zero_b_dec, **PAPER),
    "preset-early, b_dec 0, lr 1e-3": Recipe(settings=paper_recipe(1e-3), norm="none", start=zero_b_dec),
    "preset-early, b_dec 0, lr 2e-3": Recipe(settings=paper_recipe(2e-3), norm="none", start=zero_b_dec),
    "preset-early, few active": Recipe(start=few_active, **PAPER),
    "preset-early, few active, b_dec 0": Recipe(start=both, **PAPER),
    "defaults": Recipe(late=True),
    "defaults-early": Recipe(),
    "defaults-early, rate x 0.25": Recipe(rate=0.25),
    "defaults-early, b_dec 0": Recipe(start=zero_b_dec),
    "defaults-early, few active": Recipe(start=few_active),
    "defaults-early, plain Adam": Recipe(settings=adam(cautious=False, beta2=0.999)),
    "defaults-early, no decay": Recipe(settings=adam(decay=0)),
    "defaults-early, W_dec rate 0.5": Recipe(settings=adam(rates=Rates(W_dec=0.5))),
    "topk": Recipe(topk),
    "matryoshka": Recipe(matryoshka),
    "true features": Recipe(start=true_features),
    "true decoder": Recipe(settings=adam(rates=Rates(W_dec=1e-9)), start=true_features),
    **{spec: Recipe(partial(method, spec)) for spec in METHODS},
}
THEIRS = ("saelens", "saelens-own", "saelens, b_dec mean", "saelens, b_dec mean, unit rows")


class Marks(Callback):
    """Changes the SAE after the first step, and measures it at some steps."""

    def __init__(self, about: dict[str, Any], samples: Samples, steps: int) -> None:
        self.about, self.data, self.x, self.steps = about, samples.made, samples.heldout(32_768), steps
        self.start = OURS[about["recipe"]].start
        self.found: list[dict[str, Any]] = []

    def on_steps(self, run: Run, step: int, stats: Any) -> None:
        (learner,) = run.learners
        if step == 0 and self.start is not None:
            self.start(learner.weights, self.data.dictionary)
        if step + 1 in MARKS or step + 1 == self.steps:
            numbers = measured(*learner.weights[:4], self.x / run.scale, self.data.dictionary)
            parts = anatomy(learner.weights.W_dec, self.data) if step + 1 == self.steps else {}
            self.found.append({**self.about, "step": step + 1, **numbers, **parts})


def run_ours(recipe: str, seed: int, steps: int) -> list[dict[str, Any]]:
    samples, config = Samples(), OURS[recipe].made(steps)
    marks = Marks({"recipe": recipe, "seed": seed, "steps": steps}, samples, steps)
    train(
        samples,
        replace(config, seed=seed, name=recipe),
        steps=steps,
        batch_size=BATCH,
        device="cpu",
        heldout=samples.heldout(8192),
        input_norm=OURS[recipe].norm,
        progress=False,
        callbacks=[marks],
    )
    return marks.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=(*OURS, *THEIRS), action="append", required=True)
    parser.add_argument("--seed", type=int, action="append", required=True)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, required=True, help="runs are added to those of this file")
    args = parser.parse_args()
    sizes = {"latents": LATENTS, "k": K, "batch_size": BATCH}
    for recipe in args.recipe:
        for seed in args.seed:
            runs = (run_ours if recipe in OURS else run_saelens)(recipe, seed, args.steps)
            print(recipe, seed, runs[-1], flush=True)
            before = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
            write_json(args.out, {"data": DATA.to_dict(), "sizes": sizes, "runs": before + runs})


if __name__ == "__main__":
    main()
