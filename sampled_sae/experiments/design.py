"""The design of a study: settings, methods, stages and claims, declared in a JSON file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from sampled_sae.config import Config, Count, Distinct, NotEmpty, Positive, PositiveNumber
from sampled_sae.method.presets import parse_methods
from sampled_sae.reporting.study import Claim, Row, Run, best_factor, leading
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import read_json

Measure = Literal["select", "core", "absorption", "probing", "finalists"]
LEADERS = "@leaders"  # among a stage's methods: those that the earlier stages put first


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


@dataclass(frozen=True, slots=True)
class Method(Config):
    """A method, as on the command line."""

    spec: str
    role: Literal["baseline", "paper", "variant"] = "variant"
    rate_of: str | None = None
    """Another method whose best learning rate this one uses; its own when unset."""


@dataclass(frozen=True, slots=True)
class Stage(Config):
    """Methods that are trained in some settings."""

    name: str
    settings: Annotated[tuple[str, ...], NotEmpty, Distinct]
    methods: Annotated[tuple[str, ...], NotEmpty, Distinct]
    seeds: Annotated[tuple[Count, ...], NotEmpty, Distinct]
    factors: Annotated[tuple[PositiveNumber, ...], Distinct] = ()
    """Factors of the default learning rate; none: the best one of each method."""
    measure: tuple[Measure, ...] = ("select", "core")


class Study(NamedTuple):
    """A whole design."""

    tokens: int  # of training
    batch_size: int
    settings: dict[str, Setting]
    methods: dict[str, Method]
    stages: list[Stage]
    claims: list[Claim]  # what is to be tested


def load_study(path: Path) -> Study:
    """Read a design; an error names the entry."""
    plain = read_json(path)
    try:
        settings = {name: Setting.from_dict(value, path) for name, value in plain["settings"].items()}
        methods = {name: Method.from_dict(value, path) for name, value in plain["methods"].items()}
        stages = [Stage.from_dict(value, path) for value in plain["stages"]]
        claims = [Claim(**claim) for claim in plain.get("claims", [])]
        study = Study(int(plain["tokens"]), int(plain["batch_size"]), settings, methods, stages, claims)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        right = "must be an object with tokens, batch_size, settings, methods and stages"
        raise UserError(f"{path}: {right} ({error})") from None
    for stage in stages:
        for kind, names, known in (("settings", stage.settings, settings), ("methods", stage.methods, methods)):
            if unknown := [name for name in names if name not in known and name != LEADERS]:
                raise UserError(
                    f"{path}: stage {stage.name!r}, {kind} = {unknown[0]!r}: must be among {', '.join(known)}"
                )
    for method in methods.values():
        parse_methods([method.spec], d_sae=64, k=1)
        if method.rate_of is not None and method.rate_of not in methods:
            raise UserError(f"{path}: rate_of = {method.rate_of!r}: must be among {', '.join(methods)}")
    return study


def runs_of(study: Study, stage: Stage, rows: Sequence[Row]) -> list[Run]:
    """The SAEs of a stage; best learning rates and leaders follow from the results so far."""
    names = [name for name in stage.methods if name != LEADERS]
    if LEADERS in stage.methods:
        names += [name for name in leading(rows, {n: m.role for n, m in study.methods.items()}) if name not in names]
    found = []
    for setting in stage.settings:
        for name in names:
            tuned = study.methods[name].rate_of or name
            factors = stage.factors or (
                best_factor(rows, setting, study.settings[setting].model, tuned, _model(study)),
            )
            found += [Run(setting, name, factor, seed) for factor in factors for seed in stage.seeds]
    return found


def _model(study: Study) -> Callable[[str], str]:
    return lambda setting: study.settings[setting].model


def plan(study: Study) -> list[tuple[str, int, float]]:
    """For each stage the SAEs that it trains, and the estimated minutes of their training on an H200.

    Three leaders are assumed, which were trained wherever an earlier stage trained other methods than baselines.
    """
    found, known = [], set()
    for stage in study.stages:
        saes, seconds = 0, 0.0
        for setting in stage.settings:
            new = 0
            for seed in stage.seeds:
                for name in stage.methods:
                    place = (setting, seed, name)
                    if stage.factors or place not in known:
                        new += (3 if name == LEADERS else 1) * max(1, len(stage.factors))
            # 15 s for 65,536 latents and 5 s for 16,384, on 25M tokens.
            seconds += new * (1.67 + 13.33 * study.settings[setting].d_sae / 65_536) * study.tokens / 25e6
            saes += new
        for name in stage.methods:
            roles = {LEADERS} if name != LEADERS and study.methods[name].role != "baseline" else set()
            known |= {
                (setting, seed, it) for setting in stage.settings for seed in stage.seeds for it in {name, *roles}
            }
        found.append((stage.name, saes, seconds / 60))
    return found
