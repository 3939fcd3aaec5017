"""What a model holds of each word: the residual stream at its token, in one pass for all layers and SAEs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sampled_sae.data.layers import LanguageModel
from sampled_sae.evals.absorption.words import Prompt, Prompts

Progress = Callable[[int, int], None]
"""Is told how much is done, of how much."""


class Readings(NamedTuple):
    """Words and what one layer of the model holds at them."""

    x: Tensor
    """The residual stream at the word's token, [n, d] float32."""
    letters: Tensor
    """First letters, [n] int64, 0 to 25."""
    words: list[str]
    """The words themselves."""


class LayerReadings(NamedTuple):
    """One layer's readings of all prompts."""

    train: Readings
    """Words that probes are fitted on."""
    test: Readings
    """Words that test them."""
    measured: Readings
    """Test words on which absorption is measured: `test` itself, or the same words in fresh prompts."""
    test_rows: Tensor
    """Where each measured word is in `test`, [n_measured] int64."""


def read_layers(
    model: LanguageModel, prompts: Prompts, layers: Sequence[int], at_once: int, progress: Progress
) -> dict[int, LayerReadings]:
    """Every prompt once through the model, up to the last of the layers; `progress` counts prompts."""
    everything = [*prompts.train, *prompts.test, *prompts.fresh]
    streams = _read(model, everything, layers, at_once, progress)
    first, second = len(prompts.train), len(prompts.train) + len(prompts.test)
    place = {prompt.word.token: row for row, prompt in enumerate(prompts.test)}
    # A fresh prompt may be readable where the first one was not.
    fresh = [row for row, prompt in enumerate(prompts.fresh) if prompt.word.token in place]
    found = {}
    for layer, x in streams.items():
        test = _readings(x[first:second], prompts.test)
        if prompts.fresh:
            measured = _readings(x[second:][fresh], [prompts.fresh[row] for row in fresh])
            rows = torch.tensor([place[prompts.fresh[row].word.token] for row in fresh], device=x.device)
        else:
            measured, rows = test, torch.arange(len(prompts.test), device=x.device)
        found[layer] = LayerReadings(_readings(x[:first], prompts.train), test, measured, rows)
    return found


def _read(
    model: LanguageModel, prompts: Sequence[Prompt], layers: Sequence[int], at_once: int, progress: Progress
) -> dict[int, Tensor]:
    """The residual stream at each prompt's last token, [n, d] float32 by layer."""
    streams = {layer: torch.empty(len(prompts), model.width, device=model.device) for layer in layers}
    lengths = np.array([len(prompt.tokens) for prompt in prompts])
    done = 0
    # Prompts of one length at a time, so that nothing is padded.
    for length in np.unique(lengths):
        same = np.flatnonzero(lengths == length)
        for start in range(0, len(same), at_once):
            rows = same[start : start + at_once]
            tokens = torch.from_numpy(np.stack([prompts[row].tokens for row in rows]))
            where = torch.from_numpy(rows).to(model.device)
            for layer, stream in model.activations(tokens, layers).items():
                streams[layer][where] = stream[:, -1].float()
            done += len(rows)
            progress(done, len(prompts))
    return streams


def _readings(x: Tensor, prompts: Sequence[Prompt]) -> Readings:
    letters = torch.tensor([prompt.word.letter for prompt in prompts], device=x.device)
    return Readings(x, letters, [prompt.word.text for prompt in prompts])
