"""What an explainer is shown of a latent, and the windows on which a judge is then tried.

Windows that are judged in the balanced scores never overlap one that the explainer saw; in SAEBench's detection they
may, because its weighted draws are not kept apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.evals.autointerp.schema import LEAST, AutointerpConfig, Kind
from sampled_sae.evals.autointerp.windows import (
    Window,
    apart,
    cut_out,
    drawn_order,
    drawn_places,
    inner_firings,
    latent_generator,
    random_places,
    silent_places,
    top_places,
    windows_at,
)
from sampled_sae.evals.reading import Firings

TOO_FEW = "too few firings"
NO_SILENT = "no silent windows"
NO_APART = "too few firings apart from those shown"


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
    draws = _Draws(contexts, dense, buffer, cut, generator)
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

    def __init__(self, contexts: Tensor, dense: Tensor, buffer: int, cut: float, generator: torch.Generator):
        self.contexts, self.dense, self.buffer, self.cut, self.generator = contexts, dense, buffer, cut, generator

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
        negatives = silent_places(self.dense, len(positives), self.buffer, self.generator)
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
