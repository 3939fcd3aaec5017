"""Which SAEs are seeds of one configuration, and which pairs of them are compared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple

from sampled_sae.errors import UserError
from sampled_sae.evals.similarity.config import Seeds, SimilarityConfig
from sampled_sae.evals.similarity.members import Member, key_of

Kind = Literal["seeds", "scores"]


class Group(NamedTuple):
    """One configuration, in one or more seeds."""

    label: str
    """Short, and no other group's; `l2-l5`, or `l2-l5 k=64` where it takes more to tell them apart."""
    members: list[Member]
    """In the order given."""


class Pair(NamedTuple):
    """Two SAEs to compare."""

    kind: Kind
    """Seeds of one configuration, or two configurations."""
    a: Member
    b: Member
    group_a: str
    group_b: str


class Skipped(NamedTuple):
    """Something that was asked for and could not be measured."""

    what: str
    """seeds, scores, live, matching or explanations."""
    who: str
    """The SAE, group or pair."""
    reason: str
    """Why."""


class Plan(NamedTuple):
    """What a comparison will do."""

    groups: list[Group]
    """In the order of their first members; of SAEs of the same seeds only the first."""
    reference: str | None
    """Label of the group that others are compared with; none for a single group."""
    pairs: list[Pair]
    """Where one of the two is of the reference, it is b."""
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
    """SAEs that differ in their seeds alone, together; one that does not say how it was trained stays alone."""
    found: dict[str, list[Member]] = {}
    for member in members:
        key = key_of(member.configuration) if member.configuration else f"alone: {member.name}"
        found.setdefault(key, []).append(member)
    return [Group(label, each) for label, each in zip(_labels(list(found.values())), found.values(), strict=True)]


def _labels(groups: list[list[Member]]) -> list[str]:
    """Names of the configurations; where two are the same, with the settings that differ."""
    kinds = [members[0].kind or members[0].name for members in groups]
    labels = []
    for kind, members in zip(kinds, groups, strict=True):
        same = [other[0].configuration for name, other in zip(kinds, groups, strict=True) if name == kind]
        own = members[0].configuration
        differing = [name for name in own if any(other.get(name) != own[name] for other in same)]
        labels.append(" ".join([kind, *(f"{name.rsplit('.', 1)[-1]}={_short(own[name])}" for name in differing)]))
    taken: dict[str, int] = {}
    for number, text in enumerate(labels):
        taken[text] = taken.get(text, 0) + 1
        labels[number] = text if taken[text] == 1 else f"{text} ({taken[text]})"
    return labels


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.rsplit("/", 1)[-1]


def _reference(groups: list[Group], asked: str | None) -> str | None:
    labels = [one.label for one in groups]
    if asked is not None:
        if asked not in labels:
            raise UserError(f"reference = {asked!r}: must be one of {', '.join(labels)}")
        return asked
    if len(groups) == 1:
        return None
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


def _between(first: Group, second: Group, seeds: Seeds, skipped: list[Skipped]) -> list[Pair]:
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
        raise UserError(f"members: two are called {twice[0]!r}; must have names that tell them apart")
    first = members[0]
    for member in members:
        if member.width != first.width:
            raise UserError(
                f"{member.name} has width {member.width} and {first.name} has width {first.width}: "
                "only SAEs of the same activations can be compared"
            )
