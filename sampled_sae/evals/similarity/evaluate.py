"""SAEs compared with each other: across seeds of one configuration, across configurations, and what each has alone.

`compare_saes` reads two decoders at a time and streams their cosines in blocks. What it needs beside the weights (which
latents fire, what they stand for) was found by other evaluations; where it is missing, that part is skipped and said
so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sampled_sae.errors import UserError
from sampled_sae.evals.similarity.config import SimilarityConfig
from sampled_sae.evals.similarity.groups import Pair, Plan, Skipped, plan
from sampled_sae.evals.similarity.members import EXPLANATIONS, Member, top_features
from sampled_sae.evals.similarity.pair import EDGES, Compared, Dictionary, compare_pair, dictionary, not_live
from sampled_sae.evals.similarity.summary import SeedAgreement, Table, across_scores, across_seeds
from sampled_sae.evals.similarity.unique import UniqueFeatures, meanings, unique_features
from sampled_sae.evals.to_json import plain


class Embeds(Protocol):
    """Turns texts into unit vectors [n, e]."""

    def embed(self, texts: Sequence[str]) -> Tensor: ...


class PairResult(NamedTuple):
    """Two SAEs."""

    pair: Pair
    """Which two, and why."""
    compared: Compared
    """By their decoders."""
    unique: list[UniqueFeatures]
    """By decoders and explanations: latents of a that b lacks, and of b that a lacks; empty if not measured."""


class Comparison(NamedTuple):
    """Everything that was found out about some SAEs."""

    members: list[Member]
    plan: Plan
    zeros: dict[str, int]
    """Latents without a direction by SAE."""
    pairs: list[PairResult]
    seeds: list[SeedAgreement]
    """One for each configuration of several seeds."""
    scores: dict[str, Table]
    """MMCS from each configuration to each other: over `all` latents, over `live` ones, and for `random` ones."""
    skipped: list[Skipped]
    """What could not be measured."""
    settings: SimilarityConfig

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        labels = {member.name: group.label for group in self.plan.groups for member in group.members}
        return {
            "saes": [_member(member, labels[member.name], self.zeros, self.settings) for member in self.members],
            "reference": self.plan.reference,
            "seeds": plain(self.seeds),
            "scores": plain(self.scores),
            "pairs": [_pair(item) for item in self.pairs],
            "histogram_edges": EDGES,
            "skipped": plain(self.skipped),
            "settings": plain(self.settings),
        }


@torch.no_grad()
def compare_saes(
    members: Sequence[Member],
    settings: SimilarityConfig | None = None,
    embedder: Callable[[], Embeds] | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare SAEs of one width, pair by pair.

    `embedder` opens the model that embeds explanations; it is called only if two configurations have some. Where it
    ends with a UserError, everything else is measured, and unique features are skipped.
    """
    settings = settings or SimilarityConfig()
    planned = plan(members, settings)
    held, (vectors, without) = _Held(device), _embedded(planned, embedder)
    skipped = [*planned.skipped, *_unexplained(planned, embedder), *without]
    results = []
    tell = progress or (lambda done, total: None)
    tell(0, len(planned.pairs))
    for number, pair in enumerate(planned.pairs):
        first, second = held.get(pair.a, pair.b)
        compared = compare_pair(pair.a, pair.b, first, second, settings)
        unique = _unique(pair, first, second, vectors, settings)
        results.append(PairResult(pair, compared, unique))
        skipped += _missing(pair, first, second, compared)
        tell(number + 1, len(planned.pairs))
    facts = [(item.pair, item.compared) for item in results]
    taking_part = {member.name for one in planned.groups for member in one.members}
    return Comparison(
        [member for member in members if member.name in taking_part],
        planned,
        held.zeros,
        results,
        across_seeds(planned.groups, facts),
        across_scores(planned.groups, facts),
        list(dict.fromkeys(skipped)),
        settings,
    )


class _Held:
    """The decoders of the pair at hand, and no others."""

    def __init__(self, device: torch.device | str):
        self.device = device
        self.now: dict[str, Dictionary] = {}
        self.zeros: dict[str, int] = {}

    def get(self, *members: Member) -> list[Dictionary]:
        names = {member.name for member in members}
        self.now = {name: held for name, held in self.now.items() if name in names}
        for member in members:
            if member.name not in self.now:
                self.now[member.name] = dictionary(member, self.device)
                self.zeros[member.name] = self.now[member.name].zeros
        return [self.now[member.name] for member in members]


def _embedded(planned: Plan, embedder: Callable[[], Embeds] | None) -> tuple[dict[str, Tensor], list[Skipped]]:
    """Embeddings [n, e] of the explanations that are compared, in the order of their latents, by SAE; or why not.

    All of them at the start: a model that is missing must not be noticed after hours.
    """
    explained = [pair for pair in planned.pairs if pair.kind == "scores" and pair.a.explained and pair.b.explained]
    if embedder is None or not explained:
        return {}, []
    asked = {member.name: member for pair in explained for member in (pair.a, pair.b)}
    try:
        model = embedder()
    except UserError as error:
        why = f"no unique features without an embedder (--embedder): {error}"
        return {}, [Skipped("explanations", name, why) for name in asked]
    return {
        name: model.embed([member.explained[latent].text for latent in sorted(member.explained)]).cpu()
        for name, member in asked.items()
    }, []


def _unique(
    pair: Pair, first: Dictionary, second: Dictionary, vectors: dict[str, Tensor], settings: SimilarityConfig
) -> list[UniqueFeatures]:
    """What a has and b lacks, and the other way round."""
    names = (pair.a.name, pair.b.name)
    if pair.kind != "scores" or not pair.a.explained or not pair.b.explained or not vectors:
        return []
    a, b = (
        meanings(own.directions, member.explained, vectors[member.name])
        for member, own in ((pair.a, first), (pair.b, second))
    )
    found = (
        unique_features(a, b, second.directions.rows, *names, settings),
        unique_features(b, a, first.directions.rows, *names[::-1], settings),
    )
    return [item for item in found if item is not None]


def _unexplained(planned: Plan, embedder: Callable[[], Embeds] | None) -> list[Skipped]:
    """The SAEs whose latents nobody explained, as far as they are compared across configurations."""
    asked = {member.name: member for pair in planned.pairs if pair.kind == "scores" for member in (pair.a, pair.b)}
    if asked and embedder is None:
        return [Skipped("explanations", f"{len(asked)} SAEs", "no embedder was given")]
    return [
        Skipped("explanations", member.name, f"no {EXPLANATIONS} there, so no unique features")
        for member in asked.values()
        if not member.explained
    ]


def _missing(pair: Pair, first: Dictionary, second: Dictionary, compared: Compared) -> list[Skipped]:
    own = ((pair.a, first), (pair.b, second))
    found = [Skipped("live", member.name, why) for member, held in own if (why := not_live(member, held))]
    if compared.matching_missing is not None:
        found.append(Skipped("matching", f"{pair.a.name} and {pair.b.name}", compared.matching_missing))
    return found


# ---- to JSON -------------------------------------------------------------------------------------------


def _member(member: Member, label: str, zeros: dict[str, int], settings: SimilarityConfig) -> dict[str, Any]:
    mask = member.live.mask
    top = top_features(member.explained, settings.unique)
    return {
        "name": member.name,
        "group": label,
        "seed": member.seed,
        "latents": member.latents,
        "width": member.width,
        "live": None if mask is None else int(mask.sum()),
        "live_source": member.live.source,
        "zero_rows": zeros.get(member.name),
        "explained": len(member.explained),
        "top_features": [{"latent": latent, "score": e.score, "explanation": e.text} for latent, e in top],
    }


def _pair(item: PairResult) -> dict[str, Any]:
    pair = item.pair
    names = {"kind": pair.kind, "a": pair.a.name, "b": pair.b.name, "group_a": pair.group_a, "group_b": pair.group_b}
    compared: dict[str, Any] = plain(item.compared)
    return names | compared | {"unique": plain(item.unique)}
