"""What an explainer is shown of a latent, and the windows on which a judge is then tried.

Windows that are judged in the balanced scores never overlap one that the explainer saw; in SAEBench's detection they
may, because its weighted draws are not kept apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from sampled_sae.evals.autointerp.schema import LEAST, AutointerpConfig, Kind
from sampled_sae.evals.reading import Firings, Streams, collect_firings, counted_positions
from sampled_sae.hooks import Where
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError

TOO_FEW = "too few firings"
NO_SILENT = "no silent windows"
NO_APART = "too few firings apart from those shown"


class Window(NamedTuple):
    """A stretch of text with the activation of one latent at each token."""

    context: int  # number of the context
    centre: int  # position in the context of the token in the middle
    tokens: list[int]
    activations: list[float]  # the latent's activation at each of them


class Item(NamedTuple):
    """One window of a trial."""

    window: Window  # the text, with the latent's activations
    marks: list[bool] | None  # marked tokens; None if the judge sees no marks
    right: bool  # whether the judge should name it: it counts as firing, or its marks are where the latent fires


class Trial(NamedTuple):
    """Windows in random order, some of which the judge should name."""

    kind: Kind  # detection as in SAEBench, the balanced one with checked negatives, or fuzzing
    items: list[Item]
    expected: int  # number of right windows by the protocol, whatever the latent does


class Case(NamedTuple):
    """One latent with all that is needed to explain it and to try the explanation."""

    latent: int
    cut: float  # A token counts as firing in a window if its activation is above this
    shown: list[Window]  # what the explainer sees, the largest activation first
    elsewhere: Tensor
    """[f] int64: flat positions of its firings above the cut, in what is shown or outside every judged window."""
    strength: Tensor  # [f] float32: its activations there
    trials: list[Trial]  # input of the judge; a score that cannot be measured is missing
    missing: dict[Kind, str]  # why it is
    random_that_fire: int  # of SAEBench's random windows, those in which it does fire


def build_case(contexts: Tensor, firings: Firings, latent: int, settings: AutointerpConfig) -> Case | str:
    """Contexts [n, L] and where the latent fires in them -> its case, or why there is none."""
    generator = latent_generator(settings.seed, latent)
    buffer, dense = settings.buffer, firings.dense(latent)
    most_top = settings.shown_top + settings.scored_top
    most_weighted = settings.shown_weighted + settings.scored_weighted
    top = top_places(firings, latent, most_top, buffer)
    if len(top) < most_top:
        return TOO_FEW
    cut = settings.mark_above * float(cut_out(dense, top, buffer).max())
    below = float(dense[top[:, 0], top[:, 1]].min())
    weighted = drawn_places(firings, latent, most_weighted, buffer, generator, below=below)
    if len(weighted) < most_weighted:
        return TOO_FEW
    top = top[torch.randperm(len(top), generator=generator)]
    shown = torch.cat((top[: settings.shown_top], weighted[: settings.shown_weighted]))
    chosen = torch.cat((top[settings.shown_top :], weighted[settings.shown_weighted :]))
    anywhere = random_places(firings.shape, settings.scored_random, buffer, generator)
    draws = _Draws(contexts, dense, buffer, cut, shown, generator)
    silent = draws.unmarked(anywhere, False)
    trials = [draws.trial("detection", draws.unmarked(chosen) + silent, len(chosen))]
    missing: dict[Kind, str] = {}
    judged = [chosen, anywhere]
    # Firing windows that overlap neither each other nor what is shown, by weighted draws.
    places, value = inner_firings(firings, latent, buffer)
    places, value = places[value > cut], value[value > cut]
    most = max(settings.balanced_each, 2 * settings.fuzzing_each)
    positives = apart(places[drawn_order(value, 2.0, generator)], most, 2 * buffer, avoid=shown)
    kinds: dict[Kind, tuple[Callable[[Tensor, int], tuple[Trial | str, Tensor]], int]] = {
        "balanced": (draws.balanced, settings.balanced_each),
        "fuzzing": (draws.fuzzing, settings.fuzzing_each),
    }
    for kind, (draw, each) in kinds.items():
        if not each:
            continue
        trial, places = draw(positives, each)
        if isinstance(trial, str):
            missing[kind] = trial
        else:
            trials.append(trial)
            judged.append(places)
    return Case(
        latent,
        cut,
        sorted(windows_at(contexts, dense, shown, buffer), key=lambda window: -max(window.activations)),
        *_elsewhere(firings, latent, cut, torch.cat(judged), shown, buffer),
        trials,
        missing,
        sum(max(item.window.activations) > cut for item in silent),
    )


def score_trial(trial: Trial, named: Sequence[bool]) -> float:
    """Share of windows judged correctly in detection, balanced accuracy in the other kinds."""
    right = [item.right for item in trial.items]
    hits = [name == truth for name, truth in zip(named, right, strict=True)]
    groups = [hits]
    if trial.kind != "detection":
        groups = [[hit for hit, one in zip(hits, right, strict=True) if one is truth] for truth in (True, False)]
    return sum(sum(group) / len(group) for group in groups) / len(groups)


def _elsewhere(
    firings: Firings, latent: int, cut: float, judged: Tensor, shown: Tensor, buffer: int
) -> tuple[Tensor, Tensor]:
    flat, value = firings.of(latent)
    length = firings.shape[1]

    def inside(places: Tensor) -> Tensor:
        """Which of the firings [f] are in the windows around places [k, 2]."""
        return torch.isin(flat, (places[:, :1] * length + places[:, 1:] + torch.arange(-buffer, buffer + 1)).flatten())

    kept = (value > cut) & (inside(shown) | ~inside(judged))
    return flat[kept], value[kept]


class _Draws:
    """Makes the trials of one latent."""

    def __init__(self, contexts: Tensor, dense: Tensor, buffer: int, cut: float, shown: Tensor, generator: Generator):
        self.contexts, self.dense, self.buffer, self.cut, self.generator = contexts, dense, buffer, cut, generator
        self.shown = shown

    def trial(self, kind: Kind, items: list[Item], expected: int) -> Trial:
        order = torch.randperm(len(items), generator=self.generator).tolist()
        return Trial(kind, [items[number] for number in order], expected)

    def unmarked(self, places: Tensor, right: bool | None = None) -> list[Item]:
        """Windows, right or not as given; by default those that fire above the cut are right."""
        windows = windows_at(self.contexts, self.dense, places, self.buffer)
        return [Item(one, None, max(one.activations) > self.cut if right is None else right) for one in windows]

    def balanced(self, positives: Tensor, each: int) -> tuple[Trial | str, Tensor]:
        """As many firing windows as silent ones, and their places; or why there are too few."""
        positives = positives[:each]
        if len(positives) < LEAST:
            return NO_APART, positives
        negatives = silent_places(self.dense, len(positives), self.buffer, self.generator, self.shown)
        if len(negatives) < LEAST:
            return NO_SILENT, negatives
        positives = positives[: len(negatives)]
        items = self.unmarked(positives) + self.unmarked(negatives, False)
        return self.trial("balanced", items, len(positives)), torch.cat((positives, negatives))

    def fuzzing(self, positives: Tensor, each: int) -> tuple[Trial | str, Tensor]:
        """Firing windows, half of them with as many other tokens marked instead, and their places."""
        windows = windows_at(self.contexts, self.dense, positives, self.buffer)
        marks = [[value > self.cut for value in window.activations] for window in windows]
        # Where most tokens fire, there is no room for as many wrong marks.
        room = [number for number, marked in enumerate(marks) if 2 * sum(marked) <= len(marked)]
        half = min(each, len(room) // 2)
        if half < LEAST:
            return NO_APART if len(positives) < 2 * LEAST else NO_SILENT, positives
        items = [Item(windows[number], marks[number], True) for number in room[:half]]
        items += [Item(windows[number], self._wrong(marks[number]), False) for number in room[half : 2 * half]]
        return self.trial("fuzzing", items, half), positives[torch.tensor(room[: 2 * half])]

    def _wrong(self, marked: list[bool]) -> list[bool]:
        """As many marks, at tokens that do not fire."""
        free = (~torch.tensor(marked)).nonzero()[:, 0]
        chosen = free[torch.randperm(len(free), generator=self.generator)[: sum(marked)]].tolist()
        return [place in chosen for place in range(len(marked))]


# ---- windows -------------------------------------------------------------------------------------------
# A place is a context and a position in it, so far from the context's ends that the window around it is whole.


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


def silent_places(dense: Tensor, k: int, buffer: int, generator: Generator, avoid: Tensor | None = None) -> Tensor:
    """Places [<= k, 2] drawn from those in whose windows the latent, dense [n, L], fires at no token, and which overlap
    no window around a place to avoid."""
    if avoid is not None:
        dense = dense.clone()
        dense[avoid[:, :1], avoid[:, 1:] + torch.arange(-buffer, buffer + 1)] = 1.0
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
