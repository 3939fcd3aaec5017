"""Comparison of SAEs pair by pair, with the features unique to one of two, and its files.

A unique feature is a latent that no latent of another SAE resembles, in direction and meaning together. Meanings are
known of explained latents only, and each SAE has its own draw of them: the equal of a latent is mostly unexplained. A
latent with an equal direction among all latents of the other SAE is not unique.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.config import plain, write_file
from sampled_sae.evals.reading import Steps
from sampled_sae.evals.results import Explanation
from sampled_sae.evals.similarity.matching import Directions, blocks, nearest
from sampled_sae.evals.similarity.members import Member, Pair, Plan, SimilarityConfig, Skipped, plan, top_features
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
)
from sampled_sae.models.embedder import Embedder
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import write_text
from sampled_sae.utils.measures import csv_text
from sampled_sae.utils.system import git_commit, versions

PAIR_COLUMNS = (
    *("kind", "a", "b", "group_a", "group_b", "mmcs_a_to_b", "mmcs_b_to_a", "mmcs_mean", "random_mean"),
    *("live_a_to_b", "live_b_to_a", "live_mean", "live_random_mean", "matched", "matched_shared", "matched_gap"),
)
UNIQUE_COLUMNS = (
    *("of", "against", "latent", "explanation", "score", "match", "match_explanation", "match_score"),
    *("overall", "decoder", "text", "nearest", "explained", "have_equal"),
)


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
    table = []
    for n in order[: settings.unique]:
        latent, other = a.latent[n], b.latent[int(match[n])]
        cosines = (float(overall[n]), float(decoder[n]), float(2 * overall[n] - decoder[n]), float(closest[n]))
        own, its = a.explained[latent], b.explained[other]
        table.append(Unique(latent, own.text, own.score, other, its.text, its.score, *cosines))
    mean, equals = float(overall.double().mean()), len(alone) - len(order)
    return UniqueFeatures(of, against, len(a.rows), len(b.rows), a.left_out + b.left_out, mean, equals, table)


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
            "saes": [self._member(member, labels[member.name]) for member in self.members],
            "reference": self.plan.reference,
            "seeds": plain(self.seeds),
            "scores": plain(self.scores),
            "pairs": [
                {"kind": pair.kind, "a": pair.a.name, "b": pair.b.name}
                | {"group_a": pair.group_a, "group_b": pair.group_b}
                | plain(compared)
                | {"unique": plain(unique)}
                for pair, compared, unique in self.pairs
            ],
            "histogram_edges": EDGES,
            "skipped": plain(self.skipped),
            "settings": plain(self.settings),
        }

    def _member(self, member: Member, label: str) -> dict[str, Any]:
        mask, top = member.live.mask, top_features(member.explained, self.settings.unique)
        return {
            "name": member.name,
            "group": label,
            "seed": member.seed,
            "latents": member.latents,
            "width": member.width,
            "live": None if mask is None else int(mask.sum()),
            "live_source": member.live.source,
            "zero_rows": self.zeros.get(member.name),
            "explained": len(member.explained),
            "top_features": [{"latent": latent, "score": e.score, "explanation": e.text} for latent, e in top],
        }


@torch.no_grad()
def compare_saes(
    members: Sequence[Member],
    settings: SimilarityConfig | None = None,
    embedder: Callable[[], Embedder] | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare SAEs of one width, pair by pair.

    `embedder` opens the model that embeds explanations; it is called only if two configurations have some. Where it
    ends with a UserError, everything else is measured, and unique features are skipped.
    """
    settings = settings or SimilarityConfig()
    planned = plan(members, settings)
    vectors, without = _embedded(planned.pairs, embedder)
    skipped = [*planned.skipped, *without]
    held: dict[str, Dictionary] = {}
    zeros: dict[str, int] = {}
    results = []
    steps = Steps(progress, len(planned.pairs))
    steps.add(0)
    for pair in planned.pairs:
        both = (pair.a, pair.b)
        # The decoders of the pair at hand are held, and no others.
        held = {member.name: held[member.name] for member in both if member.name in held}
        for member in both:
            if member.name not in held:
                held[member.name] = dictionary(member, device)
                zeros[member.name] = member.latents - len(held[member.name].directions.latent)
        compared = compare_pair(held[pair.a.name], held[pair.b.name], settings)
        results.append(PairResult(pair, compared, _unique(pair, held, vectors, settings)))
        skipped += [Skipped("live", member.name, why) for member in both if (why := held[member.name].not_live)]
        if compared.matching_missing is not None:
            skipped.append(Skipped("matching", f"{pair.a.name} and {pair.b.name}", compared.matching_missing))
        steps.add(1)
    facts = [(item.pair, item.compared) for item in results]
    taking_part = {member.name for group in planned.groups for member in group.members}
    return Comparison(
        [member for member in members if member.name in taking_part],
        planned,
        zeros,
        results,
        across_seeds(planned.groups, facts),
        across_scores(planned.groups, facts),
        list(dict.fromkeys(skipped)),
        settings,
    )


def _embedded(
    pairs: Sequence[Pair], embedder: Callable[[], Embedder] | None
) -> tuple[dict[str, Tensor], list[Skipped]]:
    """Embeddings [n, e] of the explanations that are compared, in the order of their latents, by SAE; and why not.

    All of them at the start: a model that is missing must not be noticed after hours.
    """
    across = [(pair.a, pair.b) for pair in pairs if pair.kind == "scores"]
    compared = {member.name: member for both in across for member in both}
    if compared and embedder is None:
        return {}, [Skipped("explanations", f"{len(compared)} SAEs", "no embedder was given")]
    why = "no evals/explanations.json there, so no unique features"
    skipped = [Skipped("explanations", name, why) for name, member in compared.items() if not member.explained]
    explained = {member.name: member.explained for a, b in across if a.explained and b.explained for member in (a, b)}
    if embedder is None or not explained:
        return {}, skipped
    try:
        model = embedder()
    except UserError as error:
        why = f"no unique features without an embedder (--embedder): {error}"
        return {}, [*skipped, *(Skipped("explanations", name, why) for name in explained)]
    return {
        name: model.embed([texts[latent].text for latent in sorted(texts)]).cpu() for name, texts in explained.items()
    }, skipped


def _unique(
    pair: Pair, held: dict[str, Dictionary], vectors: dict[str, Tensor], settings: SimilarityConfig
) -> list[UniqueFeatures]:
    """What a has and b lacks, and the other way round."""
    if pair.kind != "scores" or pair.a.name not in vectors or pair.b.name not in vectors:
        return []
    (a, own), (b, its) = (
        (held[one.name].directions, meanings(held[one.name].directions, one.explained, vectors[one.name]))
        for one in (pair.a, pair.b)
    )
    found = (
        unique_features(own, its, b.rows, pair.a.name, pair.b.name, settings),
        unique_features(its, own, a.rows, pair.b.name, pair.a.name, settings),
    )
    return [item for item in found if item is not None]


def write_comparison(content: dict[str, Any], embedder: str, out: Path) -> None:
    """Write a comparison as compare.json with all numbers and histograms, pairs.csv and unique.csv."""
    origin = {"versions": versions(), "git_commit": git_commit(), "embedder": embedder}
    write_file(out / "compare.json", "comparison", content | origin)
    write_text(out / "pairs.csv", csv_text(PAIR_COLUMNS, map(_pair_row, content["pairs"])))
    unique = [
        [item["of"], item["against"], *(row[name] for name in UNIQUE_COLUMNS[2:-2]), item["latents"], item["equals"]]
        for pair in content["pairs"]
        for item in pair["unique"]
        for row in item["table"]
    ]
    write_text(out / "unique.csv", csv_text(UNIQUE_COLUMNS, unique))


def _pair_row(pair: dict[str, Any]) -> list[Any]:
    """A pair as a row of pairs.csv; empty where there is no number."""
    row = [pair[name] for name in PAIR_COLUMNS[:5]]
    for both in (pair["all"], pair["live"]):
        row += [both["a_to_b"]["mmcs"], both["b_to_a"]["mmcs"], both["mean"], both["random"]] if both else [None] * 4
    return row + [(pair["matching"] or {}).get(name) for name in ("mean", "shared", "gap")]
