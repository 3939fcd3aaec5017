"""What MCC on SynthSAEBench depends on: recipes and methods on the same samples, at a small and at the published size.

    python benchmarks/synthsaebench.py --recipe preset --recipe defaults --seed 0 --out recipes.json
    .peers/saelens/bin/python benchmarks/synthsaebench.py --recipe saelens --seed 0 --out recipes.json
    python benchmarks/synthsaebench.py --full --kept FILE --recipe topk --seed 0 --out full.json

The small data follow the specification with 1,024 features in 128 dimensions and 8 trees; SAEs have 256 latents and
K = 6, about the L0 of the 256 most frequent features, and see 256 samples per step. `--full` is the published size.
`--kept` writes the samples to a file, unless it exists, and reads them from there, so that they are made once (10,000
steps of the full size: 16 GB and 25 minutes on a core). `saelens` trains SAELens's own SAE with its published settings,
`saelens-own` also on SAELens's own generator. `OURS` and `THEIRS` list the other recipes; a method as on the command
line is trained with the package's defaults, and `NAME, rate x 0.25` with a quarter of the learning rate. Every SAE is
measured by the same functions: FVE with the cut over 1,024 samples, MCC as published (mean absolute cosine of the
Hungarian matching, over all latents), the share of the latents that do not fire on 32,768 held-out samples, and at the
end F1 and uniqueness as published, and which features the latents stand for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import peers
from sampled_sae import Callback, batchtopk, matryoshka, topk, train
from sampled_sae.data.stream import Endless
from sampled_sae.data.synth_sae_bench import SynthSAEBench, SynthSAEBenchConfig
from sampled_sae.evals.similarity.detection import Detection
from sampled_sae.evals.similarity.matching import match
from sampled_sae.method.codes import SparseCodes
from sampled_sae.method.config import AuxKConfig, OptimizerConfig, Rates, SAEConfig
from sampled_sae.method.parameters import Weights
from sampled_sae.method.presets import paper_recipe, parse_methods
from sampled_sae.method.rate import default_lr
from sampled_sae.training.run import Run
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import write_json


class Size(NamedTuple):
    """Data, and SAEs trained on them."""

    data: SynthSAEBenchConfig
    latents: int
    k: int
    batch: int


SMALL = Size(SynthSAEBenchConfig(d=128, features=1024, roots=8), latents=256, k=6, batch=256)
FULL = Size(SynthSAEBenchConfig(), latents=4096, k=25, batch=1024)
CUT = 1024
MARKS = (1000, 2500, 5000, 10_000, 15_000, 20_000, 40_000, 60_000)
CHUNK, KEPT_CHUNK = 4096, 16_384


class Samples(Endless):
    """Training samples in chunks, so that making them takes little of the time."""

    def __init__(self, size: Size) -> None:
        self.made, self.number, self.chunk = SynthSAEBench(size.data), -1, torch.empty(0)

    def batch(self, index: int, size: int, split: Any = "train") -> Tensor:
        if split == "heldout":
            return self.heldout(size)
        number, part = divmod(index * size, CHUNK)
        if number != self.number:
            self.number, self.chunk = number, self.made.batch(number, CHUNK)
        return self.chunk[part : part + size]

    def heldout(self, size: int) -> Tensor:
        return torch.cat([self.made.batch(i, CHUNK, split="heldout") for i in range(1, 1 + -(-size // CHUNK))])[:size]


class Kept(Samples):
    """Training samples in a file, in float16."""

    def __init__(self, size: Size, path: Path, samples: int) -> None:
        super().__init__(size)
        if not path.exists():
            new, rows = path.with_name(path.name + ".new"), -(-samples // KEPT_CHUNK) * KEPT_CHUNK
            made = np.memmap(new, np.float16, "w+", shape=(rows, size.data.d))
            for i in range(0, rows, KEPT_CHUNK):
                made[i : i + KEPT_CHUNK] = self.made.batch(i // KEPT_CHUNK, KEPT_CHUNK).half().numpy()
            made.flush()
            new.rename(path)
        self.rows = np.memmap(path, np.float16, "r").reshape(-1, size.data.d)
        if len(self.rows) < samples:
            sys.exit(f"{path}: has {len(self.rows)} samples, {samples} are needed; remove it to make them again")

    def batch(self, index: int, size: int, split: Any = "train") -> Tensor:
        if split == "heldout":
            return self.heldout(size)
        return torch.from_numpy(self.rows[index * size : (index + 1) * size].astype(np.float32))


def kept(weights: Sequence[Tensor], x: Tensor, k: int) -> Tensor:
    """The activations [n, m] of samples x [n, d] that BatchTopK keeps; W_enc and W_dec [m, d]."""
    W_enc, b_enc, _, b_dec = weights
    z = torch.addmm(b_enc, x - b_dec, W_enc.T).relu_()
    return z.mul_(z >= z.flatten().topk(k * len(x)).values[-1])


@torch.no_grad()
def measured(weights: Sequence[Tensor], x: Tensor, true: Tensor, k: int) -> dict[str, float]:
    """FVE, MCC and the share of latents that do not fire; W_dec with unit rows, x [n, d]."""
    W_dec, b_dec = weights[2:]
    error, fired = 0.0, torch.zeros(len(W_dec), dtype=torch.bool)
    for part in x.split(CUT):
        z = kept(weights, part, k)
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


@torch.no_grad()
def detection(weights: Sequence[Tensor], data: SynthSAEBench, k: int, scale: float = 1.0) -> dict[str, float]:
    """Precision, recall, F1 and uniqueness on held-out samples; the SAE takes samples that are divided by `scale`."""
    found = Detection(weights[2], data.dictionary)
    for index in range(1, 9):
        samples, codes = zip(*data.parts(index, CHUNK, "heldout"), strict=True)
        for x, own in zip(torch.cat(samples).split(CUT), SparseCodes.cat(codes).split(CUT), strict=True):
            found.add(SparseCodes.from_dense(kept(weights, x / scale, k)), own.dense() > 0)
    return found.result()


def saelens_samples(size: Size, seed: int) -> tuple[Iterator[Tensor], Tensor]:
    """Batches of SAELens's own generator, and its true features."""
    from sae_lens import synthetic as theirs
    from sae_lens.synthetic.training import SyntheticActivationIterator

    config = theirs.SyntheticModelConfig(
        num_features=size.data.features,
        hidden_dim=size.data.d,
        firing_probability=theirs.ZipfianFiringProbabilityConfig(exponent=0.5, max_prob=0.4, min_prob=5e-4),
        hierarchy=theirs.HierarchyConfig(
            total_root_nodes=size.data.roots,
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
    batches = SyntheticActivationIterator(model.feature_dict, model.activation_generator, size.batch)
    return batches, model.feature_dict.feature_vectors.detach()


@torch.no_grad()
def saelens_start(sae: Any, recipe: str, x: Tensor) -> None:
    """Other initial values: b_dec as the mean of the first batch x [n, d], not 0; decoder rows of norm 1, not 0.1."""
    if "b_dec mean" in recipe:
        sae.b_dec.copy_(x.mean(0))
    if "unit rows" in recipe:
        sae.W_dec /= sae.W_dec.norm(dim=1, keepdim=True)
        sae.W_enc.copy_(sae.W_dec.T)


def run_saelens(size: Size, samples: Samples, recipe: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """SAELens's trainer with the published learning rate of 3e-4; its dead latents are those of 1,000 steps."""
    batches: Iterator[Tensor] = (samples.batch(i, size.batch) for i in range(steps))
    true, x = samples.made.dictionary, samples.heldout(32_768)
    if recipe == "saelens-own":
        batches, true = saelens_samples(size, seed)
        x = torch.cat([next(batches) for _ in range(128)])
    start = partial(saelens_start, recipe=recipe, x=samples.batch(0, size.batch))
    plan = peers.Recipe(steps, lr=3e-4, seed=seed)
    peer = peers.saelens(size.data.d, size.latents, size.k, size.batch, "cpu", plan, autocast=False, start=start)
    found = []
    for step in range(steps):
        peer.step(next(batches), step)
        if step + 1 in MARKS or step + 1 == steps:
            w = peer.finish()
            weights = w["W_enc"].T, w["b_enc"], w["W_dec"], w["b_dec"]
            numbers, parts = measured(weights, x, true, size.k), {}
            if recipe != "saelens-own" and step + 1 == steps:
                parts = detection(weights, samples.made, size.k) | anatomy(w["W_dec"], samples.made)
            found.append({"recipe": recipe, "seed": seed, "steps": steps, "step": step + 1, **numbers, **parts})
            print(found[-1], flush=True)
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

    def made(self, size: Size, steps: int) -> SAEConfig:
        auxk, shape = AuxKConfig(dead_after=(steps // 2 if self.late else 1000) * size.batch), (size.latents, size.k)
        lr = {} if self.rate == 1 else {"lr": self.rate * default_lr(size.data.d, *shape, size.batch, steps)}
        return self.config(*shape, auxk=auxk, **lr, **self.settings)


def zero_b_dec(weights: Weights, true: Tensor) -> None:
    weights.b_dec.zero_()


def few_active(weights: Weights, true: Tensor) -> None:
    """As many latents as with SAELens do not fire at first: a tenth of the encoder, so that AuxK has to revive them."""
    weights.W_enc[round(0.18 * len(weights.W_enc)) :] *= 0.1


def both(weights: Weights, true: Tensor) -> None:
    zero_b_dec(weights, true)
    few_active(weights, true)


def true_features(weights: Weights, true: Tensor) -> None:
    """The most frequent features, in encoder and decoder."""
    weights.W_dec.copy_(true[: len(weights.W_dec)])
    torch.mul(weights.W_dec, 0.7, out=weights.W_enc)


PAPER: dict[str, Any] = {"settings": paper_recipe(), "norm": "none"}


def adam(**settings: Any) -> dict[str, Any]:
    return {"optimizer": OptimizerConfig(**settings)}


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
    "defaults-early, b_dec 0": Recipe(start=zero_b_dec),
    "defaults-early, few active": Recipe(start=few_active),
    "defaults-early, plain Adam": Recipe(settings=adam(cautious=False, beta2=0.999)),
    "defaults-early, no decay": Recipe(settings=adam(decay=0)),
    "defaults-early, W_dec rate 0.5": Recipe(settings=adam(rates=Rates(W_dec=0.5))),
    "topk": Recipe(topk),
    "matryoshka": Recipe(matryoshka),
    "true features": Recipe(start=true_features),
    "true decoder": Recipe(settings=adam(rates=Rates(W_dec=1e-9)), start=true_features),
}


def recipe_of(name: str) -> Recipe:
    """One of `OURS`, or a method as on the command line with the package's defaults; after ", rate x " a factor."""
    spec, _, rate = name.partition(", rate x ")

    def config(d_sae: int, k: int, **settings: Any) -> SAEConfig:
        return parse_methods([spec], d_sae=d_sae, k=k, **settings)[0]

    return replace(OURS.get(spec) or Recipe(config), rate=float(rate or 1))


THEIRS = ("saelens", "saelens-own", "saelens, b_dec mean", "saelens, b_dec mean, unit rows")


class Marks(Callback):
    """Changes the SAE after the first step, and measures it at some steps."""

    def __init__(self, size: Size, about: dict[str, Any], samples: Samples) -> None:
        self.size, self.about, self.data, self.x = size, about, samples.made, samples.heldout(32_768)
        self.start = recipe_of(about["recipe"]).start
        self.found: list[dict[str, Any]] = []

    def on_steps(self, run: Run, step: int, stats: Any) -> None:
        (learner,) = run.learners
        if step == 0 and self.start is not None:
            self.start(learner.weights, self.data.dictionary)
        last = step + 1 == self.about["steps"]
        if step + 1 in MARKS or last:
            weights = learner.weights[:4]
            numbers, parts = measured(weights, self.x / run.scale, self.data.dictionary, self.size.k), {}
            if last:
                parts = detection(weights, self.data, self.size.k, run.scale) | anatomy(weights[2], self.data)
            self.found.append({**self.about, "step": step + 1, **numbers, **parts})
            print(self.found[-1], flush=True)


def run_ours(size: Size, samples: Samples, recipe: str, seed: int, steps: int) -> list[dict[str, Any]]:
    config = recipe_of(recipe).made(size, steps)
    marks = Marks(size, {"recipe": recipe, "seed": seed, "steps": steps}, samples)
    train(
        samples,
        replace(config, seed=seed, name=recipe),
        steps=steps,
        batch_size=size.batch,
        device="cpu",
        heldout=samples.heldout(8192),
        input_norm=recipe_of(recipe).norm,
        progress=False,
        callbacks=[marks],
    )
    return marks.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", required=True)
    parser.add_argument("--seed", type=int, action="append", required=True)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--full", action="store_true", help="the published size")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="samples, made unless the file exists")
    parser.add_argument("--out", type=Path, required=True, help="runs are added to those of this file")
    args = parser.parse_args()
    size = FULL if args.full else SMALL
    try:  # before samples are made
        for recipe in set(args.recipe) - set(THEIRS):
            recipe_of(recipe).made(size, args.steps)
    except (UserError, ValueError) as error:
        parser.error(f"--recipe {recipe!r}: {error}")
    samples = Kept(size, args.kept, args.steps * size.batch) if args.kept else Samples(size)
    sizes = {"latents": size.latents, "k": size.k, "batch_size": size.batch}
    about = {"data": size.data.to_dict(), "mean_l0": samples.made.statistics()["observed_l0"], "sizes": sizes}
    for recipe in args.recipe:
        for seed in args.seed:
            runs = (run_saelens if recipe in THEIRS else run_ours)(size, samples, recipe, seed, args.steps)
            before = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
            write_json(args.out, about | {"runs": before + runs})


if __name__ == "__main__":
    main()
