"""The paper from end to end at three sizes: what is trained and measured at each, and a stand-in for probing data."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from sampled_sae.config import Config, NotEmpty, Positive, Seed, require
from sampled_sae.evals.absorption.schema import AbsorptionConfig
from sampled_sae.evals.autointerp.schema import AutointerpConfig
from sampled_sae.evals.core.schema import CoreConfig
from sampled_sae.evals.probing.schema import ProbingConfig
from sampled_sae.evals.similarity.members import SimilarityConfig
from sampled_sae.method import presets
from sampled_sae.method.config import AuxKConfig, SAEConfig
from sampled_sae.method.scores import get_score
from sampled_sae.utils.cost import Shape
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import make_folder, write_text

STAND_IN = "stdlib-packages"
"""Instead of a probing dataset: pieces of Python's standard library, labeled by their package."""
PAPER_SCORES = ("l2", "squared_l2", "entropy", "uniform")
SMOLLM2 = Shape(width=576, blocks=30, block_weights=3_538_944, vocabulary=49_152)
PYTHIA_160M = Shape(width=768, blocks=12, block_weights=7_077_888, vocabulary=50_304)


@dataclass(frozen=True, slots=True)
class SyntheticPart(Config):
    """The synthetic experiment: a preset of `sampled-sae synthetic`, and values that replace its own."""

    preset: str = "demo"
    steps: int | None = None
    seeds: tuple[int, ...] | None = None
    scores: tuple[str, ...] | None = None
    multipliers: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Scale(Config):
    """Everything that decides the results of a reproduction of the paper."""

    synthetic: SyntheticPart  # the experiment with known features
    model: str  # language model
    shape: Shape  # its sizes, for the estimate
    layer: int  # the residual stream after this block, counted from 0
    text: str  # text of training, core and autointerp
    context: int  # tokens per context
    tokens: int  # tokens to train on; a shorter text is read again from its beginning
    d_sae: int  # latents of each SAE
    k: int  # mean active latents per token, K
    scores: tuple[str, ...] = PAPER_SCORES  # scores of the pools
    multipliers: tuple[float, ...] = (5.0,)  # pool multipliers l, each with each score
    others: tuple[str, ...] = ()  # further methods beside BatchTopK, by their names in `sampled-sae train --methods`
    seeds: Annotated[tuple[Seed, ...], NotEmpty] = (0, 1, 2)
    """The first is the sweep's. BatchTopK and each score at `seed_multiplier` are trained with all of them."""
    seed_multiplier: float = 5.0  # multiplier l of the SAEs that are compared across seeds
    saes_per_run: Positive = 100
    """Most SAEs that are trained together; fewer need less disk for checkpoints, and the text is read more often."""
    lr: float = 3e-4  # peak learning rate
    dead_after: int = 10_000_000  # tokens without firing after which a latent counts as dead
    batch_size: int = 4096  # tokens per step
    high_norm_factor: float = 10.0
    """Tokens whose norm is above this multiple of the median are not trained on; infinity keeps them."""
    heldout_tokens: int = 65_536  # tokens kept out of training
    buffer_tokens: int = 2**19  # tokens that are shuffled together
    checkpoint_every: int = 1000  # steps between two checkpoints
    core: CoreConfig = field(default_factory=lambda: CoreConfig(contexts=64))  # reconstruction and model loss
    probing: ProbingConfig = field(default_factory=ProbingConfig)
    """Sparse probing; the file of `STAND_IN` among its datasets is written by the stage."""
    absorption: AbsorptionConfig = field(default_factory=AbsorptionConfig)  # first-letter absorption
    autointerp: AutointerpConfig = field(default_factory=AutointerpConfig)  # automated interpretability
    similarity: SimilarityConfig = field(default_factory=SimilarityConfig)  # the comparison of SAEs
    figures: bool = True  # whether the report writes its figures as files too

    def check(self) -> None:
        right = "must be one of the multipliers"
        require(self.seed_multiplier in self.multipliers, "seed_multiplier", self.seed_multiplier, right)

    def saes(self) -> list[SAEConfig]:
        """The sweep with the first seed, then the other seeds of what is compared across seeds."""
        common: dict[str, Any] = {**presets.paper_recipe(self.lr), "auxk": AuxKConfig(dead_after=self.dead_after)}
        base = presets.batchtopk(self.d_sae, self.k, **common)
        pools = {
            (get_score(score).name, l): presets.sampled(self.d_sae, self.k, get_score(score).name, l, **common)
            for score in self.scores
            for l in self.multipliers
        }
        more = [presets.PRESETS[name](self.d_sae, self.k, **common) for name in self.others]
        again = [base, *(config for (_, l), config in pools.items() if l == self.seed_multiplier)]
        first, *rest = self.seeds
        made = [replace(config, seed=first) for config in [base, *pools.values(), *more]]
        made += [replace(config, seed=seed) for config in again for seed in rest]
        return presets.named(made, first)

    def evaluations(self) -> dict[str, Any]:
        """The settings of each evaluation by its name."""
        return {name: getattr(self, name) for name in ("core", "probing", "absorption", "autointerp")}

    def runs(self) -> list[list[SAEConfig]]:
        """The SAEs in groups that are trained together, of about the same size."""
        saes = self.saes()
        count = -(-len(saes) // self.saes_per_run)
        size = -(-len(saes) // count)
        return [saes[i : i + size] for i in range(0, len(saes), size)]


SCALES: dict[str, Scale] = {
    # Offline, two cores, a quarter of an hour. Layer 6 is where SmolLM2 knows first letters best.
    "tiny": Scale(
        synthetic=SyntheticPart("demo", steps=400),
        model="smollm2",
        shape=SMOLLM2,
        layer=6,
        text="stdlib",
        context=128,
        tokens=80_000,
        d_sae=2048,
        k=16,
        scores=("l2", "entropy", "uniform"),
        multipliers=(5, 30),
        others=("topk_then_batchtopk",),
        seeds=(0, 1),
        seed_multiplier=30,
        lr=2e-3,
        dead_after=20_000,
        batch_size=512,
        heldout_tokens=8192,
        buffer_tokens=32_768,
        checkpoint_every=50,
        core=CoreConfig(contexts=12),
        probing=ProbingConfig((STAND_IN,), train_texts=160, test_texts=40, tokens=64),
        absorption=AbsorptionConfig(max_words=4000, lines=2),
        autointerp=AutointerpConfig(embedder="minilm", max_latents=20, tokens=32_768),
        similarity=SimilarityConfig(across="reference"),
    ),
    # One GPU; offline too. The standard library's 3.5M tokens are read three times over.
    "small": Scale(
        synthetic=SyntheticPart("paper-table", seeds=(0,)),
        model="smollm2",
        shape=SMOLLM2,
        layer=6,
        text="stdlib",
        context=512,
        tokens=10_000_000,
        d_sae=16_384,
        k=32,
        multipliers=(5, 30, 100),
        others=("topk_then_batchtopk", "released"),
        seed_multiplier=30,
        lr=1e-3,
        dead_after=1_000_000,
        probing=ProbingConfig((STAND_IN,), train_texts=400, test_texts=100),
        absorption=AbsorptionConfig(max_words=12_000),
        autointerp=AutointerpConfig(embedder="minilm", max_latents=200, tokens=500_000),
        similarity=SimilarityConfig(across="reference", matching="none"),
    ),
    # The paper's own table of settings; feature tables and seeds at l = 100, which its tables of features say.
    "paper": Scale(
        synthetic=SyntheticPart("paper"),
        model="EleutherAI/pythia-160m-deduped",
        shape=PYTHIA_160M,
        layer=6,
        text="monology/pile-uncopyrighted",
        context=1024,
        tokens=25_000_000,
        d_sae=65_536,
        k=60,
        multipliers=(1, 3, 4, 5, 10, 20, 30, 40, 50, 60, 70, 100),
        seed_multiplier=100,
        saes_per_run=8,
        high_norm_factor=float("inf"),
        checkpoint_every=3000,
        similarity=SimilarityConfig(across="reference", matching="none"),
    ),
}


# ---- the stand-in --------------------------------------------------------------------------------------

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest", "xml")
LINES = 12  # lines of a piece, blank ones not counted
FEWEST = 20  # pieces that a package must have


def write_labelled(path: Path, each: int) -> Path:
    """Write rows with text, label and split, at most `each` of a package: every fifth file is there to test."""
    rows = [row for package in PACKAGES for row in _labelled_rows(package, each)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    make_folder(path.parent)
    # A file that was written anew would count as another dataset.
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
    return path


def _labelled_rows(package: str, each: int) -> list[dict[str, str]]:
    folder = Path(sysconfig.get_paths()["stdlib"]) / package
    files = sorted(path for path in folder.rglob("*.py") if not {"test", "tests"} & set(path.parts))
    # Pieces of one file are alike: none may be on both sides.
    parts = {"test": files[::5], "train": [path for number, path in enumerate(files) if number % 5]}
    rows = []
    for split, chosen in parts.items():
        pieces = [piece for path in chosen for piece in _pieces(path)]
        most = each // 5 if split == "test" else each - each // 5
        step = max(1, len(pieces) // max(1, most))
        rows += [{"text": piece, "label": package, "split": split} for piece in pieces[::step][:most]]
    if len(rows) < min(FEWEST, each):
        raise UserError(f"datasets: {folder} has {len(rows)} pieces of text: is this Python without its library?")
    return rows


def _pieces(path: Path) -> Iterator[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):  # a few files of the library are in other encodings on purpose
        return
    for start in range(0, len(lines) - LINES + 1, LINES):
        yield "\n".join(lines[start : start + LINES])
