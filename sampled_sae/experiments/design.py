"""The design of a study: settings, methods, stages and claims, declared in a JSON file; how long each part takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from sampled_sae.config import Bound, Config, Count, Distinct, NotEmpty, Positive, PositiveNumber, require
from sampled_sae.method.config import NAME, usable_as_folder
from sampled_sae.method.presets import parse_methods
from sampled_sae.reporting.claims import Claim
from sampled_sae.reporting.study import NO_LEADERS, Row, Run, best_factor, leading
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import read_json
from sampled_sae.utils.progress import say

Measure = Literal["rate", "select", "core", "absorption", "probing", "finalists", "similarity", "slices"]
"""rate: the trainer's own FVU on the selection text; select, core: the core evaluation on the selection and on the
report text; finalists: probing on further datasets; similarity: decoders beside those of another seed and of the base;
slices: some latents are kept in a file, for automated interpretability elsewhere."""
LEADERS = "@leaders"  # among a stage's methods: those that the earlier stages put first


NAMES = Bound(f"each name {NAME}", lambda named: all(map(usable_as_folder, named)))


@dataclass(frozen=True, slots=True)
class Setting(Config):
    """Activations and sizes that methods are compared at."""

    model: str
    layer: Count
    d_sae: Positive
    k: Positive
    context: Positive = 512
    recipe: Literal["default", "paper"] = "default"
    """paper: one learning rate of 3e-4, gradients clipped, all tokens kept, threshold by moving average."""
    tokens: Positive | None = None
    """Tokens of training; those of the study when unset."""
    high_norm_factor: PositiveNumber = 10.0
    """Tokens whose norm is above so many times the median are left out of training and of FVU; not with recipe
    paper."""


@dataclass(frozen=True, slots=True)
class Method(Config):
    """A method, as on the command line."""

    spec: str
    role: Literal["baseline", "paper", "variant", "reference"] = "variant"
    """baseline: the goal is to be better than these; reference: shown beside the others, neither a baseline nor a
    leader."""
    rate_of: str | None = None
    """Another method whose best learning rate this one uses; its own when unset."""
    cost: PositiveNumber = 1.0
    """Training time as a multiple of BatchTopK's, for estimates."""


@dataclass(frozen=True, slots=True)
class Stage(Config):
    """Methods that are trained in some settings."""

    name: str
    settings: Annotated[tuple[str, ...], NotEmpty, Distinct]
    methods: Annotated[tuple[str, ...], NotEmpty, Distinct]
    seeds: Annotated[tuple[Count, ...], NotEmpty, Distinct]
    factors: Annotated[tuple[PositiveNumber, ...], Distinct] = ()
    """Factors of the default learning rate; none: the best one of each method."""
    measure: Annotated[tuple[Measure, ...], NotEmpty, Distinct] = ("select", "core")
    tokens: Positive | None = None
    """Tokens of training; those of the study when unset. Only for stages whose measure is rate."""


@dataclass(frozen=True, slots=True)
class Study(Config):
    """A whole design."""

    tokens: Positive
    """Tokens of training."""
    batch_size: Positive
    settings: Annotated[dict[str, Setting], NAMES]
    methods: Annotated[dict[str, Method], NAMES]
    stages: tuple[Stage, ...]
    claims: tuple[Claim, ...] = ()
    """What is to be tested."""
    needed: dict[str, Literal["most"]] = field(default_factory=dict)
    """Hypotheses that hold if most of their claims do, not all."""

    def check(self) -> None:
        for stage in self.stages:
            of_stage = f"stage {stage.name!r}"
            for kind, names, known in (
                ("settings", stage.settings, [*self.settings]),
                ("methods", stage.methods, [*self.methods, LEADERS]),
            ):
                for name in names:
                    require(name in known, f"{of_stage}, {kind}", name, f"must be among {', '.join(known)}")
            if stage.tokens is not None:
                require(stage.measure == ("rate",), f"{of_stage}, tokens", stage.tokens, "measure must be rate alone")
        for name, method in self.methods.items():
            try:
                parse_methods([method.spec], d_sae=64, k=1)
            except UserError as error:
                raise UserError(f"methods.{name}.spec: {error}") from None
            if method.rate_of is not None:
                right = f"must be among {', '.join(self.methods)}"
                require(method.rate_of in self.methods, f"methods.{name}.rate_of", method.rate_of, right)

    def tokens_of(self, setting: str, stage: Stage | None = None) -> int:
        """Tokens that an SAE is trained on."""
        own = None if stage is None else stage.tokens
        return own or self.settings[setting].tokens or self.tokens


def load_study(path: Path) -> Study:
    """Read a design; an error names the entry."""
    return Study.from_dict(read_json(path), path)


def runs_of(study: Study, stage: Stage, rows: Sequence[Row]) -> list[Run]:
    """The SAEs of a stage; best learning rates and leaders follow from the results so far."""
    names = [name for name in stage.methods if name != LEADERS]
    if LEADERS in stage.methods:
        names += [name for name in leading(rows, {n: m.role for n, m in study.methods.items()}) if name not in names]
    found, models = [], {name: setting.model for name, setting in study.settings.items()}
    for setting in stage.settings:
        for name in names:
            factors = stage.factors or (best_factor(rows, setting, name, models, study.methods[name].rate_of),)
            found += [Run(setting, name, factor, seed) for factor in factors for seed in stage.seeds]
    return found


# ---- time ----------------------------------------------------------------------------------------------

FIXED: dict[str, float] = {"probing": 14.0, "finalists": 90.0}
"""Seconds of a measure for any number of SAEs: texts are read and tokenized."""
EACH: dict[str, float] = {
    "rate": 0.0,
    "select": 1.6,
    "core": 2.1,
    "absorption": 0.7,
    "probing": 1.2,
    "finalists": 6.0,
    "similarity": 1.0,
    "slices": 0.3,
}
"""Seconds of a measure for one SAE of 65,536 latents."""
PREPARED: dict[str, float] = {"harvest": 17.0, "absorption": 20.0}
"""Seconds per layer: 25M tokens through the model; the words of absorption."""


def at_once(measure: Measure) -> int:
    """SAEs that are trained before they are measured together: few, which a kill would lose, unless reading texts for a
    group takes long."""
    return 24 if measure in FIXED else 4


def train_seconds(d_sae: int, tokens: int, cost: float = 1.0) -> float:
    """Seconds to train one SAE: 15 for 65,536 latents and 5 for 16,384, on 25M tokens."""
    return cost * (1.67 + 13.33 * d_sae / 65_536) * tokens / 25e6


def measure_seconds(measure: str, d_sae: int, saes: int) -> float:
    """Seconds to measure some SAEs."""
    return (FIXED.get(measure, 0.0) + saes * EACH[measure] * max(0.45, d_sae / 65_536)) if saes else 0.0


class Planned(NamedTuple):
    """What a stage will take."""

    stage: str
    saes: int  # that are trained
    training: float  # minutes of their training on an H200
    whole: float  # minutes with harvest and measures


def plan(study: Study, rows: Sequence[Row] = ()) -> list[Planned]:
    """What each stage still trains, and the estimated minutes on an H200, if nothing is left in memory from before.

    Without results, three leaders are assumed, which were measured wherever an earlier stage measured other methods
    than baselines.
    """
    found, done = [], {(row.run, row.measure) for row in rows}
    for stage in study.stages:
        saes, training, measuring = 0, 0.0, 0.0
        for setting, runs in _by_setting(runs_of(study, stage, rows) if rows else _assumed(study, stage)).items():
            again = not rows and bool(stage.factors)  # no best rate is known yet that could be among them
            missing = {m: [run for run in runs if again or (run, m) not in done] for m in stage.measure}
            left = [run for run in runs if any(run in some for some in missing.values())]
            if not left:
                continue
            d_sae, tokens = study.settings[setting].d_sae, study.tokens_of(setting, stage)
            costs = [study.methods[run.method].cost if run.method in study.methods else 1.0 for run in left]
            training += sum(train_seconds(d_sae, tokens, cost) for cost in costs)
            measuring += sum(measure_seconds(m, d_sae, len(some)) for m, some in missing.items())
            measuring += sum(seconds for m, seconds in PREPARED.items() if m in ("harvest", *stage.measure))
            saes += len(left)
            done |= {(run, m) for run in runs for m in stage.measure}
            if any(study.methods[run.method].role not in NO_LEADERS for run in runs if run.method in study.methods):
                done |= {(run, m) for run in _leaders(setting, stage) for m in stage.measure}
        found.append(Planned(stage.name, saes, training / 60, (training + measuring) / 60))
    return found


def _by_setting(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    return groups


def _assumed(study: Study, stage: Stage) -> list[Run]:
    """The SAEs of a stage before there are results."""
    runs = runs_of(study, stage, ())
    return runs + [run for setting in stage.settings if LEADERS in stage.methods for run in _leaders(setting, stage)]


def _leaders(setting: str, stage: Stage) -> list[Run]:
    """Three methods that are not known yet."""
    factors = stage.factors or (1.0,)
    return [Run(setting, f"{LEADERS} {i}", factor, s) for i in range(3) for factor in factors for s in stage.seeds]


class Budget:
    """Seconds that are left, and estimates by kind of work. Each part is announced, and its time printed after it."""

    def __init__(self, until: float | None = None):
        """`until`: seconds from now on after which nothing begins; None: no limit."""
        self.begun = time.monotonic()
        self.until = until
        self.ratios: dict[str, float] = {}

    def seconds(self, kind: str, guess: float) -> float:
        """What such work will take, by what the last of its kind took."""
        return guess * self.ratios.get(kind, 1.0)

    @property
    def spent(self) -> float:
        return time.monotonic() - self.begun

    def allows(self, seconds: float) -> bool:
        """Whether work of so many seconds would end in time."""
        return self.until is None or self.spent + seconds <= self.until

    @contextmanager
    def timed(self, kind: str, what: str, guess: float) -> Iterator[None]:
        """Announce a part, print what it took, and remember it for its kind."""
        expected, begun = self.seconds(kind, guess), time.monotonic()
        say(f"{self.spent:7.1f} s  {what}: about {expected:.1f} s")
        yield
        took = time.monotonic() - begun
        if guess > 0:
            self.ratios[kind] = took / guess
        say(f"{self.spent:7.1f} s  {what}: took {took:.1f} s")
