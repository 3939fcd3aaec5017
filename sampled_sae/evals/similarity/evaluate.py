"""Features unique to one SAE: latents that no latent of another SAE resembles, in direction and meaning together.

Meanings are known of explained latents only, and each SAE has its own draw of them: the equal of a latent is mostly
unexplained. A latent with an equal direction among all latents of the other SAE is not unique.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sampled_sae.config import plain
from sampled_sae.evals.reading import Steps
from sampled_sae.evals.results import Explanation
from sampled_sae.evals.similarity.cosines import Directions, blocks, nearest
from sampled_sae.evals.similarity.members import (
    Member,
    Pair,
    Plan,
    SimilarityConfig,
    Skipped,
    plan,
    top_features,
)
from sampled_sae.evals.similarity.pair import (
    EDGES,
    Compared,
    Dictionary,
    SeedAgreement,
    Table,
    across_scores,
    across_seeds,
    compare_pair,
    dictionary,
    not_live,
)
from sampled_sae.utils.errors import UserError


class Meanings(NamedTuple):
    """An SAE's explained latents that have a direction."""

    rows: Tensor  # [n, d] unit decoder rows
    vectors: Tensor  # [n, e] unit embeddings of the explanations, on the same device
    latent: list[int]  # [n]: which latents they are
    explained: dict[int, Explanation]  # what each stands for
    left_out: int  # explained latents without a direction: their decoder rows are zeros


class Unique(NamedTuple):
    """A latent and the one of the other SAE that comes nearest to it."""

    latent: int
    explanation: str
    score: float | None  # the latent's interpretability score
    match: int  # the other SAE's latent
    match_explanation: str
    match_score: float | None
    overall: float  # (decoder + text) / 2, which the match has the largest of
    decoder: float  # cosine of the decoder rows
    text: float  # cosine of the embedded explanations
    nearest: float  # largest cosine of the decoder row with any latent of the other SAE, explained or not


class UniqueFeatures(NamedTuple):
    """The latents of one SAE that another one lacks."""

    of: str  # whose latents these are
    against: str  # among whose latents they have no equal
    latents: int  # explained latents that were looked at
    others: int  # explained latents of the other SAE
    left_out: int  # explained latents of both that have no direction
    mean: float  # mean over the latents of their best match's overall similarity
    equals: int
    """Latents that are not unique: some latent of the other SAE, explained or not, has a decoder cosine at the
    threshold or above."""
    table: list[Unique]  # of the others those of the lowest best match, lowest first


def meanings(directions: Directions, explained: dict[int, Explanation], vectors: Tensor) -> Meanings:
    """Decoder rows and the embeddings [n, e] of the n explanations, in the order of their latents, put together."""
    order = sorted(explained)
    place = {latent: number for number, latent in enumerate(directions.latent.tolist())}
    kept = [(number, latent) for number, latent in enumerate(order) if latent in place]
    device = directions.rows.device
    rows = directions.rows[torch.tensor([place[latent] for _, latent in kept], dtype=torch.long, device=device)]
    chosen = torch.tensor([number for number, _ in kept], dtype=torch.long, device=vectors.device)
    latents = [latent for _, latent in kept]
    return Meanings(rows, vectors[chosen].to(rows), latents, explained, len(order) - len(kept))


def best_matches(a: Meanings, b: Meanings, at_once: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each latent of a: the number of its best match in b [n], their overall similarity and decoder cosine [n]."""
    n = len(a.rows)
    match, overall, decoder = torch.empty(n, dtype=torch.long), torch.empty(n), torch.empty(n)
    # Two blocks are held at a time.
    pieces = zip(blocks(a.rows, b.rows, at_once // 2), blocks(a.vectors, b.vectors, at_once // 2), strict=True)
    for (first, cosine), (_, text) in pieces:
        both = text.add_(cosine).max(dim=1)
        part = slice(first, first + len(cosine))
        match[part], overall[part] = both.indices.cpu(), both.values.cpu() / 2
        decoder[part] = cosine.gather(1, both.indices[:, None])[:, 0].cpu()
    return match, overall, decoder


def unique_features(
    a: Meanings, b: Meanings, every: Tensor, of: str, against: str, settings: SimilarityConfig
) -> UniqueFeatures | None:
    """The latents of a whose best match in b is the weakest, and that have no equal among `every` unit row [m, d] of b.

    None where one of the two has no explained latents.
    """
    if not len(a.rows) or not len(b.rows):
        return None
    match, overall, decoder = best_matches(a, b, settings.at_once)
    # The match is one of them: rounding must not put it above the nearest.
    closest = torch.maximum(nearest(a.rows, every, settings.at_once)[0].cpu(), decoder)
    alone = closest < settings.threshold
    order = [number for number in overall.sort(stable=True).indices.tolist() if alone[number]]
    table = [_entry(a, b, n, int(match[n]), overall[n], decoder[n], closest[n]) for n in order[: settings.unique]]
    mean, equals = float(overall.double().mean()), len(alone) - len(order)
    return UniqueFeatures(of, against, len(a.rows), len(b.rows), a.left_out + b.left_out, mean, equals, table)


def _entry(
    a: Meanings, b: Meanings, number: int, match: int, overall: Tensor, decoder: Tensor, closest: Tensor
) -> Unique:
    latent, other = a.latent[number], b.latent[match]
    own, its = a.explained[latent], b.explained[other]
    cosines = (float(overall), float(decoder), float(2 * overall - decoder), float(closest))
    return Unique(latent, own.text, own.score, other, its.text, its.score, *cosines)


class Embeds(Protocol):
    """Turns texts into unit vectors [n, e]."""

    def embed(self, texts: Sequence[str]) -> Tensor: ...


class PairResult(NamedTuple):
    """Two SAEs."""

    pair: Pair  # which two, and why
    compared: Compared  # by their decoders
    unique: list[UniqueFeatures]
    """By decoders and explanations: latents of a that b lacks, and of b that a lacks; empty if not measured."""


class Comparison(NamedTuple):
    """All results of a comparison."""

    members: list[Member]
    plan: Plan
    zeros: dict[str, int]  # latents without a direction by SAE
    pairs: list[PairResult]
    seeds: list[SeedAgreement]  # one for each configuration of several seeds
    scores: dict[str, Table]
    """MMCS from each configuration to each other: over `all` latents, over `live` ones, and for `random` ones."""
    skipped: list[Skipped]  # what could not be measured
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
    steps = Steps(progress, len(planned.pairs))
    steps.add(0)
    for pair in planned.pairs:
        first, second = held.get(pair.a, pair.b)
        compared = compare_pair(pair.a, pair.b, first, second, settings)
        unique = _unique(pair, first, second, vectors, settings)
        results.append(PairResult(pair, compared, unique))
        skipped += _missing(pair, first, second, compared)
        steps.add(1)
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
    """SAEs without explanations, as far as they are compared across configurations."""
    asked = {member.name: member for pair in planned.pairs if pair.kind == "scores" for member in (pair.a, pair.b)}
    if asked and embedder is None:
        return [Skipped("explanations", f"{len(asked)} SAEs", "no embedder was given")]
    return [
        Skipped("explanations", member.name, "no evals/explanations.json there, so no unique features")
        for member in asked.values()
        if not member.explained
    ]


def _missing(pair: Pair, first: Dictionary, second: Dictionary, compared: Compared) -> list[Skipped]:
    own = ((pair.a, first), (pair.b, second))
    found = [Skipped("live", member.name, why) for member, held in own if (why := not_live(member, held))]
    if compared.matching_missing is not None:
        found.append(Skipped("matching", f"{pair.a.name} and {pair.b.name}", compared.matching_missing))
    return found


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
