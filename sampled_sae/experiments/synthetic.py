"""The synthetic experiment: data with known features, a grid of SAEs, and how well each recovers the features."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sampled_sae import api
from sampled_sae.config import first_difference, write_file
from sampled_sae.data.synth_sae_bench import SynthSAEBench, SynthSAEBenchConfig
from sampled_sae.data.synthetic import PRESETS, SyntheticConfig, SyntheticData
from sampled_sae.evals.similarity.detection import Detection
from sampled_sae.evals.similarity.matching import activation_fidelity, bucket_recovery, match
from sampled_sae.method import presets
from sampled_sae.method.codes import SparseCodes
from sampled_sae.method.config import AuxKConfig, Fraction, Multiplier, OptimizerConfig, PoolConfig, Released, SAEConfig
from sampled_sae.method.scores import get_score
from sampled_sae.sae import SAE
from sampled_sae.training.heldout import as_trained, by_threshold, training_time_codes
from sampled_sae.utils import progress as bars
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import make_folder, write_text
from sampled_sae.utils.system import git_commit, usable_device, versions
from sampled_sae.utils.third_party import require_package


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration of the grid, trained once for each seed."""

    group: str  # color and panel in the figures
    label: str  # name in tables
    config: SAEConfig
    l: float | None = None  # the multiplier, for constant scored pools

    @property
    def name(self) -> str:
        """The label as a folder's name."""
        return re.sub(r"[^\w.]+", "-", self.label.replace("score=", "").replace("=", ""))


def cell(group: str, config: SAEConfig, l: float | None = None) -> Cell:
    """A cell with its method as label, as `--methods` names it."""
    return Cell(group, presets.spec(config), config, l)


def grid(experiment: Experiment) -> list[Cell]:
    """BatchTopK, TopK, both in turn, the scores at several l, released and annealed pools; more if `extended`."""
    trained: dict[str, Any] = {"optimizer": experiment.optimizer, "init": presets.PAPER_INIT, "auxk": experiment.auxk}
    untrained = family(experiment) + (scored_released(experiment) if experiment.extended else [])
    cells = [replace(cell, config=replace(cell.config, **trained)) for cell in untrained]
    if experiment.extended:
        cells += improved({cell.label: cell for cell in cells})
    if experiment.only is None:
        return cells
    for label in experiment.only:
        if label not in {cell.label for cell in cells}:
            raise UserError(f"only = {label!r}: not in this grid; its SAEs are {', '.join(c.label for c in cells)}")
    return [cell for cell in cells if cell.label in experiment.only]


def family(experiment: Experiment) -> list[Cell]:
    """The methods that the experiment compares, in their default settings."""
    m, k = experiment.d_sae, experiment.k
    cells = [
        cell("batchtopk", presets.batchtopk(m, k)),
        cell("topk", presets.topk(m, k)),
        cell("topk", presets.topk_then_batchtopk(m, k)),
        cell("topk", presets.topk_then_batchtopk(m, k, until=0.7)),
    ]
    for score in experiment.scores:
        for l in experiment.multipliers:
            cells.append(cell(score, presets.sampled(m, k, score, l), l))
    half = PoolConfig("uniform", Fraction(0.5))
    return [
        *cells,
        cell("uniform", SAEConfig(m, k, pool=half), m / k / 2),
        cell("released", presets.released(m, k, fraction=0.5)),
        cell("released", presets.released(m, k, fraction=0.75)),
        cell("released", presets.released(m, k, score="l2", fraction=0.5)),
        cell("annealed", presets.annealed(m, k, fraction=0.3)),
    ]


def scored_released(experiment: Experiment) -> list[Cell]:
    """Scored pools of the largest l and of half of the latents, released to all latents at 70% of the steps."""
    m, k, l = experiment.d_sae, experiment.k, max(experiment.multipliers)
    cells = []
    for score in ("l2", "entropy", "frequency"):
        pool = PoolConfig(score, Multiplier(l), schedule=Released(0.7))
        cells.append(cell("released", SAEConfig(m, k, pool=pool)))
    return [*cells, cell("released", presets.released(m, k, "entropy", 0.5))]


def improved(cells: dict[str, Cell]) -> list[Cell]:
    """The methods that train well, with a higher learning rate and with dead latents revived early."""

    def faster(label: str, lr: float, dead_after: int | None = None) -> Cell:
        config = cells[label].config
        config = replace(config, optimizer=replace(config.optimizer, lr=lr))
        name = f"{label} lr={lr:g}"
        if dead_after is not None:
            config = replace(config, auxk=replace(config.auxk, dead_after=dead_after))
            name += f" dead_after={dead_after}"
        return replace(cells[label], label=name, config=config)

    return [
        faster("batchtopk", 1e-3),
        faster("released", 1e-3),
        faster("batchtopk", 3e-3),
        faster("topk", 3e-3),
        faster("released:fraction=0.75", 3e-3),
        faster("batchtopk", 3e-3, dead_after=400_000),
    ]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Data, sizes and training of one run of the experiment."""

    data: SyntheticConfig | SynthSAEBenchConfig  # the features and their distribution
    d_sae: int  # latents of each SAE
    k: int  # mean active latents per sample, K
    steps: int  # optimizer steps
    batch_size: int  # samples per step
    samples: int | None = None  # size of a fixed training set; none means fresh samples in each step
    seeds: tuple[int, ...] = (0,)  # each SAE is trained once for each seed, all on the same samples
    scores: tuple[str, ...] = ("l2", "squared_l2", "entropy", "uniform")  # scores of the constant pools
    multipliers: tuple[float, ...] = (1, 5, 20)  # their pool multipliers l
    heldout: int = 65_536  # fresh samples on which every SAE is measured
    optimizer: OptimizerConfig = presets.PAPER_OPTIMIZER  # Adam and the learning rate
    auxk: AuxKConfig = field(default_factory=AuxKConfig)  # revival of dead latents
    normalize: bool = False  # scale the samples to unit root mean square norm while training
    extended: bool = False
    """Also the methods that train well, at higher learning rates and with earlier revival of dead latents."""
    only: tuple[str, ...] | None = None  # labels of the SAEs to train, out of the grid; none means all


_L0_61 = PRESETS["l0-61"]
# Large enough to separate the methods: fresh samples, three seeds.
_TABLE = Experiment(
    data=_L0_61,
    d_sae=4096,
    k=60,
    steps=5000,
    batch_size=4096,
    seeds=(0, 1, 2),
    scores=("l2", "squared_l2", "entropy", "uniform", "prefix"),
    extended=True,
)
EXPERIMENTS: dict[str, Experiment] = {
    # A quarter of the paper's table in every direction, for two cores and a few minutes.
    "demo": Experiment(
        data=replace(_L0_61, d=64, features=256),
        d_sae=1024,
        k=15,
        steps=800,
        batch_size=1024,
        heldout=16_384,
        optimizer=replace(presets.PAPER_OPTIMIZER, lr=3e-3),
        auxk=AuxKConfig(dead_after=500_000),
    ),
    # The paper's words: a fixed set of 10,000 samples and the real experiment's training table.
    "paper": Experiment(
        data=replace(_L0_61, buckets="random"),
        d_sae=65_536,
        k=60,
        steps=50_000,
        batch_size=4096,
        samples=10_000,
        multipliers=(1, 3, 4, 5, 10, 20, 30, 40, 50, 60, 70, 100),
    ),
    "paper-table": _TABLE,
    # The paper's text instead of its table: p = 0.20 for frequent features, L0 113.
    "paper-table-p20": replace(_TABLE, data=PRESETS["p-20"]),
    # Numbers beside those of SynthSAEBench: its data and its SAEs of 4,096 latents, with a tenth of its 200M samples.
    # The learning rate of 3e-4 and dead latents after 1,000 steps are as published, too.
    "synthsaebench": Experiment(
        data=SynthSAEBenchConfig(),
        d_sae=4096,
        k=25,
        steps=20_000,
        batch_size=1024,
        seeds=(0, 1, 2),
        multipliers=(5, 30, 100),
        auxk=AuxKConfig(dead_after=1_024_000),
    ),
    # Memorization: FVE on the 10,000 training samples beside that on fresh ones, with the paper's number of latents.
    "paper-finite": replace(_TABLE, d_sae=65_536, samples=10_000, extended=False),
}


def experiment(
    preset: str, *, data: str | None = None, buckets: Any = None, coefficients: Any = None, **changes: Any
) -> Experiment:
    """The preset with other values; None keeps the preset's. `data` names a reading of the paper's probabilities."""
    base = EXPERIMENTS[preset]
    of_data: dict[str, Any] = {"buckets": buckets, "coefficients": coefficients}
    if data is not None:
        of_data |= {"p_low": PRESETS[data].p_low, "p_high": PRESETS[data].p_high}
    for name, value in {"data": data, "buckets": buckets, "coefficients": coefficients}.items():
        if value is not None and not isinstance(base.data, SyntheticConfig):
            raise UserError(f"{name} = {value!r}: is for the paper's data; preset {preset!r} has other data")
    made = replace(base.data, **{name: value for name, value in of_data.items() if value is not None})
    given: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in changes.items() if v is not None
    }
    if given.get("seeds") == ():
        raise UserError("seeds: must name at least one")
    for score in given.get("scores", ()):
        get_score(score)
    return replace(base, data=made, **given)


def run(
    preset: str,
    experiment: Experiment,
    out: Path,
    *,
    resume: bool = False,
    device: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Train the whole grid, measure every SAE, write and return `out`/results.json."""
    require_packages()
    place = usable_device(device)
    data = open_data(experiment.data, place)
    cells = grid(experiment)
    configs = [
        replace(cell.config, seed=seed, name=f"{cell.name}-s{seed}") for cell in cells for seed in experiment.seeds
    ]
    saes = api.train(
        data if experiment.samples is None else data.fixed(experiment.samples),
        configs,
        steps=experiment.steps,
        batch_size=experiment.batch_size,
        seed=experiment.seeds[0],
        out=out,
        resume=resume,
        device=place,
        heldout=data.batch(0, experiment.heldout, split="heldout"),
        input_norm="one" if experiment.normalize else "none",
        log_every=max(1, experiment.steps // 100),
        checkpoint_every=max(1, experiment.steps // 5),
        progress=progress,
    )
    measure = Measurement(data, experiment)
    labels = [cell for cell in cells for _ in experiment.seeds]
    measured: list[dict[str, Any]] = []
    bar = bars.show(len(saes), what="measuring", unit="SAEs", enabled=progress)
    for cell, config, sae in zip(labels, configs, saes, strict=True):
        about = {"name": config.name, "label": cell.label, "group": cell.group, "l": cell.l, "seed": config.seed}
        measured.append(about | {"config": config.to_dict()} | measure(sae))
        bar.update(len(measured))
    bar.close()
    results = {
        "preset": preset,
        "data": {"config": experiment.data.to_dict(), **data.statistics()},
        "train": {name: getattr(experiment, name) for name in ("steps", "batch_size", "samples", "normalize")},
        "seed": experiment.seeds[0],
        "device": str(place),
        "versions": versions(),
        "git_commit": git_commit(),
        "saes": measured,
    }
    write_file(out / "results.json", "synthetic", results)
    return results


def open_data(config: SyntheticConfig | SynthSAEBenchConfig, device: torch.device) -> SyntheticData | SynthSAEBench:
    """The data of a configuration."""
    return SyntheticData(config, device) if isinstance(config, SyntheticConfig) else SynthSAEBench(config, device)


def require_packages() -> None:
    """Refuse to start without a package that is needed at the end."""
    for name in ("scipy", "plotly"):
        require_package(name, "experiments")


def show(results: dict[str, Any], out: Path) -> None:
    """Write the page, print the tables and the page's path."""
    from sampled_sae.reporting.synthetic import print_results, write_page

    page = write_page(out)
    print_results(results)
    print(f"\nFigures and all settings: {page}")


class Measurement:
    """Measures SAEs against the features that the data is really made of."""

    def __init__(self, data: SyntheticData | SynthSAEBench, experiment: Experiment):
        self.data, self.batch_size = data, experiment.batch_size
        n = min(experiment.heldout, experiment.samples or experiment.heldout)
        self.train = data.batch(0, n) if experiment.samples is None else data.fixed(experiment.samples)
        # Not the samples that the threshold was calibrated on: those are batch 0.
        self.heldout = data.batch(1, experiment.heldout, split="heldout")
        self.dictionary, self.bucket, self.p = data.dictionary.cpu(), data.bucket.cpu(), data.p.cpu()

    def __call__(self, sae: SAE) -> dict[str, Any]:
        """All numbers of one SAE, JSON-ready."""
        numbers, frequency = self.firing(sae)
        return numbers | self.matched(sae.W_dec.detach().cpu(), frequency)

    def firing(self, sae: SAE) -> tuple[dict[str, Any], Tensor]:
        """The numbers that need the SAE, and how often each latent fires at the threshold, [d_sae] on the CPU."""
        trained = as_trained(sae, self.heldout, self.batch_size)
        inference = by_threshold(sae, self.heldout)
        average = None if sae.threshold_ema.isnan() else by_threshold(sae, self.heldout, sae.threshold_ema)
        return {
            "fve_train": as_trained(sae, self.train, self.batch_size).fve,
            "fve_heldout": trained.fve,
            "fve_heldout_threshold": inference.fve,
            "l0_threshold": inference.l0,
            "fve_heldout_ema": average and average.fve,
            "l0_ema": average and average.l0,
            "dead": float((trained.frequency == 0).double().mean()),
            "ever_pooled": sae.cfg.metadata["training"]["ever_pooled"],
            "seconds": sae.cfg.metadata["training"]["seconds"],
        } | self._detection(sae), inference.frequency.cpu()

    def matched(self, decoder: Tensor, frequency: Tensor) -> dict[str, Any]:
        """The numbers of the matching of decoder rows [d_sae, d_in] to the true features; on the CPU alone."""
        matching = match(decoder, self.dictionary)
        return {
            "recovery": bucket_recovery(matching.similarity, self.bucket, self.data.names),
            "mcc": float(matching.similarity[matching.latent >= 0].mean()),
            "fidelity": activation_fidelity(frequency, self.p, matching),
        }

    def _detection(self, sae: SAE) -> dict[str, float]:
        """SynthSAEBench's other measures, with the training-time selection."""
        if isinstance(self.data, SyntheticData) or sae.cfg.training is None:
            return {}
        found, generator = Detection(sae.W_dec, self.data.dictionary), torch.Generator(sae.device).manual_seed(0)
        # The parts are smaller than the batches that the selection is made over.
        codes = SparseCodes.cat([part for _, part in self.data.parts(1, len(self.heldout), "heldout")])
        for x, own in zip(self.heldout.split(self.batch_size), codes.split(self.batch_size), strict=True):
            found.add(training_time_codes(sae, x, sae.cfg.training, generator), own.dense() > 0)
        return found.result()


def merge(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Merge the results of several runs of one experiment, of other seeds or machines, into `out`."""
    require_packages()
    if not folders:
        raise UserError("folders: must name at least one folder with a results.json")
    from sampled_sae.reporting.synthetic import load_results

    parts = [load_results(folder / "results.json") for folder in folders]
    for folder, part in zip(folders, parts, strict=True):
        if "train" not in part or "config" not in part.get("data", {}):
            raise UserError(f"{folder / 'results.json'}: not a result of the synthetic experiment")
    origins: list[dict[str, Any]] = []
    for part in parts:
        origin = {key: part.get(key) for key in ("device", "versions", "git_commit")}
        if origin not in origins:
            origins.append(origin)
    merged = parts[0] | {"saes": [sae for part in parts for sae in part["saes"]], "origins": origins}
    for folder, part in zip(folders, parts, strict=True):
        difference = first_difference(merged["data"]["config"], part["data"]["config"], "data.config")
        difference = difference or first_difference(merged["train"], part["train"], "train")
        if difference:
            raise UserError(f"{folder / 'results.json'}: not the same experiment: {difference}")
    names = [sae["name"] for sae in merged["saes"]]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{out}: {twice[0]} is in more than one of the runs")
    make_folder(out)
    logs = [folder / "log.jsonl" for folder in folders]
    write_text(
        out / "log.jsonl", "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs if log.exists())
    )
    write_file(out / "results.json", "synthetic", merged)
    return merged
