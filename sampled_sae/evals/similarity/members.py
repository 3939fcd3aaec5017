"""SAEs of a comparison, its settings, and the pairs to compare."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from safetensors import safe_open
from torch import Tensor

from sampled_sae.config import Bound, Config, Count, NonNegative, Positive
from sampled_sae.evals.results import WEIGHTS, Explanation, Liveness, find_saes, load_live, names_of, read_explanations
from sampled_sae.formats import describe, is_sae, load
from sampled_sae.formats.saelens import read_own, verify
from sampled_sae.formats.tensors import safetensors_shapes
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.presets import spec
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.measures import shown

ORIGIN = ("model_name", "hook_name", "layer", "text", "context_size", "prepend_bos", "skip_first")
"""Metadata about the activations, equal for the seeds of one configuration."""
TRAINING = ("steps", "batch_size", "input_norm")
UNKNOWN = Liveness(None, "not known which latents fire")


@dataclass(frozen=True, slots=True)
class SimilarityConfig(Config):
    """What is compared, and how exactly."""

    across: Literal["all", "reference", "none"] = "all"
    """Pairs of different configurations: all, those with the reference (as in the paper), or none."""
    seeds: Literal["same", "different"] = "same"
    """Seeds of two configurations to compare: the same seed, whose SAEs share initial weights and look similar for
    that reason, or different seeds."""
    reference: str | None = None
    """Label of the reference configuration. Default: batchtopk if there is one, else the first."""
    threshold: Annotated[float, Bound("must be a cosine between -1 and 1", lambda value: -1 <= value <= 1)] = 0.7
    """Smallest cosine at which two latents count as the same feature; a latent with such a partner is not unique."""
    latents: Literal["live", "all"] = "live"
    """Latents whose MMCS is shown: live latents, if firing counts are known for every SAE, or all latents.
    compare.json contains both."""
    matching: Literal["all", "live", "none"] = "all"
    """One-to-one matching of all latents, of live latents, or none."""
    exact_up_to: Count = 8192
    """Largest number of latents per SAE for an exact matching; a larger matching starts from the best candidates."""
    candidates: Positive = 32
    """Number of best candidates per latent, from both SAEs, with which a large matching starts."""
    rounds: Positive = 3
    """Maximum number of times that a large matching adds candidates to come closer to the exact one."""
    tolerance: NonNegative = 1e-4
    """Mean cosine per pair by which a large matching may stay below its upper bound."""
    unique: Count = 10
    """Latents in each table: the most unique ones, and those explained best."""
    at_once: Positive = 2**26
    """Number of cosines in memory at a time (4 bytes each); does not affect the results except for rounding."""


@dataclass(frozen=True)
class Member:
    """One SAE of a comparison; its weights are read only while they are compared."""

    name: str  # its folder, or another name that no other member has
    latents: int
    width: int
    decoder: Callable[[], Tensor]  # reads the decoder's rows [m, d]
    configuration: dict[str, Any] = field(default_factory=dict)
    """All that decides the outcome but the seed, flat; empty for an SAE without them."""
    kind: str | None = None  # short name of the configuration
    seed: int | None = None  # seed of the start values
    data_seed: int | None = None  # seed of the order of the data
    live: Liveness = UNKNOWN  # which latents fire
    explained: dict[int, Explanation] = field(default_factory=dict)


def open_members(folders: Iterable[Path | str]) -> list[Member]:
    """The SAEs of these folders, or of the runs there, each once, in order, under unique names."""
    found = list(dict.fromkeys(folder.resolve() for folder in find_saes([Path(folder) for folder in folders])))
    return [open_member(folder, name) for folder, name in zip(found, names_of(found), strict=True)]


def open_member(folder: Path, name: str | None = None) -> Member:
    """A saved SAE, with what evaluations have left in its folder; any SAELens folder with a decoder will do."""
    if not (folder / WEIGHTS).exists() and is_sae(folder):
        cfg = describe(folder)
        return _member(folder, name, cfg.d_sae, cfg.d_in, lambda: load(folder).tensors["W_dec"], {})
    path = folder / WEIGHTS
    shape = safetensors_shapes(path).get("W_dec")
    if shape is None or len(shape) != 2:
        raise UserError(f"{path}: W_dec has shape {shape}: must be [latents, width]")

    def decoder() -> Tensor:
        with safe_open(path, "pt") as file:
            rows: Tensor = file.get_tensor("W_dec")
        return rows

    own = read_own(folder)
    verify(folder, own, WEIGHTS)
    facts = described(own.config, own.metadata) if own is not None else described(None, {})
    return _member(folder, name, *shape, decoder, facts)


def _member(
    folder: Path, name: str | None, latents: int, width: int, decoder: Callable[[], Tensor], facts: dict[str, Any]
) -> Member:
    facts |= {"live": load_live(folder, latents), "explained": read_explanations(folder, latents)}
    return Member(name or folder.name, latents, width, decoder, **facts)


def top_features(explained: dict[int, Explanation], count: int = 10) -> list[tuple[int, Explanation]]:
    """The latents of the best scores with their explanations, best first; those without a score are left out."""
    scored = [(latent, item) for latent, item in explained.items() if item.score is not None]
    return sorted(scored, key=lambda pair: (-(pair[1].score or 0.0), pair[0]))[:count]


def described(config: SAEConfig | None, metadata: dict[str, Any]) -> dict[str, Any]:
    """What groups SAEs: everything but seeds and names, and the seeds apart."""
    if config is None:
        return {}
    plain = config.to_dict()
    seed = plain.pop("seed")
    plain.pop("name")
    training = metadata.get("training") or {}
    origin = {name: metadata.get(name) for name in ORIGIN} | {name: training.get(name) for name in TRAINING}
    facts = {"configuration": flat(plain) | origin, "kind": spec(config)}
    return facts | {"seed": seed, "data_seed": training.get("seed")}


def flat(plain: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    found: dict[str, Any] = {}
    for name, value in plain.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


class Group(NamedTuple):
    """One configuration, in one or more seeds."""

    label: str  # short, and no other group's; `sampled:score=l2,l=5`, with `k=64` after it where that is not unique
    members: list[Member]  # in the order given


class Pair(NamedTuple):
    """Two SAEs to compare."""

    kind: Literal["seeds", "scores"]  # seeds of one configuration, or two configurations
    a: Member
    b: Member
    group_a: str
    group_b: str


class Skipped(NamedTuple):
    """A requested measurement that was not possible."""

    what: str  # seeds, scores, live, matching or explanations
    who: str  # the SAE, group or pair
    reason: str  # why


class Plan(NamedTuple):
    """What a comparison will do."""

    groups: list[Group]  # in the order of their first members; of SAEs of the same seeds only the first
    reference: str | None  # label of the group that others are compared with; none for a single group
    pairs: list[Pair]  # where one of the two is of the reference, it is b
    skipped: list[Skipped]


def plan(members: Sequence[Member], settings: SimilarityConfig) -> Plan:
    """Seeds within each configuration, then the configurations with each other."""
    _check(members)
    skipped: list[Skipped] = []
    groups = [_distinct(one, skipped) for one in group(members)]
    reference = _reference(groups, settings.reference)
    pairs = [Pair("seeds", a, b, one.label, one.label) for one in groups for a, b in combinations(one.members, 2)]
    for first, second in combinations(groups, 2):
        if settings.across == "all" or (settings.across == "reference" and reference in (first.label, second.label)):
            ordered = (second, first) if first.label == reference else (first, second)
            pairs += _between(*ordered, settings.seeds, skipped)
    if not pairs:
        why = "; ".join(f"{item.who}: {item.reason}" for item in skipped) or f"across = {settings.across!r}"
        raise UserError(f"no two of these {len(members)} SAEs are to be compared: {why}")
    return Plan(groups, reference, pairs, skipped)


def group(members: Sequence[Member]) -> list[Group]:
    """SAEs that differ in their seeds alone, together; one without training settings stays alone."""
    found: dict[str, list[Member]] = {}
    for member in members:
        key = json.dumps(member.configuration, sort_keys=True, default=str)
        found.setdefault(key if member.configuration else f"alone: {member.name}", []).append(member)
    first = [each[0] for each in found.values()]
    labels = distinct_labels([member.kind or member.name for member in first], [one.configuration for one in first])
    return [Group(label, each) for label, each in zip(labels, found.values(), strict=True)]


def distinct_labels(labels: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Labels of configurations; where two are the same, with the settings (flat) that differ, or else a number."""
    found = []
    for label, own in zip(labels, settings, strict=True):
        same = [other for name, other in zip(labels, settings, strict=True) if name == label]
        differing = [name for name in own if any(other.get(name) != own[name] for other in same)]
        found.append(" ".join([label, *(_brief(name, own[name]) for name in differing)]))
    numbers = [found[: number + 1].count(text) for number, text in enumerate(found)]
    return [text if number == 1 else f"{text} ({number})" for text, number in zip(found, numbers, strict=True)]


def _brief(name: str, value: Any) -> str:
    """A setting in a label: without its group, and without the folder of a path."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return shown(f"{name.rsplit('.', 1)[-1]}={Path(text).name or text}")


def _reference(groups: list[Group], asked: str | None) -> str | None:
    labels = [one.label for one in groups]
    if asked not in (None, *labels):
        raise UserError(f"reference = {asked!r}: must be one of {', '.join(labels)}")
    if asked is not None or len(groups) == 1:
        return asked
    return next((text for text in labels if text.split()[0] == "batchtopk"), labels[0])


def _distinct(one: Group, skipped: list[Skipped]) -> Group:
    """The group with each seed once: a copy would count its pairs twice and make their spread too small."""
    first: dict[tuple[int | None, int | None], Member] = {}
    for member in one.members:
        known = first.setdefault((member.seed, member.data_seed), member)
        if known is not member:
            why = f"both are {one.label} with seed {member.seed}: only the first is compared"
            skipped.append(Skipped("seeds", f"{known.name} and {member.name}", why))
    return Group(one.label, list(first.values()))


def _between(first: Group, second: Group, seeds: str, skipped: list[Skipped]) -> list[Pair]:
    """The same seeds of both, or different ones; where there are none of these, the others."""
    every = [(a, b) for a in first.members for b in second.members]
    asked = [(a, b) for a, b in every if (a.seed == b.seed) == (seeds == "same")]
    if not asked:
        others = "different" if seeds == "same" else "the same"
        who = f"{first.label} and {second.label}"
        skipped.append(Skipped("scores", who, f"seeds = {seeds!r}: there are none, so that {others} were compared"))
    return [Pair("scores", a, b, first.label, second.label) for a, b in asked or every]


def _check(members: Sequence[Member]) -> None:
    if len(members) < 2:
        named = f"only {members[0].name!r}" if members else "none"
        raise UserError(f"folders: {named}: a comparison needs two SAEs at least")
    names = [member.name for member in members]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"members: two are called {twice[0]!r}; names must be unique")
    first = members[0]
    for member in members:
        if member.width != first.width:
            raise UserError(
                f"{member.name} has width {member.width} and {first.name} has width {first.width}: "
                "only SAEs of the same activations can be compared"
            )
