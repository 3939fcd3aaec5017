"""Windows of text around firing tokens: of the largest activations, weighted draws, random ones, and silent ones.

`find_examples` gives top and random examples of given latents, each token with its activation. The functions below it
pick places for one latent at a time out of its `Firings`; a place is a context and a position in it, and it is always
so far from the context's ends that the window around it is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from sampled_sae.evals.reading import Firings, Streams, collect_firings, counted_positions
from sampled_sae.hooks import Where
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError


class Window(NamedTuple):
    """A stretch of text with the activation of one latent at each token."""

    context: int  # number of the context
    centre: int  # position in the context of the token in the middle
    tokens: list[int]
    activations: list[float]  # the latent's activation at each of them


class Examples(NamedTuple):
    """What one latent fires on."""

    latent: int
    fired: int  # counted tokens at which it fires; with 0 there are no windows
    maximum: float  # its largest activation
    top: list[Window]  # windows around the largest activations, the largest first; no two overlap at their centres
    random: list[Window]  # windows around tokens drawn from all at which it fires


def find_examples(
    sae: SAE,
    model: LanguageModel,
    layer: Where,
    contexts: Tensor,
    latents: Sequence[int],
    *,
    top: int = 20,
    random: int = 20,
    buffer: int = 10,
    skip_first: int = 0,
    left_out: Sequence[int] = (),
    norm_factor: float = 10.0,
    contexts_at_once: int = 16,
    seed: int = 0,
) -> dict[int, Examples]:
    """One reading of contexts [n, L] -> examples of each of the latents."""
    check_latents(latents, sae.d_sae)
    check_buffer(buffer, contexts)
    contexts = contexts.long().cpu()
    counted = counted_positions(contexts, skip_first, left_out)
    streams = Streams(model, layer, contexts, counted, norm_factor=norm_factor, at_once=contexts_at_once, keep_gib=0.0)
    [firings] = collect_firings([sae], streams, [latents])
    found = {}
    for latent in latents:
        dense = firings.dense(latent)
        best = top_places(firings, latent, top, buffer)
        some = drawn_places(firings, latent, random, buffer, latent_generator(seed, latent), power=0.0)
        maximum = float(dense.max())
        cut = [windows_at(contexts, dense, places, buffer) for places in (best, some)]
        found[latent] = Examples(latent, firings.count(latent), maximum, *cut)
    return found


def check_latents(latents: Sequence[int], m: int) -> None:
    """Refuse latents that an SAE of m latents does not have."""
    wrong = [latent for latent in latents if not 0 <= latent < m]
    if wrong:
        raise UserError(f"latents = {wrong[0]}: the SAE has {m} latents, 0 to {m - 1}")


def check_buffer(buffer: int, contexts: Tensor) -> None:
    """Refuse windows that do not fit into the contexts."""
    if 2 * buffer + 1 > contexts.shape[1]:
        raise UserError(
            f"buffer = {buffer}: a window has {2 * buffer + 1} tokens, but a context only {contexts.shape[1]}"
        )


def latent_generator(seed: int, latent: int) -> Generator:
    """Draws of one latent, the same whatever other latents are looked at."""
    return Generator().manual_seed((seed * 1_000_003 + latent) % 2**63)


def inner_firings(firings: Firings, latent: int, buffer: int) -> tuple[Tensor, Tensor]:
    """Firings that can be the centre of a window: places [f, 2] and activations [f]."""
    flat, value = firings.of(latent)
    length = firings.shape[1]
    places = torch.stack((flat // length, flat % length), dim=1)
    inside = (places[:, 1] >= buffer) & (places[:, 1] < length - buffer)
    return places[inside], value[inside]


def top_places(firings: Firings, latent: int, k: int, buffer: int) -> Tensor:
    """Places [<= k, 2] of the largest activations, the largest first; none is inside another's window."""
    places, value = inner_firings(firings, latent, buffer)
    order = value.argsort(descending=True, stable=True)
    return apart(places[order], k, buffer)


def drawn_places(
    firings: Firings, latent: int, k: int, buffer: int, generator: Generator, power: float = 2, below: float = torch.inf
) -> Tensor:
    """Places [<= k, 2] drawn without replacement, with chances as the activation to the `power`.

    Activations of at least `below` are not drawn.
    """
    places, value = inner_firings(firings, latent, buffer)
    places, value = places[value < below], value[value < below]
    return places[drawn_order(value, power, generator)[:k]]


def drawn_order(value: Tensor, power: float, generator: Generator) -> Tensor:
    """The order [f] in which items would be drawn one after the other, with chances as value^power."""
    # Efraimidis and Spirakis: the largest of log(u) / weight come first.
    chance = torch.rand(len(value), generator=generator, dtype=torch.float64).clamp_min(1e-300)
    # Only ratios count; the largest weight of 1 keeps the others from overflowing.
    weight = (value.double() / value.double().max().clamp_min(1e-300)).pow(power) if len(value) else value.double()
    return (chance.log() / weight.clamp_min(1e-300)).argsort(descending=True, stable=True)


def random_places(shape: tuple[int, int], k: int, buffer: int, generator: Generator) -> Tensor:
    """Places [k, 2] anywhere in a text of n contexts of L tokens."""
    n, length = shape
    context = torch.randint(n, (k,), generator=generator)
    return torch.stack((context, torch.randint(buffer, length - buffer, (k,), generator=generator)), dim=1)


def silent_places(dense: Tensor, k: int, buffer: int, generator: Generator) -> Tensor:
    """Places [<= k, 2] drawn from those in whose windows the latent, dense [n, L], fires at no token."""
    tried = random_places((dense.shape[0], dense.shape[1]), 16 * k, buffer, generator).unique(dim=0)
    tried = tried[torch.randperm(len(tried), generator=generator)]
    silent = tried[~(cut_out(dense, tried, buffer) > 0).any(1)]
    if len(silent) >= k:
        return silent[:k]
    # It fires nearly everywhere: look at all windows.
    fires = torch.nn.functional.max_pool1d((dense > 0).float()[:, None], 2 * buffer + 1, stride=1).squeeze(1)
    everywhere = (fires == 0).nonzero() + torch.tensor([0, buffer])
    return everywhere[torch.randperm(len(everywhere), generator=generator)[:k]]


def apart(places: Tensor, k: int, distance: int, avoid: Tensor | None = None) -> Tensor:
    """The first places [<= k, 2] that are more than `distance` tokens away from one another and from those to avoid."""
    taken: dict[int, list[int]] = {}
    for context, position in [] if avoid is None else avoid.tolist():
        taken.setdefault(context, []).append(position)
    chosen: list[list[int]] = []
    # In blocks: of a dense latent's many places only the first few are needed.
    for context, position in (place for block in places.split(1024) for place in block.tolist()):
        if len(chosen) == k:
            break
        near = taken.setdefault(context, [])
        if all(abs(position - other) > distance for other in near):
            near.append(position)
            chosen.append([context, position])
    return torch.tensor(chosen, dtype=torch.int64).view(-1, 2)


def cut_out(values: Tensor, places: Tensor, buffer: int) -> Tensor:
    """What is around places [k, 2] of values [n, L]: [k, 2 buffer + 1]."""
    return values[places[:, :1], places[:, 1:] + torch.arange(-buffer, buffer + 1)]


def windows_at(contexts: Tensor, dense: Tensor, places: Tensor, buffer: int) -> list[Window]:
    """Windows around places [k, 2] of contexts [n, L], with activations out of dense [n, L]."""
    tokens, activations = cut_out(contexts, places, buffer).tolist(), cut_out(dense, places, buffer).tolist()
    return [
        Window(context, centre, ids, values)
        for (context, centre), ids, values in zip(places.tolist(), tokens, activations, strict=True)
    ]
