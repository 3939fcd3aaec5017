"""Features unique to one SAE: latents that no latent of another SAE resembles, in direction and meaning together.

Meanings are known of explained latents only, and each SAE has its own draw of them: the equal of a latent is mostly
among those that nobody explained. Whoever has an equal direction among all latents of the other SAE is not unique.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.similarity.config import SimilarityConfig
from sampled_sae.evals.similarity.members import Explained
from sampled_sae.evals.similarity.stream import Directions, blocks, nearest


class Meanings(NamedTuple):
    """An SAE's explained latents that have a direction."""

    rows: Tensor
    """[n, d] unit decoder rows."""
    vectors: Tensor
    """[n, e] unit embeddings of the explanations, on the same device."""
    latent: list[int]
    """[n]: which latents they are."""
    explained: dict[int, Explained]
    """What each stands for."""
    left_out: int
    """Explained latents without a direction: their decoder rows are zeros."""


class Unique(NamedTuple):
    """A latent and the one of the other SAE that comes nearest to it."""

    latent: int
    explanation: str
    score: float | None
    """The latent's interpretability score."""
    match: int
    """The other SAE's latent."""
    match_explanation: str
    match_score: float | None
    overall: float
    """(decoder + text) / 2, which the match has the largest of."""
    decoder: float
    """Cosine of the decoder rows."""
    text: float
    """Cosine of the embedded explanations."""
    nearest: float
    """Largest cosine of the decoder row with any latent of the other SAE, explained or not."""


class UniqueFeatures(NamedTuple):
    """The latents of one SAE that another one lacks."""

    of: str
    """Whose latents these are."""
    against: str
    """Among whose latents they have no equal."""
    latents: int
    """Explained latents that were looked at."""
    others: int
    """Explained latents of the other SAE."""
    left_out: int
    """Explained latents of both that have no direction."""
    mean: float
    """Mean over the latents of their best match's overall similarity."""
    equals: int
    """Latents that are not unique: some latent of the other SAE, explained or not, has a decoder cosine at the
    threshold or above."""
    table: list[Unique]
    """Of the others those of the lowest best match, lowest first."""


def meanings(directions: Directions, explained: dict[int, Explained], vectors: Tensor) -> Meanings:
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
